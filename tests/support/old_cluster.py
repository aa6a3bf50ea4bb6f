"""PipelineJobs in every phase and what belongs to them on a cluster, as the operator of commit 16853cd left them.

``tests/fixtures/cluster_16853cd`` was made from a work tree of that commit, whose operator worked on that commit's
cluster in memory, with this file copied into it:

    python -m tests.support.old_cluster tests/fixtures/cluster_16853cd

Each file is a scene: the time and all objects but events. What the operator wrote is as it wrote it: statuses, JobSets,
ConfigMaps and annotations of pods. That cluster in memory had no Jobs between JobSets and pods, as a real one has; they
are added when a scene is restored.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.core.lifecycle import REPLAN_AFTER_DRIFT_SECONDS, AttemptState, Phase
from penstock.kube.resources import CLUSTER_PROFILES, CONFIG_MAPS, EVENTS, JOBS, JOBSETS, NODES, PODS
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES as HOSTS
from tests.support.one_job import end_all, example, running
from tests.support.operating import Operating, measured
from tests.support.sample_run import sample_profile

FOLDER = Path(__file__).parents[1] / "fixtures" / "cluster_16853cd"
KINDS = (JOBS, JOBSETS, PODS, CONFIG_MAPS, NODES, CLUSTER_PROFILES)
RESOURCES = {resource.plural: resource for resource in KINDS}
ALLOWED = {"runPolicy": {"replanOnDrift": True}, "training": {"globalBatch": 64, "steps": 100_000}}


# Using


def restored(scene: str, operating: Operating) -> str:
    """Put the scene's objects on the cluster, at its time; the uid of its job."""
    put(FOLDER / f"{scene}.json", operating)
    (job,) = operating.kube.all(JOBS)
    return str(job["metadata"]["uid"])


def put(path: Path, operating: Operating) -> None:
    """Put the objects in a scene's file on the cluster, at its time."""
    scene = json.loads(path.read_text())
    operating.now, kube = scene["now"], operating.kube
    objects: list[tuple[str, dict[str, Any]]] = scene["objects"]
    for plural, found in objects:
        if plural != PODS.plural:
            kube.add(RESOURCES[plural], found)
    jobsets = {found["metadata"]["uid"]: found for plural, found in objects if plural == JOBSETS.plural}
    for plural, found in objects:
        if plural == PODS.plural:
            (owner,) = found["metadata"]["ownerReferences"]
            pod = kube.make_pod(kube.start_job(jobsets[owner["uid"]]), int(found["metadata"]["name"][-1]))
            assert pod["metadata"]["labels"] == found["metadata"]["labels"]
            pod["metadata"]["uid"] = found["metadata"]["uid"]
            pod["metadata"]["annotations"] = found["metadata"].get("annotations", {})
            pod["spec"], pod["status"] = found["spec"], found["status"]


# Making


class _KilledError(BaseException):
    """The operator is killed."""


def _until(operating: Operating, uid: str, phase: Phase) -> None:
    """The operator is killed as soon as it has written that phase."""

    def killed(word: str) -> None:
        if word.endswith("status") and operating.phase(uid) is phase:
            raise _KilledError

    operating.kube.after = killed
    with contextlib.suppress(_KilledError):
        operating.turn(12)
    assert operating.phase(uid) is phase


def _before(operating: Operating, word: str, times: int = 1) -> None:
    """The operator is killed before the write that begins so and comes so many times."""
    writes: list[str] = []

    def killed(write: str) -> None:
        writes.append(write)
        if sum(each.startswith(word) for each in writes) == times:
            raise _KilledError

    operating.kube.hook = killed
    with contextlib.suppress(_KilledError):
        operating.turn(12)


def _submitted(operating: Operating, **changes: Any) -> str:
    for host in HOSTS:
        operating.kube.add_node(host)
    return operating.kube.submit(example(**changes))


def _profiling(operating: Operating, **changes: Any) -> str:
    uid = _submitted(operating, **changes)
    operating.turn()
    operating.kube.start_pods(*HOSTS)
    operating.turn()
    assert operating.phase(uid) is Phase.PROFILING
    return uid


def _pending(operating: Operating) -> None:
    _submitted(operating)


def _announced(operating: Operating) -> None:
    _submitted(operating)
    _before(operating, "create JobSet")


def _queued(operating: Operating) -> None:
    _submitted(operating)
    operating.turn()
    operating.kube.start_pods(*HOSTS)
    for index in range(len(HOSTS)):
        operating.kube.hinder_pod(index, "Unschedulable", "0/2 nodes are available", operating.now)
    operating.turn()


def _planning(operating: Operating) -> None:
    uid = _profiling(operating)
    measured(operating.kube, uid, sample_profile())
    _until(operating, uid, Phase.PLANNING)


def _binding(operating: Operating) -> None:
    uid = _profiling(operating)
    measured(operating.kube, uid, sample_profile())
    _until(operating, uid, Phase.BINDING)


def _half_bound(operating: Operating) -> None:
    uid = _profiling(operating)
    measured(operating.kube, uid, sample_profile())
    _before(operating, "annotate", times=2)
    assert operating.phase(uid) is Phase.BINDING


def _trained(operating: Operating, uid: str, seconds: float, ratio: float) -> None:
    """For so long, with steps that take so many times what was predicted."""
    plan, end = operating.status(uid).plan, operating.now + seconds
    assert plan is not None
    assert plan.step_seconds is not None
    while operating.now < end:
        operating.now += 50.0
        progress = operating.status(uid).progress
        step = progress.step + 1 if progress and progress.step else 9
        told = {"attempt": 1, "epoch": 1, "step": step, "loss": "4.5", "lastCheckpoint": 8, "profileRef": "measured"}
        operating.kube.report(uid, **told, stepSeconds=ratio * plan.step_seconds, reportedAt="2025-10-09T08:53:20Z")
        operating.turn()


def _running(operating: Operating) -> str:
    uid = running(operating, **ALLOWED)
    _trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, 1.0)
    return uid


def _drifted(operating: Operating) -> None:
    _trained(operating, _running(operating), REPLAN_AFTER_DRIFT_SECONDS / 3, 2.0)


def _mispredicted(operating: Operating) -> None:
    uid = running(operating, **ALLOWED)
    _trained(operating, uid, 1.5 * REPLAN_AFTER_DRIFT_SECONDS, 2.0)


def _recovering(operating: Operating) -> None:
    uid = running(operating)
    _trained(operating, uid, 100.0, 1.0)
    operating.kube.end_pod(0, code=1, word='{"state": "failed", "message": "rank 1 was killed in step 9"}')
    _until(operating, uid, Phase.RECOVERING)


def _suspended(operating: Operating) -> None:
    uid = running(operating)
    _trained(operating, uid, 100.0, 1.0)
    operating.kube.change_spec(uid, runPolicy={"suspend": True})
    operating.turn()
    end_all(operating, AttemptState.STOPPED)
    operating.turn(12)
    assert operating.phase(uid) is Phase.SUSPENDED


def _succeeded(operating: Operating) -> None:
    uid = running(operating)
    _trained(operating, uid, 100.0, 1.0)
    end_all(operating, AttemptState.SUCCEEDED)
    operating.turn(12)
    assert operating.phase(uid) is Phase.SUCCEEDED


def _failed(operating: Operating) -> None:
    uid = running(operating, runPolicy={"backoffLimit": 0})
    operating.kube.end_pod(0, code=1, word='{"state": "failed", "message": "rank 1 was killed in step 9"}')
    operating.turn(12)
    assert operating.phase(uid) is Phase.FAILED


SCENES: Mapping[str, Callable[[Operating], object]] = {
    "pending": _pending,
    "announced": _announced,
    "queued": _queued,
    "profiling": _profiling,
    "planning": _planning,
    "binding": _binding,
    "half-bound": _half_bound,
    "running": _running,
    "drifted": _drifted,
    "mispredicted": _mispredicted,
    "recovering": _recovering,
    "suspended": _suspended,
    "succeeded": _succeeded,
    "failed": _failed,
}


def make(scenes: Mapping[str, Callable[[Operating], object]], folder: Path) -> None:
    """Play each scene on a cluster of its own, and write its objects to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, play in scenes.items():
        operating = Operating(FakePlanner())
        operating.now = sample_profile().measured_at
        play(operating)
        _keep(operating, folder / f"{name}.json")


def _keep(operating: Operating, path: Path) -> None:
    objects = [[key[0], found] for key, found in sorted(operating.kube.objects.items()) if key[0] != EVENTS.plural]
    lines = ",\n".join(json.dumps(each) for each in objects).replace('"uid-', '"old-')
    path.write_text(f'{{"now": {operating.now}, "objects": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    make(SCENES, Path(sys.argv[1]))
