"""What runs in a pod, against workers that follow scripts; the test is operator and kubelet."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.agent import pod as module
from penstock.agent import supervisor
from penstock.agent.pod import Pod, lay_out, run_pod
from penstock.agent.pod_files import PodFiles
from penstock.agent.stalling import RankSteps
from penstock.agent.workers import Workers
from penstock.cli.main import main
from penstock.core.errors import RunError, UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.packing import unpack
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, JOB_FILE, AgentReport
from penstock.core.profile import Profile
from penstock.core.records import RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import read_records
from penstock.core.supervision import AttemptReport
from tests.support.fake_workers import FakeWorkers, Script, killed, refused
from tests.support.pods import UID, Attempt, identified
from tests.support.sample_run import sample_plan, sample_profile
from tests.support.supervised import STEPS, sample_job

PATIENCE_SECONDS = 60.0


class Cluster:
    """One pod of an attempt in this process; ``meanwhile`` is done now and then while it lives."""

    def __init__(self, root: Path, workers: FakeWorkers | None = None, *, job: PipelineJob | None = None) -> None:
        self.attempt = Attempt(root, job or identified(sample_job()), number=3, num_pods=2)
        self.folder = self.attempt.pods[0]
        self.workers = workers or FakeWorkers()
        self.said: list[str] = []
        self.attempt.out.mkdir()

    @property
    def cgroups(self) -> Path:
        """Where the kernel tells of this container."""
        return self.attempt.out.parent / "cgroups"

    @property
    def pod(self) -> Pod:
        folder = self.folder
        files = PodFiles(
            attempt=folder.attempt_files,
            pod=folder.pod_files,
            termination=folder.termination,
            cgroups=self.cgroups,
        )
        return Pod(folders=folder.folders(3, self.attempt.out), files=files, data=self.attempt.data)

    @property
    def run(self) -> RunDir:
        return self.folder.folders(3, self.attempt.out).run(identified(sample_job()))

    def live(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The pod's exit code."""

        def make(place: object, cache: Path) -> Workers:
            return self.workers

        over = threading.Event()
        repeating = threading.Thread(target=_repeat, args=(meanwhile, over))
        repeating.start()
        try:
            return run_pod(self.pod, self.said.append, make)
        finally:
            over.set()
            repeating.join()
            assert not self.workers.alive

    @property
    def report(self) -> AttemptReport:
        return self.folder.report()


def _repeat(act: Callable[[], None], over: threading.Event) -> None:
    while not over.wait(0.01):
        act()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.002)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def bound(cluster: Cluster) -> None:
    """By a plan, at once."""
    cluster.attempt.train(sample_plan())


# A life


def test_a_pod_measures_waits_and_trains(cluster: Cluster) -> None:
    cluster.attempt.measure()

    def operate() -> None:
        if "attempt ready, profile done" in cluster.said:
            bound(cluster)

    assert cluster.live(operate) == 0
    report = cluster.report
    assert (report.state, report.profile, report.last_checkpoint) == (AttemptState.SUCCEEDED, Step.DONE, STEPS)
    assert cluster.workers.started == ["prepare", "profile 3", "train 3 on 2"]
    assert cluster.said[0] == "attempt starting, profile missing"
    assert cluster.said[-1] == "attempt succeeded, profile done"


def test_what_its_agent_serves_is_laid_out_before_it_is_told(cluster: Cluster) -> None:
    """A caller that reads a report of a measurement finds the measurement."""
    cluster.attempt.measure()
    served = cluster.pod.folders.served
    reports: list[AgentReport] = []
    digests: set[str] = set()

    def operate() -> None:
        if (served / AGENT_REPORT).exists():
            reports.append(AgentReport.from_manifest(unpack((served / AGENT_REPORT).read_bytes())))
            if reports[-1].profile is Step.DONE:
                content = (served / AGENT_MEASUREMENT).read_bytes() if (served / AGENT_MEASUREMENT).exists() else b""
                digests.update((reports[-1].measurement, sha256(content).hexdigest()))
                bound(cluster)

    assert cluster.live(operate) == 0
    assert len(digests) == 1
    assert {(each.pod_uid, each.job_uid, each.attempt) for each in reports} == {(cluster.folder.uid, UID, 3)}
    assert Profile.from_manifest(unpack((served / AGENT_MEASUREMENT).read_bytes())) == sample_profile()


def test_with_a_fresh_profile_a_pod_is_bound_to_a_plan_at_once(cluster: Cluster) -> None:
    bound(cluster)
    assert cluster.live() == 0
    assert cluster.workers.started == ["prepare", "train 3 on 2"]
    assert cluster.run.read_plan() == sample_plan()


def test_unbound_it_only_waits(cluster: Cluster) -> None:
    def operate() -> None:
        if "attempt ready, profile missing" in cluster.said:
            time.sleep(0.1)
            cluster.folder.ask_to_stop()

    assert cluster.live(operate) == 0
    assert cluster.report.state is AttemptState.STOPPED
    assert cluster.workers.started == ["prepare"]


@pytest.mark.parametrize("change", ["uid", "attempt"])
def test_a_binding_for_another_is_not_heeded(tmp_path: Path, change: str) -> None:
    """A pod that was deleted and made again has the annotations of its name, but not its uid."""
    cluster = Cluster(tmp_path)
    cluster.attempt.give(sample_plan())
    theirs = cluster.attempt.binding(0, 1, sample_plan()).to_manifest()
    theirs["podUid" if change == "uid" else "attempt"] = "another" if change == "uid" else 2
    (cluster.folder.pod_files / "binding").write_text(json.dumps(theirs))
    test_unbound_it_only_waits(cluster)


# What is left behind


def test_the_first_ranks_pod_records_the_profile_once_and_whole(cluster: Cluster) -> None:
    test_a_pod_measures_waits_and_trains(cluster)
    (record,) = read_records(cluster.run.outbox / "a3-profile.jsonl")
    assert (record.kind, record.uid, record.profile) == (RecordKind.PROFILE, UID, sample_profile())


def test_another_pod_leaves_that_to_it(cluster: Cluster) -> None:
    cluster.folder = cluster.attempt.pods[1]
    test_a_pod_measures_waits_and_trains(cluster)
    assert not list(cluster.run.outbox.glob("*-profile.jsonl"))


def test_a_run_lies_where_checkpoints_of_all_attempts_are_found(cluster: Cluster) -> None:
    bound(cluster)
    cluster.live()
    job = cluster.attempt.out / UID
    assert (job / "checkpoints" / "a3" / f"step-{STEPS}" / "manifest.json").is_file()
    assert RunDir(job / "a3").read_job().metadata.uid == UID
    assert (job / "a3" / "checkpoints").readlink() == Path("../checkpoints")
    assert list(cluster.folder.local.glob("status/rank-0")), "what is mapped into memory is on the pod's own disk"
    assert not (job / "a3" / "status").exists()


def test_pods_may_lay_the_run_out_at_once(cluster: Cluster) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(lay_out(cluster.pod)[1].root)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cluster.attempt.run.root] * 8


def test_names_of_data_and_checkpoints_become_places(tmp_path: Path) -> None:
    manifest = sample_job().to_manifest()
    manifest["spec"]["data"]["source"] = "data://corpus/words.txt"
    manifest["spec"]["checkpoint"] = {"resumeFrom": "out://u-0/2/40"}
    cluster = Cluster(tmp_path, job=identified(PipelineJob.from_manifest(manifest)))
    words = cluster.attempt.data / "corpus" / "words.txt"
    begin = cluster.attempt.out / "u-0" / "checkpoints" / "a2" / "step-40"
    for folder in (words.parent, begin):
        folder.mkdir(parents=True)
    words.touch()
    (begin / "manifest.json").touch()
    job, run = lay_out(cluster.pod)
    assert job.spec.data.source == str(words)
    assert job.spec.checkpoint.resume_from == str(begin)
    assert run.read_job() == job


# Ends


def test_a_failure_is_told_with_the_code_of_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, FakeWorkers(scripts=[Script(until=6, end=killed())]))
    bound(cluster)
    assert cluster.live() == 1
    report = cluster.report
    assert (report.state, report.refused, report.last_checkpoint) == (AttemptState.FAILED, False, 5)
    assert "rank 1 (process 4711) was killed" in report.message


def test_ranks_that_were_killed_for_memory_are_told_of_as_such(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, FakeWorkers(profile_ends=[killed()]))
    cluster.cgroups.mkdir()
    (cluster.cgroups / "memory.events").write_text("oom 1\noom_kill 1\n")
    cluster.attempt.measure()
    assert cluster.live() == 1
    assert cluster.report.message.startswith("rank 1 (process 4711) was killed")
    assert cluster.report.message.endswith("raise resources.memoryPerRank")


def test_a_manifest_that_is_gone_is_no_mistake_of_the_job_s(cluster: Cluster) -> None:
    """Somebody deleted the attempt's ConfigMap before the pod began; the next attempt has another."""
    (cluster.folder.attempt_files / JOB_FILE).unlink()
    assert cluster.live() == 1
    assert not cluster.report.refused
    assert "the attempt's ConfigMap was deleted" in cluster.report.message


def test_a_mistake_is_told_with_the_code_of_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, FakeWorkers(scripts=[Script(until=0, end=refused("does not fit", "allow more"))]))
    bound(cluster)
    assert cluster.live() == 2
    assert (cluster.report.refused, cluster.report.message) == (True, "does not fit\n  remedy: allow more")


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(what="holds no text", where="spec.data"), 2),
        (RunError("the disk is gone"), 1),
        (OSError("no space is left"), 1),
    ],
)
def test_whatever_goes_wrong_is_told(tmp_path: Path, error: Exception, code: int) -> None:
    cluster = Cluster(tmp_path, FakeWorkers(prepare_with=fail(error)))
    assert cluster.live() == code
    assert (cluster.report.state, cluster.report.message) == (AttemptState.FAILED, str(error))


def test_data_that_no_volume_holds_is_refused_with_what_to_do(tmp_path: Path) -> None:
    manifest = sample_job().to_manifest()
    manifest["spec"]["data"]["source"] = "data://corpus/words.txt"
    cluster = Cluster(tmp_path, job=identified(PipelineJob.from_manifest(manifest)))
    assert cluster.live() == 2
    assert "is not below a root of the job's volumes" in cluster.report.message
    assert "spec.kubernetes.volumes" in cluster.report.message
    assert cluster.workers.started == []


def test_output_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    (cluster.attempt.out / UID).write_text("in the way")
    assert cluster.live() == 2
    assert f"output storage {cluster.attempt.run.root}: cannot be written: " in cluster.report.message


@pytest.mark.parametrize("text", ["", "no JSON", json.dumps(sample_job().to_manifest())])
def test_a_manifest_that_is_none_or_of_nobody_is_refused(cluster: Cluster, text: str) -> None:
    (cluster.folder.attempt_files / JOB_FILE).write_text(text)
    assert cluster.live() == 2
    assert cluster.report.state is AttemptState.FAILED


def test_a_pod_without_a_uid_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_POD_UID", raising=False)
    assert main(["pod", *cluster.folder.options(3, cluster.attempt.out, cluster.attempt.data)]) == 2


# Stopping


@pytest.fixture
def terminated() -> Iterator[Callable[[], None]]:
    """Has the kubelet end this pod, once."""
    sent: list[int] = []

    def end() -> None:
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGTERM)

    yield end
    assert sent


def test_the_kubelet_s_signal_stops_training_after_a_checkpoint(
    cluster: Cluster, terminated: Callable[[], None]
) -> None:
    bound(cluster)
    assert cluster.live(lambda: terminated() if "attempt running, profile missing" in cluster.said else None) == 0
    assert cluster.report.state is AttemptState.STOPPED
    assert cluster.workers.ranks[-1].stop_requested
    assert not cluster.workers.ranks[-1].killed


def test_the_kubelet_s_signal_ends_preparation_at_once(tmp_path: Path) -> None:
    def prepare() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_SECONDS)

    cluster = Cluster(tmp_path, FakeWorkers(prepare_with=prepare))
    assert cluster.live() == 0
    assert cluster.report.state is AttemptState.STOPPED


def test_a_stop_that_is_written_stops_training_too(cluster: Cluster) -> None:
    bound(cluster)
    assert (
        cluster.live(
            lambda: cluster.folder.ask_to_stop() if "attempt running, profile missing" in cluster.said else None
        )
        == 0
    )
    assert cluster.report.state is AttemptState.STOPPED


# Stalls


def test_without_steps_the_attempt_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated time runs two minutes in each second; a service that is down would not notice."""
    begin = time.monotonic()
    fast = functools.partial(RankSteps, clock=lambda: 120 * (time.monotonic() - begin))
    monkeypatch.setattr(module, "RankSteps", fast)
    cluster = Cluster(tmp_path, FakeWorkers(scripts=[Script(until=6, end=None)]))
    bound(cluster)
    assert cluster.live() == 1
    assert (cluster.report.state, cluster.report.refused) == (AttemptState.FAILED, False)
    assert cluster.report.message == "no step within 60 s"
