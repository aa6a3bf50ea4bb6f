"""Kubernetes events about jobs, for people: `kubectl describe` shows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.instants import format_instant
from penstock.core.lifecycle import LOSSES, Phase, SetPhase
from penstock.kube.names import API_VERSION, JOB_KIND, OPERATOR_MANAGER
from penstock.kube.transport import KubeError
from penstock.operator.cache import JobSnapshot
from penstock.operator.kube import Kube

log = logging.getLogger(__name__)

MOST_MESSAGE_CHARACTERS = 1024

Submit = Callable[[Callable[[], None]], object]


class EventRecorder:
    """Writes events in calls that ``submit`` runs. A failed write is only logged: the status has the same content."""

    def __init__(self, kube: Kube, clock: Callable[[], float], submit: Submit) -> None:
        self._kube, self._clock, self._submit = kube, clock, submit

    def phase(self, job: JobSnapshot, decision: SetPhase) -> None:
        """Log, and record as an event, that the job entered a phase."""
        is_bad = decision.phase is Phase.FAILED or decision.reason in LOSSES
        message = f"{decision.phase}: {decision.message}" if decision.message else str(decision.phase)
        extra = {**log_fields(job), "phase": str(decision.phase), "reason": decision.reason}
        log.info("job %s/%s: %s (%s)", job.namespace, job.name, message, decision.reason, extra=extra)
        now = format_instant(self._clock())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{job.name}.", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": JOB_KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "type": "Warning" if is_bad else "Normal",
            "reason": decision.reason,
            "message": message[:MOST_MESSAGE_CHARACTERS],
            "source": {"component": OPERATOR_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._submit(lambda: self._write(job, event))

    def _write(self, job: JobSnapshot, event: Mapping[str, Any]) -> None:
        try:
            self._kube.create(event)
        except KubeError as error:
            log.warning(
                "job %s/%s: event %s could not be written and is dropped: %s",
                job.namespace,
                job.name,
                event["reason"],
                error,
                extra=log_fields(job),
            )


def log_fields(job: JobSnapshot) -> dict[str, str]:
    """Structured fields of a log line about the job."""
    return {"namespace": job.namespace, "job": job.name, "uid": job.uid, "phase": str(job.status.phase)}
