"""Schemas of jobs and their records: progress, plans, series, timelines and logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from penstock.api.schemas.wire import Wire, instant, maybe
from penstock.api.store.jobs import StoredJob
from penstock.core.job import API_VERSION
from penstock.core.lifecycle import Phase
from penstock.core.speed import Speed


class SpeedView(Wire):
    """Speed of a step."""

    tokens_per_second_per_device: float = Field(description="Tokens of a step, divided by its seconds and its devices.")
    model_flops_utilization: float | None = Field(
        description="FLOPs of the model as a share of all devices' peak; null: the peak is not known."
    )


class ProgressView(Wire):
    """The newest report of the job's ranks."""

    step: int = Field(description="Number of steps that are done.")
    num_steps: int = Field(description="Number of steps of the job.")
    loss: float | None = Field(description="Training loss in nats per token.")
    step_seconds: float | None
    speed: SpeedView | None = Field(description="Speed by the step time and the plan; null without time or plan.")
    last_checkpoint: int | None = Field(description="Step of the newest complete checkpoint.")
    reported_at: datetime


class StatusView(Wire):
    """Status of a job."""

    phase: Phase
    reason: str
    message: str
    entered_at: datetime = Field(description="Time at which the job entered this phase.")
    attempt: int
    failures: int
    started_at: datetime | None
    finished_at: datetime | None
    plan_digest: str | None
    progress: ProgressView | None


class JobView(BaseModel):
    """A PipelineJob with its status."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True)

    api_version: str = Field(examples=[API_VERSION])
    kind: str = Field(examples=["PipelineJob"])
    metadata: dict[str, Any] = Field(description="As submitted, with uid, generation, resourceVersion and times.")
    spec: dict[str, Any] = Field(description="As submitted; defaults are left out.")
    status: StatusView


class JobRow(Wire):
    """A job in lists and live streams: identity and status."""

    uid: str
    namespace: str
    name: str
    labels: dict[str, str]
    created_at: datetime
    deleted_at: datetime | None
    version: int = Field(description="Version in the ETag.")
    suspend: bool = Field(description="Whether suspension is requested.")
    status: StatusView


class JobPage(Wire):
    """A page of jobs, in order."""

    items: list[JobView]
    next: str | None = Field(description="Pass it as `cursor` for those that follow; null at the end.")


class EventView(Wire):
    """An event of a job."""

    number: int = Field(description="Increases by one within a job; an SSE stream uses it as its id.")
    at: datetime
    kind: str = Field(examples=["phase"])
    body: dict[str, Any]


class EventPage(Wire):
    """Events, oldest first."""

    items: list[EventView]


class PlanView(Wire):
    """A plan that a job used, from an attempt on."""

    revision: int
    attempt: int
    created_at: datetime
    digest: str
    plan: dict[str, Any] = Field(description="The Plan in its manifest form, as `penstock plan -o json` prints it.")


class PlanPage(Wire):
    """Plans, oldest first."""

    items: list[PlanView]


class SeriesPoint(Wire):
    """Values of one or more steps, from ``step`` on."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float
    count: int = Field(description="Number of steps that the point covers.")


class StepValueView(Wire):
    """Value at a step."""

    step: int
    value: float


class SeriesView(Wire):
    """One metric over the steps. First, last, smallest and largest value are exact, for any number of points."""

    name: str = Field(examples=["loss"])
    rank: int | None = Field(description="Null: over all ranks.")
    count: int = Field(description="Number of steps with a value.")
    first: StepValueView | None = Field(description="Null if the value of the first step is no longer stored.")
    last: StepValueView
    min: float
    max: float
    points: list[SeriesPoint]


class MetricsView(Wire):
    """Metrics of a job."""

    series: list[SeriesView]


class TimelineView(Wire):
    """One measured step."""

    attempt: int
    step: int
    timeline: dict[str, Any] = Field(description="The Timeline in its manifest form.")
    sampled_steps: list[int] = Field(description="All steps that have a timeline.")
    typical_step: int = Field(description="The sampled step whose duration is nearest to the median.")


class LogView(Wire):
    """A log line of a rank."""

    rank: int = Field(description="-1: the supervisor.")
    number: int
    attempt: int
    at: datetime
    level: str
    message: str


class LogPage(Wire):
    """Lines, by rank and number."""

    items: list[LogView]
    next: str = Field(description="Pass it as `cursor` for the following lines, including future ones.")
    complete: bool = Field(
        description="Whether no more lines will come: the job has ended or is suspended, and all that its attempts"
        " recorded is in. On a cluster a pod's last lines may come a little later."
    )


def job_view(stored: StoredJob) -> JobView:
    """Return the view of a job."""
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
    """Return the job's row in lists."""
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
    """Status of a job."""
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
    """Return the view of a speed, if it is known."""
    return None if speed is None else SpeedView.model_validate(speed)


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
