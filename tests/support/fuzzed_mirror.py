"""A service that mirrors a cluster in which one job is described by a user who may edit it, and another is sound."""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from penstock.core.lifecycle import Phase
from penstock.kube.packing import packed
from tests.support.fake_apiserver import FakeApiserver
from tests.support.on_cluster import OnCluster, instant, on_cluster
from tests.support.service import NOW, Clock, job_manifest
from tests.support.small_plans import small_plan

FUZZED = "fuzzed"
PATHS = ("/v1/jobs", f"/v1/jobs/default/{FUZZED}", f"/v1/jobs/default/{FUZZED}/plans")
PAGES = ("/", f"/jobs/default/{FUZZED}")


def good_job() -> dict[str, Any]:
    """A PipelineJob that runs, as a cluster holds it."""
    conditions = [
        {"type": kind, "status": "True", "reason": "Because", "message": "so", "lastTransitionTime": instant(NOW)}
        for kind in ("Admitted", "Profiled", "Planned")
    ]
    progress = {"attempt": 1, "epoch": 1, "step": 7, "loss": "2.5", "stepSeconds": 0.5, "reportedAt": instant(NOW)}
    status = {
        "phase": "Running",
        "reason": "Bound",
        "message": "",
        "phaseEnteredAt": instant(NOW),
        "attempt": 1,
        "launched": 1,
        "ranks": 2,
        "failures": 0,
        "plan": {"digest": "0" * 64, "summary": "pp 2", "stepSeconds": 0.5, "peakBytes": 10**9},
        "profile": {"ref": "measured", "key": "k"},
        "conditions": conditions,
        "progress": progress,
    }
    return {**job_manifest(FUZZED, namespace="default"), "status": status}


class Mirroring:
    """The service and its cluster. Every method gives it one input; the sound job has to be mirrored after it."""

    def __init__(self, here: OnCluster) -> None:
        self._here, self._numbers = here, itertools.count(1)
        self._job = here.fake.add_job(good_job())
        self._job["status"] = good_job()["status"]
        self._sound = here.fake.add_job(job_manifest("sound"))
        plan = small_plan()
        self._digest = plan.digest
        self._map = here.fake.add(
            "configmaps", {"metadata": {"name": f"{FUZZED}-a1", "namespace": "default"}, "binaryData": {}}
        )
        sound = {"plan.json.gz": packed(plan.to_manifest())}
        here.fake.add("configmaps", {"metadata": {"name": "sound-a1", "namespace": "default"}, "binaryData": sound})
        self._client: TestClient = here.person("eve", ("get", ""), ("list", ""))

    def read_plan(self, content: bytes) -> None:
        """The input lies in the attempt's ConfigMap."""
        self._map["binaryData"]["plan.json.gz"] = content.decode(errors="replace")
        self._mirrored()

    def read_job(self, content: bytes) -> None:
        """The input is the job's spec and status."""
        found = json.loads(content)
        for name in ("spec", "status"):
            if name in found:
                self._job[name] = found[name]
        self._mirrored()
        for path in PATHS:
            self._answered(path, "application/json")
        for path in PAGES:
            self._answered(path, "text/html")

    def _mirrored(self) -> None:
        """What the watch of the service does, with no error that it would have to restart for."""
        number = next(self._numbers)
        phase = (Phase.RUNNING, Phase.RECOVERING)[number % 2].value
        told = {
            "phase": phase,
            "reason": "Because",
            "message": "",
            "phaseEnteredAt": instant(NOW + number),
            "attempt": 1,
        }
        self._here.fake.touch(self._sound, **told)
        mirror = self._here.member.mirror
        for job in (self._job, self._sound):
            self._here.fake.touch(job)
            try:
                mirror.put(copy.deepcopy(job))
            except Exception as error:
                raise AssertionError(f"the watch of all jobs is restarted for {job['metadata']['name']}") from error
        self._here.reporter.run_once()
        stored = self._here.stored("sound").phase
        assert stored == phase, f"the sound job is {stored}, not {phase}"

    def _answered(self, path: str, form: str) -> None:
        answer = self._client.get(path, headers={"Accept": form})
        assert answer.status_code < 500, f"GET {path} was answered {answer.status_code}: {answer.text[:300]}"


@contextmanager
def mirroring() -> Iterator[Mirroring]:
    """Both jobs on a cluster in this process, and a service with a database in a file."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder,
        on_cluster(Path(folder), "", FakeApiserver(), Clock()) as here,
    ):
        yield Mirroring(here)
