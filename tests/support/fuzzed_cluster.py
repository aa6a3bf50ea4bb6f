"""An operator with two running jobs, one of which is described by a user who may edit pods and statuses."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import PodBinding
from penstock.core.supervision import AttemptReport
from penstock.kube.names import BINDING_ANNOTATION, REMINDER_ANNOTATION, STOP_ANNOTATION
from penstock.kube.resources import JOBS, PODS
from penstock.kube.transport import Listing
from penstock.operator.watches import watched
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

STEADY, FUZZED = "steady", "fuzzed"
NODES = ("east", "west")
DEEP, NESTED = 100, 100_000


def good_object() -> dict[str, Any]:
    """What pods, the service and the operator write, one part each."""
    binding = PodBinding(
        pod_uid="u", attempt=1, epoch=1, node_rank=0, num_nodes=2, ranks_per_pod=1, master="m", port=2000
    )
    report = AttemptReport(state=AttemptState.FAILED, message="lost", last_words=("a", "b"), last_checkpoint=40)
    return {
        "report": report.to_manifest(),
        "binding": binding.to_manifest(),
        "stop": "2026-03-01T12:00:00Z",
        "reminder": "epoch-1",
        "condition": {"type": "DisruptionTarget", "status": "True", "reason": "Preempted", "message": "for another"},
        "progress": {"attempt": 1, "epoch": 1, "step": 7, "loss": "2.5", "stepSeconds": 0.5, "lastCheckpoint": 4},
        "plan": {"digest": "0" * 64, "summary": "pp 2", "stepSeconds": 0.5},
        "profile": {"ref": "measured", "key": "k"},
    }


class Fuzzed:
    """Both jobs run before every input."""

    def __init__(self) -> None:
        self._operating = Operating(FakePlanner())
        self._uids = {name: self._running(name) for name in (STEADY, FUZZED)}
        self._before = copy.deepcopy(self._operating.kube.objects)

    def _running(self, name: str) -> str:
        manifest = example(kubernetes={"volumes": {"out": {"claim": "shared"}}})
        manifest["metadata"] = {"name": name}
        return self._operating.running(manifest, sample_profile(), *NODES)

    def read(self, content: bytes) -> None:
        """Let the operator look at the input; afterwards the steady job must run as before."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return  # an apiserver sends JSON
        operating = self._operating
        operating.kube.objects = copy.deepcopy(self._before)
        self._describe(found if isinstance(found, dict) else {"report": found})
        operating.restart()
        self._look()
        with suppress(PenstockError):  # the queue says so, and tries this job again later
            operating.reconciler.reconcile(self._uids[FUZZED])
        operating.reconciler.reconcile(self._uids[STEADY])
        self._look()
        phase = operating.phase(self._uids[STEADY])
        assert phase is Phase.RUNNING, f"the steady job is {phase}"

    def _describe(self, found: dict[str, Any]) -> None:
        """Pods have texts alone, as an apiserver sees to; a status may be anything."""
        kube, uid = self._operating.kube, self._uids[FUZZED]
        job = next(each for each in kube.all(JOBS) if each["metadata"]["uid"] == uid)
        status = job.setdefault("status", {})
        for name in ("progress", "plan", "profile"):
            if name in found:
                status[name] = _sendable(found[name])
        kube.touch(job)
        for index, pod in enumerate(kube.all(PODS)):
            if pod["metadata"]["name"].startswith(FUZZED):
                annotations = pod["metadata"].setdefault("annotations", {})
                for part, name in (
                    ("binding", BINDING_ANNOTATION),
                    ("stop", STOP_ANNOTATION),
                    ("reminder", REMINDER_ANNOTATION),
                ):
                    if part in found:
                        annotations[name] = _text(found[part])
                if index % 2 and "report" in found:
                    terminated = {"exitCode": 1, "message": _text(found["report"])[:4096]}
                    pod["status"]["containerStatuses"][0]["state"] = {"terminated": terminated}
                    pod["status"]["phase"] = "Failed"
                kube.touch(pod)

    def _look(self) -> None:
        for each in watched(self._operating.cache):
            listing = self._operating.kube.list(each.resource)
            sent: list[dict[str, Any]] = json.loads(json.dumps(listing.objects))
            each.replace(Listing(objects=tuple(sent), version=listing.version))
        self._operating.cache.set_service(True, self._operating.now)


def _text(found: Any) -> str:
    if isinstance(found, str):
        return found
    return json.dumps(found) if _is_shallow(found) else "[" * NESTED


def _sendable(found: Any) -> Any:
    """As an apiserver's JSON has it, which knows no infinite number, and is not nested without bounds."""
    return json.loads(json.dumps(found), parse_constant=lambda _: None) if _is_shallow(found) else None


def _is_shallow(found: Any) -> bool:
    """Whether it is nested less deeply than `DEEP`; copying and sending take several calls for each level."""
    level = [found]
    for _ in range(DEEP):
        level = [inner for each in level for inner in _inside(each)]
    return not level


def _inside(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return list(found.values())
    return found if isinstance(found, list) else []
