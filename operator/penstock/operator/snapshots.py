"""Snapshots of cluster objects: small frozen extracts with the fields that the life cycle needs.

An object is read once, when it arrives. The cache holds the pods of a thousand jobs, and not all of their fields.

Controllers, schedulers and kubelets date transitions by clocks of their own machines, which may differ from the
operator's. So the cache replaces these times by those at which it first had the transition (`observed_child` and
`observed_node`): all limits count by the operator's clock, and begin again when it restarts. One foreign time is used,
`End.at`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.instants import parse_instant
from penstock.core.manifest import Manifest
from penstock.core.pod import PodBinding
from penstock.core.supervision import AttemptReport
from penstock.kube.names import (
    ATTEMPT_LABEL,
    BATCH_GROUP,
    BATCH_JOB_KIND,
    BINDING_ANNOTATION,
    GROUP,
    INDEX_LABEL,
    JOB_KIND,
    JOBSET_GROUP,
    JOBSET_KIND,
    REMINDER_ANNOTATION,
    REPORTER_CONTAINER,
    STOP_ANNOTATION,
    TRAINER_CONTAINER,
    UID_LABEL,
)
from penstock.kube.owners import controller
from penstock.kube.resources import BATCH_JOBS, JOBSETS, PODS
from penstock.kube.transport import Object

T = TypeVar("T", bound=Manifest)

UNREADABLE = (UserError, ValueError, KeyError, TypeError, AttributeError)
"""Errors in reading objects that were written by hand, or by another version of penstock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSnapshot:
    """An object of an attempt. ``owner`` is the uid of the object that controls it, which proves to which PipelineJob
    it belongs (`penstock.operator.ownership`); ``job_uid`` is only its label, which any user may set.
    """

    namespace: str
    name: str
    uid: str
    job_uid: str
    owner: str = ""
    version: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetSnapshot(ChildSnapshot):
    """An attempt's JobSet. ``failure`` and ``message`` are the JobSet controller's reason and message for a failure.

    ``completed``: all its pods succeeded, even if they are gone by now. ``made_at`` is when it was created, or first
    observed, by this process's clock.
    """

    attempt: int
    suspended: bool
    being_deleted: bool
    completed: bool = False
    failure: str = ""
    message: str = ""
    made_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksJobSnapshot(ChildSnapshot):
    """The Job that the JobSet controller makes of an attempt's JobSet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End of a pod. ``disrupted``: preempted or evicted, so the job is not at fault.

    ``report`` is the pod's own report. The pod ended ``at`` that time by its kubelet's clock, and was ``observed_at``
    that time by this process's clock.
    """

    succeeded: bool
    message: str
    at: float
    observed_at: float = 0.0
    disrupted: bool = False
    report: AttemptReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingReason:
    """Pending reason of a pod, from the scheduler or the kubelet. ``since`` is its start; none for the kubelet's."""

    reason: str
    message: str
    since: float | None = None

    @property
    def lacks_capacity(self) -> bool:
        """Whether the pod would have a place if other pods left, as far as the scheduler reports.

        Its message lists a cause for each set of nodes. At least one cause must be of a kind that leaving pods remove.
        """
        causes = self.message.partition("nodes are available:")[2].partition(". preemption:")[0]
        return not causes.strip() or not all(map(_STAYS.search, re.split(r", (?=\d+ )", causes)))


_STAYS = re.compile(
    "(?i)persistentvolumeclaim|persistent volumes to bind|volume node affinity"
    "|node affinity/selector|untolerated taint|were unschedulable"
)
"""Causes that stay whichever pods leave: those of the scheduler's filters NodeAffinity, TaintToleration and
NodeUnschedulable, and of its filters for volumes.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSnapshot(ChildSnapshot):
    """A pod of an attempt; ``index`` is its place among the attempt's pods, ``address`` empty until it has one.

    ``owner_name`` is the name of the Job that controls it. ``attempt`` is only a label, as ``job_uid`` is. ``made_at``
    is its creation, by the cluster's clock, and only orders pods.

    ``placed_at`` is when it was assigned to its ``node``. It is ``running`` once one of its containers runs, and has
    its ``end`` when all have ended: the records of its ranks are uploaded then, or lost.
    """

    attempt: int
    index: int
    node: str
    address: str
    running: bool
    being_deleted: bool
    placed_at: float | None = None
    image_id: str = ""
    binding: PodBinding | None = None
    stop_requested_at: float | None = None
    reminder: str = ""
    pending_reason: PendingReason | None = None
    end: End | None = None
    owner_name: str = ""
    made_at: float = 0.0

    @property
    def annotated(self) -> str:
        """The annotations that it has so far: ``epoch-1``, ``epoch-1-stop``, ``stop`` or nothing."""
        parts = [f"epoch-{self.binding.epoch}"] if self.binding is not None else []
        return "-".join([*parts, "stop"] if self.stop_requested_at is not None else parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    """A node; ``not_ready_since`` is none while it is ready."""

    name: str
    uid: str
    boot_id: str
    not_ready_since: float | None = None


def jobset_snapshot(item: Object) -> JobSetSnapshot:
    """The extract of a JobSet that the operator made."""
    metadata = item["metadata"]
    labels = metadata.get("labels", {})
    failed = _condition(item, "Failed")
    return JobSetSnapshot(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job_uid=labels.get(UID_LABEL, ""),
        attempt=_number(labels.get(ATTEMPT_LABEL)),
        suspended=bool(item["spec"].get("suspend")),
        being_deleted="deletionTimestamp" in metadata,
        completed=bool(_condition(item, "Completed")),
        failure=str(failed.get("reason", "Failed")) if failed else "",
        message=str(failed.get("message", "")) if failed else "",
        owner=controller(item, JOB_KIND, GROUP)[1],
        made_at=parse_instant(metadata.get("creationTimestamp"), "creationTimestamp") or 0.0,
        version=_number(metadata.get("resourceVersion")),
    )


def ranks_job_snapshot(item: Object) -> RanksJobSnapshot:
    """The extract of the Job of an attempt's JobSet."""
    metadata = item["metadata"]
    return RanksJobSnapshot(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job_uid=metadata.get("labels", {}).get(UID_LABEL, ""),
        owner=controller(item, JOBSET_KIND, JOBSET_GROUP)[1],
        version=_number(metadata.get("resourceVersion")),
    )


def pod_snapshot(item: Object) -> PodSnapshot:
    """The extract of an attempt's pod."""
    metadata, status = item["metadata"], item.get("status", {})
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    container = _container(status, "containerStatuses", TRAINER_CONTAINER)
    reporter = _container(status, "initContainerStatuses", REPORTER_CONTAINER)
    reports = "running" in reporter.get("state", {})
    owner_name, owner = controller(item, BATCH_JOB_KIND, BATCH_GROUP)
    return PodSnapshot(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job_uid=labels.get(UID_LABEL, ""),
        attempt=_number(labels.get(ATTEMPT_LABEL)),
        index=_number(labels.get(INDEX_LABEL)),
        node=item["spec"].get("nodeName", ""),
        address=status.get("podIP", ""),
        running=reports or "running" in container.get("state", {}),
        being_deleted="deletionTimestamp" in metadata,
        placed_at=parse_instant(_condition(item, "PodScheduled").get("lastTransitionTime"), "PodScheduled"),
        image_id=container.get("imageID") or reporter.get("imageID", ""),
        binding=_read(PodBinding, annotations.get(BINDING_ANNOTATION, "")),
        stop_requested_at=_instant(annotations.get(STOP_ANNOTATION, "")),
        reminder=annotations.get(REMINDER_ANNOTATION, ""),
        pending_reason=_pending_reason(item, reporter, container),
        end=_end(item, container, reports),
        owner_name=owner_name,
        owner=owner,
        made_at=parse_instant(metadata.get("creationTimestamp"), "creationTimestamp") or 0.0,
        version=_number(metadata.get("resourceVersion")),
    )


CHILDREN = (
    (JOBSETS, JobSetSnapshot, jobset_snapshot),
    (BATCH_JOBS, RanksJobSnapshot, ranks_job_snapshot),
    (PODS, PodSnapshot, pod_snapshot),
)
"""The resources whose objects belong to jobs, with the types and the functions of their extracts."""


def node_snapshot(item: Object) -> NodeSnapshot:
    """The extract of a node."""
    ready = _condition(item, "Ready", expected=None)
    is_ready = ready.get("status") == "True"
    return NodeSnapshot(
        name=item["metadata"]["name"],
        uid=item["metadata"]["uid"],
        boot_id=item.get("status", {}).get("nodeInfo", {}).get("bootID", ""),
        not_ready_since=None if is_ready else parse_instant(ready.get("lastTransitionTime"), "Ready") or 0.0,
    )


def observed_child(child: ChildSnapshot, known: ChildSnapshot | None, now: float) -> ChildSnapshot:
    """Return the object with its transitions dated by this process's clock: as in ``known``, or ``now``."""
    if isinstance(child, JobSetSnapshot):
        return replace(child, made_at=known.made_at if isinstance(known, JobSetSnapshot) else now)
    if isinstance(child, PodSnapshot):
        return _observed_pod(child, known if isinstance(known, PodSnapshot) else None, now)
    return child


def _observed_pod(pod: PodSnapshot, known: PodSnapshot | None, now: float) -> PodSnapshot:
    """Return the pod with its transitions dated by this process's clock: as in ``known``, or ``now``.

    A stop request was dated by an operator. Its time stays unless it is in the future, so that a restart does not
    prolong the grace period.
    """
    reason, end = pod.pending_reason, pod.end
    known_reason, known_end = (known.pending_reason, known.end) if known is not None else (None, None)
    if reason is not None and reason.since is not None:
        reason = replace(reason, since=_first(known_reason.since if known_reason else None, now))
    if end is not None:
        end = replace(end, observed_at=known_end.observed_at if known_end else now)
    placed_at, stop_requested_at = pod.placed_at, pod.stop_requested_at
    if placed_at is not None:
        placed_at = _first(known.placed_at if known else None, now)
    if stop_requested_at is not None:
        stop_requested_at = _first(known.stop_requested_at if known else None, min(stop_requested_at, now))
    return replace(pod, placed_at=placed_at, stop_requested_at=stop_requested_at, pending_reason=reason, end=end)


def observed_node(node: NodeSnapshot, known: NodeSnapshot | None, now: float) -> NodeSnapshot:
    """Return the node with its loss dated by this process's clock: as in ``known``, or ``now``."""
    if node.not_ready_since is None:
        return node
    is_same = known is not None and known.uid == node.uid
    return replace(node, not_ready_since=_first(known.not_ready_since if known and is_same else None, now))


def _first(known: float | None, now: float) -> float:
    return now if known is None else known


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _condition(item: Object, kind: str, expected: str | None = "True") -> Object:
    """The condition of that type, if it has the wanted status; empty otherwise."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind and expected in (None, c["status"])), {})


def _container(status: Object, kind: str, name: str) -> Object:
    return next((c for c in status.get(kind) or () if c["name"] == name), {})


def _read(kind: type[T], text: str) -> T | None:
    """Return the manifest of that type; none without one, or if another writer or process put something else there."""
    try:
        return kind.from_manifest(jsontext.load(text)) if text else None
    except (ValueError, UserError):
        return None


def _instant(text: str) -> float | None:
    """Return the time of the stop request; 0 for any other content, since any content counts as a request."""
    try:
        return parse_instant(text, STOP_ANNOTATION) if text else None
    except UserError:
        return 0.0


def _pending_reason(pod: Object, *containers: Object) -> PendingReason | None:
    unscheduled = _condition(pod, "PodScheduled", expected="False")
    if unscheduled:
        since = parse_instant(unscheduled.get("lastTransitionTime"), "PodScheduled")
        return PendingReason(reason=unscheduled.get("reason", ""), message=unscheduled.get("message", ""), since=since)
    for container in containers:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return PendingReason(reason=waiting["reason"], message=waiting.get("message", ""))
    return None


def _end(pod: Object, container: Object, reports: bool) -> End | None:
    status = pod.get("status", {})
    terminated = container.get("state", {}).get("terminated", {})
    if status.get("phase") not in ("Succeeded", "Failed") and (reports or not terminated):
        return None
    report = _read(AttemptReport, terminated.get("message", ""))  # a killed container left none
    disruption = _condition(pod, "DisruptionTarget")
    return End(
        succeeded=status.get("phase") == "Succeeded" or (bool(terminated) and terminated.get("exitCode") == 0),
        message=_end_message(status, terminated, report, disruption),
        at=parse_instant(terminated.get("finishedAt"), "finishedAt") or 0.0,
        disrupted=bool(disruption),
        report=report,
    )


def _end_message(status: Object, terminated: Object, report: AttemptReport | None, disruption: Object) -> str:
    if report is not None and report.message:
        return report.message
    if disruption:
        return str(disruption.get("message") or disruption.get("reason"))
    if terminated.get("reason") == "OOMKilled":
        return "was killed because it exceeded its memory limit; raise resources.memoryPerRank"
    if terminated.get("exitCode"):
        last = str(terminated.get("message", "")).strip().rpartition("\n")[2]
        return f"ended with code {terminated['exitCode']}: {last or 'without a message'}"
    return str(status.get("message") or status.get("reason") or "")
