"""Which profile and which plan serve a job, and what is done when none does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.agent.plans import LocalDecider, serves
from penstock.agent.probe import Identity
from penstock.agent.profiles import Profiles, require_fit, unfit
from penstock.core.errors import UserError
from penstock.core.host.stopping import StopRequestedError, listening
from penstock.core.job import JobSpec, ParallelismSpec, PipelineJob
from penstock.core.layout import Operation, Precision
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.profile_matching import OLDEST_SECONDS
from penstock.core.remaking import Recompute, uniform_remakes
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.planner.pins import pinned_stages
from penstock.planner.worker.process import ProcessPlanner
from penstock.planner.worker.protocol import Progress
from tests.support.local_run import local_identity, local_job, local_plan, local_profile
from tests.support.run_files import add_checkpoint

NOW = local_profile().measured_at + 60.0


def spec(**changes: Any) -> JobSpec:
    return local_job(**changes).spec


# Profiles


def test_a_profile_of_this_machine_serves() -> None:
    assert unfit(local_profile(), spec(), local_identity(local_job()), NOW) is None


def changed_key(**changes: Any) -> Profile:
    return dataclasses.replace(local_profile(), key=dataclasses.replace(local_profile().key, **changes))


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (changed_key(host="other"), "host is other, on this one it is build-7"),
        (changed_key(num_cores=64), "numCores is 64, on this one it is 2"),
        (changed_key(torch_version="3.0"), "torchVersion"),
        (changed_key(trainer="0"), "another version of the trainer"),
        (dataclasses.replace(local_profile(), model_digest="0"), "another model"),
        (dataclasses.replace(local_profile(), precision=Precision.BF16), "bf16"),
        (dataclasses.replace(local_profile(), num_ranks=4), "4 ranks"),
        (dataclasses.replace(local_profile(), units=local_profile().units[:3]), "micro-batch"),
        (dataclasses.replace(local_profile(), measured_at=NOW - OLDEST_SECONDS - 1), "7 days old"),
    ],
)
def test_another_profile_does_not_serve_and_says_why(profile: Profile, reason: str) -> None:
    identity = local_identity(local_job())
    assert reason in (unfit(profile, spec(), identity, NOW) or "")
    with pytest.raises(UserError) as found:
        require_fit(profile, Path("p.json"), spec(), identity, NOW)
    assert found.value.where == "p.json"
    assert "penstock profile" in found.value.remedy


def test_a_kept_profile_is_found(tmp_path: Path) -> None:
    profiles, identity = Profiles(tmp_path / "profiles"), local_identity(local_job())
    assert profiles.find(spec(), identity, [], NOW) is None
    profiles.keep(local_profile(), identity)
    assert profiles.find(spec(), identity, [], NOW) == local_profile()
    assert profiles.find(spec(), identity, [], NOW + OLDEST_SECONDS) is None


@pytest.mark.parametrize("change", [{"model_digest": "other"}, {"precision": Precision.BF16}, {"num_ranks": 8}])
def test_profiles_of_other_things_are_kept_apart(tmp_path: Path, change: dict[str, Any]) -> None:
    profiles, identity = Profiles(tmp_path), local_identity(local_job())
    assert profiles.path(identity) != profiles.path(dataclasses.replace(identity, **change))


def test_the_run_directorys_profile_comes_first(tmp_path: Path) -> None:
    profiles, identity = Profiles(tmp_path / "profiles"), local_identity(local_job())
    profiles.keep(local_profile(), identity)
    newer = dataclasses.replace(local_profile(), measured_at=NOW)
    write_json(tmp_path / "profile.json", newer.to_manifest())
    assert profiles.find(spec(), identity, [tmp_path / "profile.json"], NOW) == newer


# Plans


def test_a_plan_serves_the_job_it_was_made_for() -> None:
    assert serves(local_plan(), spec())


@pytest.mark.parametrize(
    "changes",
    [
        {"model__hidden": 128},
        {"training__precision": "bf16"},
        {"training__optimizer": {"momentType": "bf16"}},
        {"training__gradientReductionType": "bf16"},
        {"training__globalBatch": 8},
        {"data__sequenceLength": 512},
        {"resources__ranks": 1},
        {"resources__memoryPerRank": "1Mi"},
    ],
)
def test_a_plan_does_not_serve_another_job(changes: dict[str, Any]) -> None:
    assert not serves(local_plan(), spec(**changes))


def test_what_does_not_concern_the_plan_may_change() -> None:
    changes = {"training__seed": 5, "checkpoint": {"everySteps": 1}, "runPolicy__backoffLimit": 0}
    assert serves(local_plan(), spec(**changes, training__steps=9))


def test_a_plan_obeys_pins_that_say_the_same() -> None:
    plan = local_plan()
    pinned = ParallelismSpec(
        dp=plan.dp,
        tp=plan.tp,
        pp=plan.pp,
        micro_batch=plan.microbatch,
        slices=plan.slices,
        schedule=plan.schedule.generator,
        stages=plan.blocks,
    )
    assert serves(plan, dataclasses.replace(spec(), parallelism=pinned))
    counted = dataclasses.replace(pinned, slices=len(plan.slices), schedule=plan.schedule)
    assert serves(plan, dataclasses.replace(spec(), parallelism=counted))


@pytest.mark.parametrize(
    "pinned",
    [
        {"dp": 2},
        {"pp": 1},
        {"microBatch": 4},
        {"slices": 7},
        {"slices": [1000, 24]},
        {"schedule": "no-such"},
        {"stages": [1, 7]},
    ],
)
def test_a_plan_does_not_obey_other_pins(pinned: dict[str, Any]) -> None:
    assert not serves(local_plan(), spec(parallelism=pinned))


def test_a_plan_makes_again_what_is_pinned() -> None:
    """A schedule that names recomputation makes everything of these stages again, whatever is pinned for others."""
    plan = local_plan()
    kept = {pin: dataclasses.replace(spec(), parallelism=ParallelismSpec(recompute=pin)) for pin in Recompute}
    for made, plan_of in ((pin, _recomputed(plan, pin)) for pin in Recompute):
        assert serves(plan_of, spec())
        assert [pin for pin in Recompute if serves(plan_of, kept[pin])] == [made]
    remakes = uniform_remakes(plan.model, plan.stages[0], (Operation.NORM,))
    partly = dataclasses.replace(plan, recompute=(remakes, *((),) * (len(plan.stages) - 1)))
    assert not any(serves(partly, job) for job in kept.values())


def _recomputed(plan: Plan, pin: Recompute) -> Plan:
    remakes = tuple(uniform_remakes(plan.model, stage, pin.operations) for stage in plan.stages)
    return dataclasses.replace(plan, recompute=remakes if any(remakes) else ())


def test_a_plan_divides_hidden_states_as_is_pinned_where_there_are_shards() -> None:
    plan = dataclasses.replace(local_plan(), tp=2, placement=())
    by_default = spec(resources__ranks=plan.num_ranks)
    whole = dataclasses.replace(by_default, parallelism=ParallelismSpec(sequence_parallel=False))
    assert (serves(plan, by_default), serves(plan, whole)) == (True, False)
    replicated = dataclasses.replace(plan, sequence_parallel=False)
    assert (serves(replicated, by_default), serves(replicated, whole)) == (False, True)
    assert serves(local_plan(), whole)


@pytest.mark.parametrize("blocks", [(4.0, 4.0), (4.5, 3.5), (8.0,), (0.0, 8.0), (1.0, 2.5, 4.5)])
def test_blocks_are_what_pinning_them_gives(blocks: tuple[float, ...]) -> None:
    plan = local_plan()
    stages = pinned_stages(blocks, plan.model.num_units)
    if all(first < stop for first, stop in stages):
        pinned = dataclasses.replace(plan, stages=stages, pp=len(stages), placement=())
        assert pinned.blocks == blocks


# Both, for one run


def decider(root: Path, job: PipelineJob | None = None) -> LocalDecider:
    run = RunDir(root / "run")
    run.create()
    job = job or local_job()
    return LocalDecider(job, run, Profiles(root / "cache"), identify=_identify, clock=lambda: NOW)


def _identify(spec: JobSpec) -> Identity:
    return local_identity(local_job())


def test_at_first_there_is_nothing(tmp_path: Path) -> None:
    found = decider(tmp_path)
    assert not found.find_profile()
    assert found.find_plan() is None


def test_a_new_profile_is_kept_for_other_runs(tmp_path: Path) -> None:
    first = decider(tmp_path)
    write_json(tmp_path / "run" / "profile.json", local_profile().to_manifest())
    first.keep_profile()
    (tmp_path / "run" / "profile.json").unlink()
    assert decider(tmp_path).find_profile()
    assert json.loads((tmp_path / "run" / "profile.json").read_text()) == local_profile().to_manifest()


def test_a_plan_needs_no_profile(tmp_path: Path) -> None:
    """A run that goes on keeps its plan, whatever became of the measurements."""
    found = decider(tmp_path)
    write_json(tmp_path / "run" / "plan.json", local_plan().to_manifest())
    assert found.find_profile()
    assert found.find_plan() == local_plan()


def test_a_plan_does_not_make_up_for_a_missing_device(tmp_path: Path) -> None:
    def identify(spec: JobSpec) -> Identity:
        raise UserError(what="no NVIDIA device is here")

    job = local_job(resources__device="cuda")
    found = LocalDecider(job, RunDir(tmp_path), Profiles(tmp_path), identify=identify, clock=lambda: NOW)
    write_json(tmp_path / "plan.json", local_plan().to_manifest())
    with pytest.raises(UserError, match="no NVIDIA device"):
        found.find_profile()


def test_a_plan_of_another_job_is_not_found(tmp_path: Path) -> None:
    found = decider(tmp_path, local_job(training__globalBatch=8))
    write_json(tmp_path / "run" / "plan.json", local_plan().to_manifest())
    assert found.find_plan() is None


def test_planning_writes_the_plan_it_returns(tmp_path: Path) -> None:
    job = local_job(parallelism={"pp": 2, "microBatch": 1, "slices": 2, "schedule": "1f1b", "stages": [4, 4]})
    found = decider(tmp_path, job)
    write_json(tmp_path / "run" / "profile.json", local_profile().to_manifest())
    reports: list[Progress] = []
    plan = found.plan(reports.append)
    assert found.find_plan() == plan
    assert (plan.pp, len(plan.slices), plan.schedule.generator) == (2, 2, "1f1b")
    assert reports


def test_a_deadline_that_no_plan_holds_refuses_a_job_without_a_checkpoint_alone(tmp_path: Path) -> None:
    pins = {"pp": 2, "microBatch": 1, "slices": 2, "schedule": "1f1b", "stages": [4, 4]}
    found = decider(tmp_path, local_job(parallelism=pins, deadlineSeconds=1, training__steps=10**6))
    run = RunDir(tmp_path / "run")
    write_json(run.profile, local_profile().to_manifest())
    with pytest.raises(UserError) as refused:
        found.plan(lambda progress: None)
    assert refused.value.where == "spec.deadlineSeconds"
    add_checkpoint(run.root, 1, 40)
    assert found.plan(lambda progress: None).pp == 2


SLEEPS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"


def sleeping(root: Path, seconds: float) -> tuple[LocalDecider, Path]:
    """A decider whose planning process sleeps, and the file into which that writes its number."""
    run, note = RunDir(root / "run"), root / "pid"
    run.create()
    write_json(run.profile, local_profile().to_manifest())
    planner = ProcessPlanner((sys.executable, "-c", SLEEPS, str(note)), seconds=seconds)
    decider = LocalDecider(local_job(), run, Profiles(root), identify=_identify, clock=lambda: NOW, planner=planner)
    return decider, note


def test_a_run_s_search_ends_at_its_limit_of_time(tmp_path: Path) -> None:
    """As `penstock plan`: it used to search in the command's own process, without a limit."""
    found, _ = sleeping(tmp_path, seconds=0.5)
    with pytest.raises(UserError, match=re.escape("planning took over 0.5 s")) as error:
        found.plan(lambda progress: None)
    assert error.value.remedy == "plan a smaller search: pin dp, pp or slices"
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_stop_ends_the_process_that_plans_for_a_run(tmp_path: Path) -> None:
    found, note = sleeping(tmp_path, seconds=600)

    def interrupted(progress: Progress) -> None:
        if note.exists() and note.read_text():
            os.kill(os.getpid(), signal.SIGINT)

    with listening() as requests, pytest.raises(StopRequestedError), requests.cutting():
        found.plan(interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_corrupt_profile_is_named(tmp_path: Path) -> None:
    found = decider(tmp_path)
    (tmp_path / "run" / "profile.json").write_text("{}")
    with pytest.raises(UserError) as error:
        found.find_profile()
    assert "profile.json" in error.value.where
