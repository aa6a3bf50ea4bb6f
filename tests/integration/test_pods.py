"""Pods of an attempt as real processes: bound, measured, planned, trained, stopped, killed; all on the loopback."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.agent import pod as pod_module
from penstock.agent.pod import Pod, run_pod
from penstock.agent.pod_files import PodFiles
from penstock.agent.stalling import RankSteps
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.plan import Plan
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import read_records
from penstock.core.run.rank_status import RankStatus, State, read_status, status_path
from penstock.core.supervision import AttemptReport
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from tests.support.not_run import missing
from tests.support.pods import Attempt, PodFolder, identified
from tests.support.training_run import losses, make_run, tiny_job, tiny_plan, train, write_corpus

pytestmark = [pytest.mark.xdist_group("pods"), pytest.mark.timeout(900)]

NOTICED_SECONDS = 10.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With data that a job may name, and where to train it on one machine."""
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data" / "words")
    return tmp_path


def job_of(steps: int, *, every_steps: int = 20) -> PipelineJob:
    return identified(tiny_job("data://words/corpus.txt", every_steps=every_steps, steps=steps))


def straight(root: Path, job: PipelineJob, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of the same plan in one launch on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    steps = job.spec.training.steps
    run = make_run(root / "straight", tiny_job(root / "data" / "words" / "corpus.txt", steps=steps), plan)
    train(run)
    return losses(run)


def status_of(pod: PodFolder, rank: int) -> RankStatus | None:
    return read_status(status_path(pod.local / "status", rank))


def steps_taken(attempt: Attempt, count: int) -> bool:
    return attempt.run.metrics.exists() and attempt.run.metrics.read_text().count("\n") >= count


def states(reports: list[AttemptReport]) -> list[AttemptState]:
    return [report.state for report in reports]


def test_two_pods_measure_wait_and_train_the_losses_of_one_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has a binding of somebody else for a while; the plan comes later than its binding."""
    job = job_of(6)
    attempt = Attempt(root, job)
    first, second = attempt.pods
    with attempt.started() as processes:
        first.bind(attempt.binding(0, 0))
        for theirs in (attempt.binding(0, 0), attempt.binding(0, 1, tiny_plan(job, 2))):
            second.bind(theirs)
            time.sleep(0.5)
        second.bind(attempt.binding(1, 0))
        attempt.wait_until(lambda: b"profile done" in first.log.read_bytes(), processes)
        profile = attempt.run.read_profile()
        assert (profile.num_ranks, profile.hosts, profile.key.host) == (2, (), "node-0,node-1")
        plan = decide(problem_from_profile(job.spec, profile)).plan
        for node_rank, pod in enumerate(attempt.pods):
            pod.bind(attempt.binding(node_rank, 1, plan))
        time.sleep(1)
        attempt.give(plan)
        reports = attempt.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 2, attempt.said()
    assert [process.returncode for process in processes] == [0, 0]
    assert {(report.profile, report.last_checkpoint, report.num_ranks) for report in reports} == {(Step.DONE, 6, 2)}
    assert losses(attempt.run) == straight(root, job, plan, monkeypatch)
    (record,) = read_records(attempt.run.root / "hosts" / first.uid / "outbox" / "a1-profile.jsonl")
    assert record.profile == profile
    outboxes = {path.relative_to(attempt.run.root / "hosts") for path in attempt.run.root.glob("hosts/*/outbox/*")}
    of_first_rank = attempt.pods[plan.placement[0] if plan.placement else 0]
    told = ((first, "a1-profile.jsonl"), (of_first_rank, "a1-rank-0.jsonl"))
    assert outboxes == {Path(pod.uid) / "outbox" / name for pod, name in told}
    assert len(list((root / "out" / job.metadata.uid / "data").glob("*/prepared.json"))) == 1


def test_ranks_are_where_the_placement_says_and_devices_without_work_wait(root: Path) -> None:
    """Two pods of two devices where there is work for two: the first rank is on the second pod."""
    job = job_of(2)
    attempt = Attempt(root, job, ranks_per_pod=2)
    with attempt.started() as processes:
        attempt.train(dataclasses.replace(tiny_plan(job, 2), placement=(3, 0)))
        reports = attempt.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 2, attempt.said()
    said = {
        (pod.uid, log.parent.name): log.read_text().partition("\n")[0]
        for pod in attempt.pods
        for log in (attempt.run.root / "hosts" / pod.uid).glob("logs/a1/*/attempt_0/*/stdout.log")
    }
    assert said == {
        (attempt.pods[0].uid, "0"): "rank 1 of 2 is ready on cpu",
        (attempt.pods[0].uid, "1"): "",
        (attempt.pods[1].uid, "0"): "",
        (attempt.pods[1].uid, "1"): "rank 0 of 2 is ready on cpu",
    }
    ranks = zip(attempt.pods, ((1, 2), (3, 0)), strict=True)
    statuses = [status_of(pod, rank) for pod, of_pod in ranks for rank in of_pod]
    assert [status.state for status in statuses if status] == [State.DONE] * 4


def test_four_pods_train_replicas_in_the_planner_s_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a stage are neighbours there, so ranks are not in the order of pods."""
    job = job_of(3)
    plan = tiny_plan(job, 2, dp=2)
    attempt = Attempt(root, job, num_pods=4)
    with attempt.started() as processes:
        attempt.train(dataclasses.replace(plan, placement=(0, 2, 1, 3)))
        reports = attempt.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 4, attempt.said()
    assert [status_of(pod, rank) is not None for pod, rank in zip(attempt.pods, (0, 2, 1, 3), strict=True)] == [
        True
    ] * 4
    assert losses(attempt.run) == straight(root, job, plan, monkeypatch)


def test_shards_train_in_their_pods(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods of two devices: each has the shards of a stage, the first stage's on the second pod."""
    job = job_of(3)
    plan = dataclasses.replace(tiny_plan(job, 2), tp=2)
    attempt = Attempt(root, job, ranks_per_pod=2)
    with attempt.started() as processes:
        attempt.train(dataclasses.replace(plan, placement=(2, 0)))
        reports = attempt.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 2, attempt.said()
    ranks = zip(attempt.pods, ((2, 3), (0, 1)), strict=True)
    assert all(status_of(pod, rank) is not None for pod, of_pod in ranks for rank in of_pod)
    assert losses(attempt.run) == straight(root, job, plan, monkeypatch)


def test_stopped_and_resumed_as_another_attempt_with_equal_losses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet tells one pod, and all stop after the same step."""
    job = job_of(40)
    plan = tiny_plan(job, 2)
    first = Attempt(root, job)
    with first.started() as processes:
        first.train(plan)
        first.wait_until(lambda: steps_taken(first, 3), processes)
        processes[1].send_signal(signal.SIGTERM)
        reports = first.ended(processes)
    assert states(reports) == [AttemptState.STOPPED] * 2, first.said()
    assert [process.returncode for process in processes] == [0, 0]
    before = losses(first.run)
    assert {report.last_checkpoint for report in reports} == {len(before)}
    second = Attempt(root, job, number=2)
    with second.started() as processes:
        second.train(plan)
        reports = second.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 2, second.said()
    after = second.run.read_metrics()
    assert [each.step for each in after] == list(range(len(before), 40))
    assert before + [each.loss for each in after] == straight(root, job, plan, monkeypatch)


def test_a_killed_rank_ends_both_pods_soon_and_is_named(root: Path) -> None:
    job = job_of(5000)
    attempt = Attempt(root, job)
    with attempt.started() as processes:
        attempt.train(tiny_plan(job, 2))
        attempt.wait_until(lambda: steps_taken(attempt, 3), processes)
        victim = status_of(attempt.pods[1], 1)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        reports = attempt.ended(processes, NOTICED_SECONDS)
    assert states(reports) == [AttemptState.FAILED] * 2
    assert [process.returncode for process in processes] == [1, 1]
    peer, killed = reports
    assert killed.message.startswith(f"rank 1 (process {victim.pid}) was killed")
    assert re.search(r"rank 0, step \d+: \S+( on channel \S+)? failed: ", peer.message)
    assert not any(report.refused for report in reports)


def test_a_hung_rank_is_noticed_without_anybody_s_help(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pod is in this process, where twenty seconds of silence pass in one."""
    job = job_of(5000, every_steps=5000)
    attempt = Attempt(root, job)
    begin = time.monotonic()
    fast = functools.partial(RankSteps, clock=lambda: 20 * (time.monotonic() - begin))
    monkeypatch.setattr(pod_module, "RankSteps", fast)
    stopped: list[tuple[int, float]] = []

    def hang() -> None:
        while not (steps_taken(attempt, 3) and (victim := status_of(attempt.pods[1], 1))):
            time.sleep(0.05)
        os.kill(victim.pid, signal.SIGSTOP)
        stopped.append((victim.pid, time.monotonic()))

    first = attempt.pods[0]
    files = PodFiles(attempt=first.attempt_files, pod=first.pod_files, termination=first.termination)
    pod = Pod(folders=first.folders(1, attempt.out), files=files, data=attempt.data)
    with attempt.started(first=1):
        attempt.train(tiny_plan(job, 2))
        hanging = threading.Thread(target=hang, daemon=True)
        hanging.start()
        code = run_pod(pod, lambda line: None)
        hanging.join(NOTICED_SECONDS)
        assert stopped, attempt.said()
        ((victim, stopped_at),) = stopped
        noticed_after = time.monotonic() - stopped_at
        os.kill(victim, signal.SIGKILL)
    report = first.report()
    assert (code, report.state, report.message) == (1, AttemptState.FAILED, "no step within 60 s"), attempt.said()
    assert 60 / 20 <= noticed_after < 60 / 20 + 2
    assert status_of(first, 0) is not None


INTERFACE = "veth-pod"
ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Of a network for documentation (RFC 5737), which nobody has."""

AS_ANOTHER_BOOT = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Commands that run others as if on one of two hosts with a wire between them: each has a network of its own, with
    a card whose name the other does not know, and was booted another time.
    """
    if os.geteuid() or shutil.which("ip") is None:
        missing("namespaces", "network namespaces need root and the command ip")
    names = [f"penstock-{os.getpid()}-{k}" for k in range(2)]
    ends = [f"{INTERFACE}{k}" for k in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for each in ("lo", end):
                ip("-n", name, "link", "set", each, "up")
            (tmp_path / name).write_text(f"{name}\n")
        yield [["ip", "netns", "exec", name, "sh", "-c", AS_ANOTHER_BOOT, str(tmp_path / name)] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def test_pods_of_two_hosts_meet_over_the_card_between_them(root: Path, hosts: list[list[str]]) -> None:
    """Neither has the other's loopback. What is measured says that they do not slow each other, and the plan knows."""
    job = job_of(3)
    attempt = Attempt(root, job)
    attempt.master = ADDRESSES[0]
    with attempt.started(hosts) as processes:
        attempt.measure()
        attempt.wait_until(lambda: b"profile done" in attempt.pods[0].log.read_bytes(), processes)
        profile = attempt.run.read_profile()
        asked = problem_from_profile(job.spec, profile)
        attempt.train(decide(asked).plan)
        reports = attempt.ended(processes)
    assert states(reports) == [AttemptState.SUCCEEDED] * 2, attempt.said()
    assert profile.hosts == (0, 1)
    assert asked.host_of([0, 1]).tolist() == [0, 1]
    assert {(link.source, link.target) for link in profile.links} == {(0, 1), (1, 0)}
    assert all(unit.together_seconds > 0 for unit in profile.units)
    assert len(RunDir(attempt.run.root).read_metrics()) == 3
