"""Answers of a service, as frozen types. Unknown fields are ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.core.errors import PenstockError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.manifest import Manifest, camel, limits_lifted
from penstock.core.plan import Plan
from penstock.core.speed import Speed
from penstock.core.timeline import Timeline


class ServiceError(PenstockError):
    """The service refused, or could not be reached (``status`` 0); ``kind`` names the problem document's type."""

    def __init__(self, *, status: int, kind: str, detail: str, where: str = "", remedy: str = "") -> None:
        self.status, self.kind, self.detail = status, kind, detail
        self.where, self.remedy = where, remedy
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{detail}" + (f"\n  remedy: {remedy}" if remedy else ""))


class KnownFields(Manifest):
    """Manifest that ignores unknown fields."""

    __slots__ = ()

    @classmethod
    def from_manifest(cls, value: Any, path: str = "") -> Self:
        """The answer in ``value``."""
        known = {camel(field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            value = {name: item for name, item in value.items() if name in known}
        return super().from_manifest(value, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(KnownFields):
    """The newest report of a job's ranks; ``loss`` in nats per token, ``speed`` that of a step of ``step_seconds``."""

    step: int
    num_steps: int
    loss: float | None = None
    step_seconds: float | None = None
    speed: Speed | None = None
    last_checkpoint: int | None = None
    reported_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status(KnownFields):
    """Status of a job; times are in ISO 8601."""

    phase: Phase
    reason: str = ""
    message: str = ""
    entered_at: str = ""
    attempt: int = 0
    failures: int = 0
    started_at: str | None = None
    finished_at: str | None = None
    plan_digest: str | None = None
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of the service; ``etag`` guards a change against one that came in between."""

    manifest: Mapping[str, Any]
    status: Status
    etag: str
    created_at: str

    @property
    def job(self) -> PipelineJob:
        """The job as this version of penstock reads it, with limits unchecked; raises `UserError` if it cannot.

        A service may keep jobs of other versions. Their name and status can always be read.
        """
        with limits_lifted():
            return PipelineJob.from_manifest(self.manifest)

    @property
    def name(self) -> str:
        """Name of the job, unique in its namespace."""
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Namespace of the job."""
        return str(self.manifest["metadata"].get("namespace", "default"))

    @property
    def uid(self) -> str:
        """Unique id of the job, which is never reused."""
        return str(self.manifest["metadata"].get("uid", ""))

    @classmethod
    def from_manifest(cls, value: Any) -> Job:
        """Parse the service's view of a job."""
        metadata = value["metadata"]
        kept = {name: metadata[name] for name in METADATA if name in metadata}
        return cls(
            manifest={
                "apiVersion": value["apiVersion"],
                "kind": value["kind"],
                "metadata": kept,
                "spec": value["spec"],
            },
            status=Status.from_manifest(value["status"]),
            etag=f'"{metadata["resourceVersion"]}"',
            created_at=metadata["creationTimestamp"],
        )

    def updated(self, row: Mapping[str, Any]) -> Job:
        """Return the job with the status of a live stream's row."""
        return dataclasses.replace(
            self,
            manifest=_with_suspend(self.manifest, row["suspend"]),
            status=Status.from_manifest(row["status"]),
            etag=f'"{row["version"]}"',
        )

    @property
    def resting(self) -> bool:
        """Whether the job has ended or is suspended."""
        return self.status.phase.terminal or self.status.phase is Phase.SUSPENDED


def _with_suspend(manifest: Mapping[str, Any], suspend: bool) -> Mapping[str, Any]:
    """Return the manifest with ``suspend`` in its run policy, unchanged if its spec or run policy is no mapping."""
    spec = manifest["spec"]
    policy = spec.get("runPolicy", {}) if isinstance(spec, Mapping) else None
    if not isinstance(policy, Mapping) or policy.get("suspend", False) == suspend:
        return manifest
    return {**manifest, "spec": {**spec, "runPolicy": {**policy, "suspend": suspend}}}


METADATA = ("name", "namespace", "labels", "annotations", "uid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(KnownFields):
    """Event of a job; ``number`` increases by one."""

    number: int
    at: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Version(KnownFields):
    """Versions of the service: penstock, API, and revision of the database schema."""

    version: str
    api: str
    schema_revision: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginLink:
    """A link that signs a browser in, once, for anyone who holds it."""

    url: str
    expires_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Page of jobs, and the cursor of the next page."""

    items: tuple[Job, ...]
    next: str | None

    @classmethod
    def from_manifest(cls, value: Any) -> Page:
        """Parse the service's page."""
        return cls(items=tuple(map(Job.from_manifest, value["items"])), next=value["next"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(KnownFields):
    """A line that a rank printed; ``rank`` -1 is the supervisor."""

    rank: int
    number: int
    attempt: int
    at: str
    level: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePage(KnownFields):
    """Some lines, by rank and number. ``next`` is the cursor for the following lines, including future ones.
    ``complete``: no more lines will come, because the job has ended or is suspended.
    """

    items: tuple[Line, ...]
    next: str
    complete: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(KnownFields):
    """Export of a checkpoint for other programs; ``state`` is ``queued``, ``running``, ``done`` or ``failed``."""

    state: str
    message: str = ""
    folder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(KnownFields):
    """Checkpoint after ``step`` steps; ``uri`` is a value for `resumeFrom`."""

    step: int
    attempt: int
    complete: bool
    bytes: int
    created_at: str
    uri: str
    export: Export | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact(KnownFields):
    """A file of a job."""

    name: str
    bytes: int
    modified_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction(KnownFields):
    """Inputs that repeat a run: the job's manifest with the pinned plan, versions, and shell commands."""

    manifest: dict[str, Any]
    versions: dict[str, str]
    commands: tuple[str, ...]
    plan_digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(KnownFields):
    """Values of one or more steps, from ``step`` on."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValue(KnownFields):
    """The value at a step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Series(KnownFields):
    """One number over the steps, of one rank or, without ``rank``, of all together.

    ``first``, ``last``, ``min`` and ``max`` are exact, however few the points; older services leave them out.
    """

    name: str
    points: tuple[Point, ...]
    rank: int | None = None
    count: int = 0
    first: StepValue | None = None
    last: StepValue | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep(KnownFields):
    """The timeline of one measured step, with the numbers of all measured steps and of the typical one."""

    attempt: int
    step: int
    timeline: Timeline
    sampled_steps: tuple[int, ...] = ()
    typical_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan(KnownFields):
    """A plan that a job used, from an attempt on."""

    revision: int
    attempt: int
    created_at: str
    digest: str
    plan: Plan
