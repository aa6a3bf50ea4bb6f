"""A pod's files, as a kubelet leaves them: late, twice, or of somebody else."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.agent.endpoint import AgentFiles
from penstock.agent.pod_files import PodFiles
from penstock.agent.pod_mailbox import PLAN_SECONDS, PodMailbox
from penstock.core.errors import RunError, UserError
from penstock.core.lifecycle import AttemptState
from penstock.core.pod import PLAN_FILE
from penstock.core.run.folder import RunDir
from penstock.core.supervision import AttemptReport, SupervisorRequest
from tests.support.pods import Attempt, PodFolder, identified
from tests.support.sample_run import sample_plan
from tests.support.supervised import sample_job


class Bench:
    """A mailbox on simulated time."""

    def __init__(self, root: Path) -> None:
        self.attempt = Attempt(root, identified(sample_job()), number=3)
        self.run = RunDir(root / "run")
        self.run.create()
        self.now = 0.0
        self.said: list[str] = []
        pod = self.pod
        files = PodFiles(attempt=pod.attempt_files, pod=pod.pod_files, termination=pod.termination)
        agent = AgentFiles(pod.folders(3, self.attempt.out), "uid", self.run)
        self.box = PodMailbox(files, self.run, pod.uid, 3, say=self.said.append, agent=agent, clock=lambda: self.now)

    @property
    def pod(self) -> PodFolder:
        return self.attempt.pods[1]

    @property
    def plan_file(self) -> Path:
        return self.pod.attempt_files / PLAN_FILE


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_before_anything_is_written_nothing_is_wished(bench: Bench) -> None:
    assert bench.box.place is None
    assert not any(bench.box.is_requested(request) for request in SupervisorRequest)
    assert bench.box.binding() is None


def test_files_that_are_not_there_say_nothing(bench: Bench) -> None:
    for path in bench.pod.pod_files.iterdir():
        path.unlink()
    assert not any(bench.box.is_requested(request) for request in SupervisorRequest)


def test_epoch_0_wishes_a_measurement_and_epoch_1_none(bench: Bench) -> None:
    bench.attempt.measure()
    assert bench.box.is_requested(SupervisorRequest.MEASURE)
    assert bench.box.binding() is None
    assert bench.box.place == bench.attempt.binding(1, 0)
    bench.attempt.train(sample_plan())
    assert not bench.box.is_requested(SupervisorRequest.MEASURE)
    binding = bench.box.binding()
    assert binding is not None
    assert binding.plan_digest == sample_plan().digest
    assert bench.run.read_plan() == sample_plan()


def test_a_plan_that_another_pod_put_is_left_as_it_is(bench: Bench) -> None:
    bench.attempt.train(sample_plan())
    bench.run.plan.write_text("{")
    assert bench.box.binding() is not None
    found = bench.run.plan.stat()
    assert bench.box.binding() is not None
    assert bench.run.plan.stat() == found


def test_a_stop_is_any_text(bench: Bench) -> None:
    bench.pod.ask_to_stop()
    assert bench.box.is_requested(SupervisorRequest.STOP)


def test_the_binding_of_the_pod_that_had_its_name_before_is_not_heeded(bench: Bench) -> None:
    bench.attempt.give(sample_plan())
    for other in ({"pod_uid": "before"}, {"attempt": 2}):
        bench.pod.bind(replace(bench.attempt.binding(1, 1, sample_plan()), **other))
        assert bench.box.binding() is None
        assert not bench.box.is_requested(SupervisorRequest.MEASURE)


@pytest.mark.parametrize("text", ["{", '{"podUid": "x"}', "[]"])
def test_a_binding_that_is_none_is_refused(bench: Bench, text: str) -> None:
    (bench.pod.pod_files / "binding").write_text(text)
    with pytest.raises(UserError, match="binding"):
        bench.box.binding()


def test_a_plan_may_come_later_than_its_binding(bench: Bench) -> None:
    plan = sample_plan()
    bench.pod.bind(bench.attempt.binding(1, 1, plan))
    assert bench.box.binding() is None
    bench.now = PLAN_SECONDS - 1
    assert bench.box.binding() is None
    bench.attempt.give(plan)
    assert bench.box.binding() is not None


def test_a_plan_that_does_not_come_ends_the_attempt(bench: Bench) -> None:
    plan = sample_plan()
    bench.pod.bind(bench.attempt.binding(1, 1, plan))
    bench.box.binding()
    bench.now = PLAN_SECONDS
    with pytest.raises(RunError, match=rf"plan {plan.digest[:12]} has not arrived after 300 s"):
        bench.box.binding()


def test_another_plan_is_never_trained(bench: Bench) -> None:
    """It may be the one before, which the kubelet has not replaced yet, so it is waited for too."""
    wanted, other = sample_plan(), replace(sample_plan(), receive_ahead=7)
    bench.attempt.give(other)
    bench.pod.bind(bench.attempt.binding(1, 1, wanted))
    assert bench.box.binding() is None
    assert not bench.run.plan.exists()
    bench.now = PLAN_SECONDS
    with pytest.raises(RunError, match=f"holds plan {other.digest[:12]}, and the pod is bound to {wanted.digest[:12]}"):
        bench.box.binding()


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{"), gzip.compress(b"[]" * 999)[:-20]],
    ids=["empty", "no gzip", "no JSON", "cut"],
)
def test_a_plan_that_cannot_be_read_is_said(bench: Bench, content: bytes) -> None:
    bench.plan_file.write_bytes(content)
    bench.pod.bind(bench.attempt.binding(1, 1, sample_plan()))
    assert bench.box.binding() is None
    bench.now = PLAN_SECONDS
    with pytest.raises(RunError, match=rf"{PLAN_FILE}: cannot be read: .* after 300 s"):
        bench.box.binding()


def test_a_plan_of_another_version_is_refused_with_its_field(bench: Bench) -> None:
    bench.plan_file.write_bytes(gzip.compress(json.dumps({**sample_plan().to_manifest(), "colour": 1}).encode()))
    bench.pod.bind(bench.attempt.binding(1, 1, sample_plan()))
    with pytest.raises(UserError, match=r"plan.colour: unknown field"):
        bench.box.binding()


def test_only_the_end_is_told_and_changes_are_said(bench: Bench) -> None:
    for step in range(3):
        bench.box.report(AttemptReport(state=AttemptState.RUNNING, last_checkpoint=step))
    assert bench.pod.termination.read_text() == ""
    ended = AttemptReport(state=AttemptState.FAILED, message="no step within 60 s")
    bench.box.report(ended)
    assert bench.pod.report() == ended
    assert bench.said == [
        "attempt running, profile missing",
        "attempt failed, profile missing: no step within 60 s",
    ]
