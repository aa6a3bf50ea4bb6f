"""Real ranks are planned again while they train, and continue with another plan in the same processes: by `penstock
run`, and under the supervisor of a service.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.agent import replanner
from penstock.agent.executor import Executor
from penstock.agent.mailbox import FolderMailbox
from penstock.agent.run_state import RunState
from penstock.agent.supervisor import Supervisor
from penstock.agent.workers import LocalWorkers
from penstock.core import replanning
from penstock.core.host.stopping import StopRequests
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.plan import Plan, Prediction
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.run.rank_status import read_status, status_path
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, SupervisorRequest
from penstock.planner.replay import simulated
from penstock.planner.worker.process import ProcessPlanner
from tests.support.planning import profile_for
from tests.support.running_locally import FakeDecider, Recording
from tests.support.training_run import losses, make_run, tiny_job, tiny_plan, write_corpus

STEPS_AFTER, MOST_POLLS = 20, 4000


@pytest.fixture(autouse=True)
def _changes_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search begins after half a second of drift, and only a change in the same processes pays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(replanner, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(replanner, "RESTART_STARTS", 1e6)
    monkeypatch.setattr(replanning, "CHANGE_SECONDS", 0.0)


class Planned(FakeDecider):
    """The plan that the test chose."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(has_profile=True)
        self._plan = plan


class Scene:
    """A run in this process with real ranks; it is stopped by its user after as many steps as ``until`` says."""

    def __init__(self, root: Path, job: PipelineJob, plan: Plan) -> None:
        self.run = make_run(root, job, plan)
        write_json(self.run.profile, profile_for(job.spec, num_ranks=2).to_manifest())
        self.requests, self.show = StopRequests(), Recording()
        self.until: int | None = None
        self.pids: set[int] = set()
        self.changed_at: int | None = None
        self.polls = 0
        self.executor = Executor(
            job,
            self.run,
            RunState(),
            workers=LocalWorkers(()),
            decider=Planned(plan),
            show=self.show,
            requests=self.requests,
            planner=ProcessPlanner(),
            pause=self._pause,
        )
        self._plan = plan

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self.polls += 1
        statuses = [read_status(status_path(self.run.status, rank)) for rank in range(2)]
        self.pids |= {status.pid for status in statuses if status is not None}
        done = len(self.show.steps)
        if self.changed_at is None and self.run.read_plan() != self._plan:
            self.changed_at, self.until = done, done + STEPS_AFTER
        is_over = self.until is not None and done >= self.until
        if (is_over or self.polls > MOST_POLLS) and not self.requests.received:
            self.requests.received.append(signal.SIGINT)


def test_a_run_that_has_drifted_continues_by_a_better_plan_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with a plan in which no two ranks ever compute at the same time, and predicts far too short steps."""
    job, serial = serial_job(tmp_path)
    scene = Scene(tmp_path / "run", job, serial)
    state = scene.executor.run()
    assert scene.changed_at is not None, scene.show.notes
    assert (state.phase, state.attempt, state.failures) == (Phase.SUSPENDED, 1, 0)
    assert len(scene.pids) == 2, "the ranks are the same processes"
    assert not scene.run.warnings.exists()
    plan = scene.run.read_plan()
    assert (plan.stages, plan.num_microbatches * len(plan.slices) > 1) == (serial.stages, True)
    assert plan.profile_digest == scene.run.read_profile().digest
    assert any("a change in the same processes" in note for note in scene.show.notes)

    monkeypatch.setattr(replanner, "PATIENCE_SECONDS", 1e6)
    undisturbed = Scene(tmp_path / "undisturbed", job, serial)
    undisturbed.until = len(losses(scene.run))
    undisturbed.executor.run()
    count = min(len(losses(scene.run)), len(losses(undisturbed.run)))
    assert count > scene.changed_at + 5
    assert losses(scene.run)[:count] == pytest.approx(losses(undisturbed.run)[:count], abs=1e-10)


def serial_job(folder: Path) -> tuple[PipelineJob, Plan]:
    """A job, and a plan in which no two ranks ever compute at the same time, and whose predicted step is far too short:
    the profile of these tests is far faster than any machine.
    """
    job = tiny_job(write_corpus(folder / "corpus"), precision="fp64", steps=5000, warmupSteps=5, every_steps=5000)
    job = job.with_spec(
        resources=replace(job.spec.resources, ranks=2),
        run_policy=replace(job.spec.run_policy, replan_on_drift=True),
    )
    serial = replace(tiny_plan(job, 2), slices=(64,), microbatch=4, num_microbatches=1)
    step_seconds = simulated(serial, profile_for(job.spec, num_ranks=2)).timeline.step_ns / 1e9
    assert step_seconds < 0.005
    return job, with_prediction(serial, step_seconds)


def test_a_supervised_attempt_that_has_drifted_continues_with_a_better_plan(tmp_path: Path) -> None:
    """Its reports have the plan and the decision."""
    job, plan = serial_job(tmp_path)
    run = make_run(tmp_path / "run", job, plan)
    write_json(run.profile, profile_for(job.spec, num_ranks=2).to_manifest())
    folder = AttemptFolder(run.root, 1)
    folder.path.mkdir(parents=True)
    write_json(folder.binding, Binding(plan_digest=plan.digest).to_manifest())
    deadline = time.monotonic() + 240

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        is_changed = bool(AttemptReport.from_manifest(json.loads(folder.report.read_text())).plan_digest)
        if is_changed or time.monotonic() > deadline:
            folder.request(SupervisorRequest.STOP).touch()

    supervisor = Supervisor(
        job,
        run,
        1,
        FolderMailbox(folder),
        workers=LocalWorkers(()),
        decider=Planned(plan),
        requests=StopRequests(),
        planner=ProcessPlanner(),
        pause=pause,
    )
    report = supervisor.run()
    assert (report.state, report.better_plan) == (AttemptState.STOPPED, False), report
    assert report.replanning.startswith("the run continues with another plan: ")
    changed = run.read_plan()
    assert report.plan_digest == changed.digest
    assert (changed.stages, changed.num_microbatches * len(changed.slices) > 1) == (plan.stages, True)
    assert changed.profile_digest == run.read_profile().digest


def with_prediction(plan: Plan, step_seconds: float) -> Plan:
    return replace(
        plan,
        prediction=Prediction(
            step_seconds=step_seconds,
            compute_seconds=step_seconds,
            bubble_seconds=0.0,
            communication_seconds=0.0,
            reduction_seconds=0.0,
            optimizer_seconds=0.0,
            peak_bytes=(0, 0),
            slot_bytes=(0, 0),
        ),
    )
