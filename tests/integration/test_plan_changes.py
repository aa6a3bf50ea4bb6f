"""Ranks that continue with another plan: the same losses in fp64 as without a change, in the same processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.job import PipelineJob
from penstock.core.plan import Plan, Prediction
from penstock.core.remaking import SELECTIVE, full_remakes, uniform_remakes
from penstock.core.run.folder import RunDir
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Activity, Timeline
from penstock.planner.compile import program_of
from penstock.planner.schedules.registry import find
from tests.support.plan_changes import train_with_changes
from tests.support.training_run import losses, make_run, tiny_job, tiny_plan, train, train_in_pool, write_corpus
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

STEPS, CLOSE = 16, 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For all runs of this module, with a cache of its own for data."""
    root = tmp_path_factory.mktemp("plan-changes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield root


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Path:
    return write_corpus(folder / "corpus")


def job_in_fp64(corpus: Path, **changes: Any) -> PipelineJob:
    job = tiny_job(corpus, precision="fp64", steps=STEPS, warmupSteps=2, validateEvery=8, **changes)
    return job.with_spec(run_policy=replace(job.spec.run_policy, replan_on_drift=True))


def scheduled(plan: Plan, name: str) -> Plan:
    return replace(plan, schedule=ScheduleSpec(generator=name, version=find(name).version))


def recomputing(plan: Plan) -> Plan:
    return replace(plan, recompute=tuple(full_remakes(plan.model, stage) for stage in plan.stages))


def selective(plan: Plan) -> Plan:
    return replace(
        plan,
        recompute=tuple(uniform_remakes(plan.model, stage, SELECTIVE) for stage in plan.stages),
        recompute_inside=True,
    )


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "more slices": lambda plan: replace(plan, slices=(8,) * 8),
    "one slice": lambda plan: replace(plan, slices=(64,)),
    "another order": lambda plan: scheduled(plan, "zb-h1"),
    "recomputation": recomputing,
    "selective recomputation inside": selective,
    "larger micro-batches": lambda plan: replace(plan, microbatch=2, num_microbatches=plan.num_microbatches // 2),
    "keys by slice": lambda plan: replace(plan, prefix_by_slice=True, slices=(16,) * 4),
}


@pytest.fixture(scope="module")
def undisturbed(folder: Path, corpus: Path) -> RunDir:
    job = job_in_fp64(corpus)
    run = make_run(folder / "undisturbed", job, tiny_plan(job, 2))
    train(run)
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_plan_does_not_change_what_is_learnt(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir, name: str
) -> None:
    job = job_in_fp64(corpus)
    plan = tiny_plan(job, 2)
    other = CHANGES[name](plan)
    run = make_run(tmp_path / "run", job, plan)
    ends = train_with_changes(worker_pool, run, {4: other})
    program = program_of(other)
    assert ends == [(rank.arena_bytes, other.digest) for rank in program.ranks]
    assert run.read_plan() == other
    assert not run.next_plan.exists()
    assert not run.warnings.exists()
    assert losses(run) == pytest.approx(losses(undisturbed), abs=CLOSE)
    assert validations(run) == pytest.approx(validations(undisturbed), abs=CLOSE)
    assert {entry.attempt for entry in run.read_metrics()} == {1}


def timeline_of(run: RunDir, step: int) -> Timeline:
    return Timeline.from_manifest(json.loads((run.timelines / f"step-{step}.json").read_text()))


def validations(run: RunDir) -> list[float]:
    return [entry.validation_loss for entry in run.read_metrics() if entry.validation_loss is not None]


def test_plans_change_several_times_and_timelines_are_of_the_plan_that_ran(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir
) -> None:
    job = job_in_fp64(corpus)
    plan = tiny_plan(job, 2)
    run = make_run(tmp_path / "run", job, plan)
    fine, coarse = replace(plan, slices=(8,) * 8), replace(plan, slices=(64,))
    train_with_changes(worker_pool, run, {2: fine, 6: coarse, 10: scheduled(fine, "zb-h1")})
    assert losses(run) == pytest.approx(losses(undisturbed), abs=CLOSE)
    num_actions = {
        step: len({event.action for event in timeline_of(run, step).events if event.activity is Activity.COMPUTE})
        for step in (1, 5, 9, 15)
    }
    assert num_actions == {1: 4 * 3 * 4, 5: 4 * 8 * 4, 9: 4 * 1 * 4, 15: 4 * 8 * 6}


def test_steps_that_have_drifted_are_sampled(tmp_path: Path, corpus: Path, worker_pool: WorkerPool) -> None:
    """Next to the eight steps that are sampled anyway, here those of odd numbers."""
    job = job_in_fp64(corpus)
    run = make_run(tmp_path / "run", job, replace(tiny_plan(job, 2), prediction=predicted(1e-6)))
    train_in_pool(worker_pool, run)
    assert sorted(int(path.stem.removeprefix("step-")) for path in run.timelines.iterdir()) == [
        1,
        3,
        5,
        7,
        9,
        10,
        11,
        13,
        15,
    ]


def predicted(step_seconds: float, peak_bytes: int = 0) -> Prediction:
    return Prediction(
        step_seconds=step_seconds,
        compute_seconds=step_seconds,
        bubble_seconds=0.0,
        communication_seconds=0.0,
        reduction_seconds=0.0,
        optimizer_seconds=0.0,
        peak_bytes=(peak_bytes,) * 2,
        slot_bytes=(0, 0),
    )


@pytest.mark.parametrize(("family", "dp", "zero"), [("gpt2", 1, 0), ("gpt2", 2, 0), ("llama", 2, 1), ("gpt2", 2, 1)])
def test_replicas_and_tied_matrices_change_together(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, family: str, dp: int, zero: int
) -> None:
    job = job_in_fp64(corpus, family=family)
    plan = replace(tiny_plan(job, 2, dp=dp), zero=zero)
    straight = make_run(tmp_path / "straight", job, plan)
    train_in_pool(worker_pool, straight)
    run = make_run(tmp_path / "run", job, plan)
    train_with_changes(worker_pool, run, {4: scheduled(replace(plan, slices=(16,) * 4), "zb-h1")})
    assert not run.warnings.exists()
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)


def test_a_later_attempt_resumes_by_the_plan_that_ran_last(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir
) -> None:
    job = job_in_fp64(corpus, every_steps=8)
    plan = tiny_plan(job, 2)
    run = make_run(tmp_path / "run", job, plan)
    train_with_changes(worker_pool, run, {4: replace(plan, slices=(8,) * 8)})
    for folder in run.checkpoints.glob("a1/step-16"):
        (folder / "manifest.json").unlink()
    train_in_pool(worker_pool, run, attempt=2)
    assert run.read_plan().slices == (8,) * 8
    assert losses(run) == pytest.approx(losses(undisturbed), abs=CLOSE)


REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "stages": (lambda plan: replace(plan, stages=((0, 2), (2, 6))), "because it changes the stages"),
    "job": (lambda plan: replace(plan, num_microbatches=2), "is of another job: its global batch is 2, here it is 4"),
    "memory": (lambda plan: replace(plan, prediction=predicted(1.0, 2**40)), "the plan needs 1 TiB on rank"),
    "digest": (lambda plan: replace(plan, program_digest="0" * 64), "describes another Program"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_taken_is_refused_and_the_run_goes_on(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir, name: str
) -> None:
    job = job_in_fp64(corpus)
    plan = tiny_plan(job, 2)
    change, message = REFUSED[name]
    run = make_run(tmp_path / "run", job, plan)
    ends = train_with_changes(worker_pool, run, {4: change(plan)})
    assert {digest for _, digest in ends} == {plan.digest}
    assert message in run.warnings.read_text()
    assert run.read_plan() == plan
    assert not run.next_plan.exists()
    assert losses(run) == losses(undisturbed)


def test_a_job_that_may_not_be_planned_again_takes_no_plan(
    tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir
) -> None:
    job = job_in_fp64(corpus)
    job = job.with_spec(run_policy=replace(job.spec.run_policy, replan_on_drift=False))
    plan = tiny_plan(job, 2)
    run = make_run(tmp_path / "run", job, plan)
    ends = train_with_changes(worker_pool, run, {4: replace(plan, slices=(64,))})
    assert {digest for _, digest in ends} == {plan.digest}
    assert losses(run) == losses(undisturbed)


def test_what_is_no_plan_is_refused(tmp_path: Path, corpus: Path, worker_pool: WorkerPool, undisturbed: RunDir) -> None:
    job = job_in_fp64(corpus)
    run = make_run(tmp_path / "run", job, tiny_plan(job, 2))
    write_json(run.next_plan, {"slices": "many"})
    train_in_pool(worker_pool, run)
    assert "the new one was refused" in run.warnings.read_text()
    assert losses(run) == losses(undisturbed)
