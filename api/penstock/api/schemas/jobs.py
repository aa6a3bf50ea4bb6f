"""Jobs, and their records: progress, plans, series, timelines and logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from penstock.api.schemas.wire import Wire, instant, maybe
from penstock.api.store.jobs import StoredJob
from penstock.core.lifecycle import Phase
from penstock.core.speed import Speed


class SpeedView(Wire):
    """How fast a step is."""

    tokens_per_second_per_device: float = Field(description="Tokens of a step, divided by its seconds and its devices.")
    model_flops_utilization: float | None = Field(
        description="FLOPs of the model as a share of all devices' peak; null: the peak is not known."
    )


class ProgressView(Wire):
    """The newest report of the job's ranks."""

    step: int = Field(description="How many are done.")
    num_steps: int = Field(description="How many there are to do.")
    loss: float | None = Field(description="In nats per token.")
    step_seconds: float | None
    speed: SpeedView | None = Field(description="Of a step that takes as long, by the plan; null without time or plan.")
    last_checkpoint: int | None = Field(description="The step of the newest complete checkpoint.")
    reported_at: datetime


class StatusView(Wire):
    """Where the job stands."""

    phase: Phase
    reason: str
    message: str
    entered_at: datetime = Field(description="When the job came into this phase.")
    attempt: int
    failures: int
    started_at: datetime | None
    finished_at: datetime | None
    plan_digest: str | None
    progress: ProgressView | None


class JobView(BaseModel):
    """A PipelineJob with its status."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True)

    api_version: str = Field(examples=["penstock.dev/v1alpha1"])
    kind: str = Field(examples=["PipelineJob"])
    metadata: dict[str, Any] = Field(description="As submitted, with uid, generation, resourceVersion and times.")
    spec: dict[str, Any] = Field(description="As submitted; defaults are left out.")
    status: StatusView


class JobRow(Wire):
    """A job in lists and live streams: its identity and its status."""

    uid: str
    namespace: str
    name: str
    labels: dict[str, str]
    created_at: datetime
    deleted_at: datetime | None
    version: int = Field(description="As in the ETag.")
    suspend: bool = Field(description="Whether suspension is requested.")
    status: StatusView


class JobPage(Wire):
    """Some of the jobs, in order."""

    items: list[JobView]
    next: str | None = Field(description="Pass it as `cursor` for those that follow; null at the end.")


class EventView(Wire):
    """Something that happened to a job."""

    number: int = Field(description="Rises by one within a job; an SSE stream uses it as its id.")
    at: datetime
    kind: str = Field(examples=["phase"])
    body: dict[str, Any]


class EventPage(Wire):
    """Events, oldest first."""

    items: list[EventView]


class PlanView(Wire):
    """A plan that a job went by, from an attempt on."""

    revision: int
    attempt: int
    created_at: datetime
    digest: str
    plan: dict[str, Any] = Field(description="The Plan in its manifest form, as `penstock plan -o json` prints it.")


class PlanPage(Wire):
    """Plans, oldest first."""

    items: list[PlanView]


class SeriesPoint(Wire):
    """Steps from ``step`` on, as one."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float
    count: int = Field(description="How many steps it stands for.")


class StepValueView(Wire):
    """The value at a step."""

    step: int
    value: float


class SeriesView(Wire):
    """One number over the steps. First, last, least and greatest value are exact, for any number of points."""

    name: str = Field(examples=["loss"])
    rank: int | None = Field(description="Null: of all ranks together.")
    count: int = Field(description="How many steps have a value.")
    first: StepValueView | None = Field(description="Null where the first step alone is no longer kept.")
    last: StepValueView
    min: float
    max: float
    points: list[SeriesPoint]


class MetricsView(Wire):
    """The numbers of a job."""

    series: list[SeriesView]


class TimelineView(Wire):
    """One measured step."""

    attempt: int
    step: int
    timeline: dict[str, Any] = Field(description="The Timeline in its manifest form.")
    sampled_steps: list[int] = Field(description="All steps that have a timeline.")
    typical_step: int = Field(description="Of the sampled steps the one whose length is nearest to the median step's.")


class LogView(Wire):
    """A line that a rank printed."""

    rank: int = Field(description="-1: the supervisor.")
    number: int
    attempt: int
    at: datetime
    level: str
    message: str


class LogPage(Wire):
    """Lines, by rank and number."""

    items: list[LogView]
    next: str = Field(description="Pass it as `cursor` for the lines that follow, also those that are yet to come.")
    complete: bool = Field(
        description="Whether no more lines will come: the job has ended or is suspended, and all that its attempts"
        " recorded is in. On a cluster a pod's last lines may come a little later."
    )


def job_view(stored: StoredJob) -> JobView:
    """The job's view."""
    manifest = stored.manifest
    metadata = {
        **manifest["metadata"],
        "namespace": stored.namespace,
        "generation": stored.generation,
        "resourceVersion": str(stored.version),
        "creationTimestamp": instant(stored.created_at),
    }
    ended_at = stored.delete_requested_at or stored.deleted_at
    if ended_at is not None:
        metadata["deletionTimestamp"] = instant(ended_at)
    return JobView(
        api_version=manifest["apiVersion"],
        kind=manifest["kind"],
        metadata=metadata,
        spec=manifest["spec"],
        status=status_view(stored),
    )


def job_row(stored: StoredJob) -> JobRow:
    """The job in a line."""
    return JobRow(
        uid=stored.uid,
        namespace=stored.namespace,
        name=stored.name,
        labels=dict(stored.labels),
        created_at=instant(stored.created_at),
        deleted_at=maybe(stored.deleted_at),
        version=stored.version,
        suspend=stored.suspend,
        status=status_view(stored),
    )


def status_view(stored: StoredJob) -> StatusView:
    """Where the job stands."""
    return StatusView(
        phase=stored.phase,
        reason=stored.phase_reason,
        message=stored.phase_message,
        entered_at=instant(stored.phase_entered_at),
        attempt=stored.attempt,
        failures=stored.failures,
        started_at=maybe(stored.started_at),
        finished_at=maybe(stored.finished_at),
        plan_digest=stored.plan_digest,
        progress=_progress_view(stored),
    )


def speed_view(speed: Speed | None) -> SpeedView | None:
    """Both numbers, if they are known."""
    return None if speed is None else SpeedView.model_validate(speed, from_attributes=True)


def _progress_view(stored: StoredJob) -> ProgressView | None:
    progress = stored.progress
    if progress is None:
        return None
    return ProgressView(
        step=progress.step,
        num_steps=stored.num_steps,
        loss=progress.loss,
        step_seconds=progress.step_seconds,
        speed=speed_view(stored.speed),
        last_checkpoint=progress.last_checkpoint,
        reported_at=instant(progress.reported_at),
    )
