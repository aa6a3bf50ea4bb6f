"""Records of a job, below its name and its uid: its plans, metrics, steps and log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection, Row

from penstock.api.http.dependencies import JobIn, ServiceIn
from penstock.api.http.problems import LARGEST_NUMBER, READS, Problem
from penstock.api.schemas.jobs import (
    LogPage,
    LogView,
    MetricsView,
    PlanPage,
    PlanView,
    SeriesPoint,
    SeriesView,
    StepValueView,
    TimelineView,
)
from penstock.api.schemas.wire import instant
from penstock.api.store import plans, records, series
from penstock.api.store.ingest import BUSY, MOST_RANKS, PEAK
from penstock.api.store.records import STEP_SECONDS, LinesQuery, LogPosition, Sampled, StoredTimeline
from penstock.api.store.series import ALL_RANKS
from penstock.core.curves import StepValue
from penstock.core.records import NO_RANK

of_job = APIRouter(tags=["jobs"])

CURSOR = r"^((-1|[0-9]{1,9}):[0-9]{1,15}(,(-1|[0-9]{1,9}):[0-9]{1,15}){0,499})?$"
Rank = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
OF_RANKS = (
    f"Also of these ranks: {BUSY}, which they computed, and {PEAK}, both of sampled steps alone, "
    f"and of the first {MOST_RANKS} ranks."
)


@of_job.get("/plans", responses=READS, name="listJobPlans")
def list_plans(service: ServiceIn, job: JobIn) -> PlanPage:
    """List every plan that the job used, oldest first, with its reasons and the rejected alternatives."""
    revisions = service.read(lambda connection: plans.revisions(connection, job.uid))
    items = [
        PlanView(
            revision=revision.revision,
            attempt=revision.attempt,
            created_at=instant(revision.created_at),
            digest=revision.plan.digest,
            plan=revision.plan.to_manifest(),
        )
        for revision in revisions
    ]
    return PlanPage(items=items)


@of_job.get("/metrics", responses=READS, name="getJobMetrics")
def get_metrics(
    service: ServiceIn,
    job: JobIn,
    rank: Annotated[list[Rank], Query(description=OF_RANKS)] = [],  # noqa: B006
    points: Annotated[int, Query(ge=1, le=series.MOST_POINTS, description="At most so many a series.")] = 500,
) -> MetricsView:
    """Return the job's metrics over its steps, over all ranks unless ranks are named.

    With more steps than points, a point covers several steps: their minimum, mean, maximum and last value. First, last,
    smallest and largest value of a series are exact.
    """
    ranks = [ALL_RANKS, *rank]
    charts = service.read(lambda connection: series.charts(connection, job.uid, ranks, points))
    return MetricsView(
        series=[
            SeriesView(
                name=key,
                rank=None if of_rank == ALL_RANKS else of_rank,
                count=curve.count,
                first=_value(curve.first) if curve.first else None,
                last=_value(curve.last),
                min=curve.min,
                max=curve.max,
                points=[SeriesPoint(**asdict(point)) for point in curve.points],
            )
            for (key, of_rank), curve in charts.items()
        ]
    )


def _value(value: StepValue) -> StepValueView:
    return StepValueView(step=value.step, value=value.value)


@of_job.get("/timeline", responses=READS, name="getJobTimeline")
def get_timeline(
    service: ServiceIn,
    job: JobIn,
    step: Annotated[int | None, Query(ge=0, le=LARGEST_NUMBER, description="A sampled step; else the newest.")] = None,
) -> TimelineView:
    """Return the timeline of every rank in one measured step, with the list of measured steps and the typical one."""

    def question(connection: Connection) -> tuple[StoredTimeline | None, Sampled]:
        return records.timeline(connection, job.uid, step), records.sampled(connection, job.uid, usual(connection))

    def usual(connection: Connection) -> float | None:
        curve = series.charts(connection, job.uid, most=1).get((STEP_SECONDS, ALL_RANKS))
        return series.usual_of(connection, job.uid, STEP_SECONDS, curve).value if curve else None

    sample, sampled = service.read(question)
    if sample is None:
        raise not_sampled("no step was sampled" if step is None else f"step {step} was not sampled", sampled)
    return TimelineView(
        attempt=sample.attempt,
        step=sample.step,
        timeline=sample.timeline,
        sampled_steps=list(sampled.steps),
        typical_step=sample.step if sampled.typical is None else sampled.typical,
    )


def not_sampled(detail: str, sampled: Sampled) -> Problem:
    """Return the problem, with the sampled steps."""
    steps = ", ".join(map(str, sampled.steps[-10:])) or "none yet"
    return Problem(kind="not-found", detail=detail, where="step", remedy=f"the newest sampled steps: {steps}")


@of_job.get("/logs", responses=READS, name="getJobLogs")
def get_logs(
    service: ServiceIn,
    job: JobIn,
    rank: Annotated[
        int | None, Query(ge=NO_RANK, le=LARGEST_NUMBER, description="Only this rank; -1: the supervisor.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only lines with a higher number.")] = 0,
    cursor: Annotated[
        str | None, Query(pattern=CURSOR, max_length=16_384, description="The `next` of an answer before.")
    ] = None,
    tail: Annotated[bool, Query(description="The last lines instead of the first.")] = False,
    limit: Annotated[int, Query(ge=1, le=2000)] = 200,
) -> LogPage:
    """Return the output of ranks, by rank; the numbers of a rank's lines continue across attempts.

    The service has the last 2,000 lines of every rank, and the files among the job's artifacts have all of them.
    """
    query = LinesQuery(rank=rank, after=after, position=read_cursor(cursor or ""), tail=tail, limit=limit)

    def question(connection: Connection) -> tuple[Sequence[Row[Any]], records.LogPosition, bool]:
        return *records.lines(connection, job.uid, query), records.is_complete(connection, job.uid)

    rows, position, complete = service.read(question)
    items = [
        LogView(
            rank=row.rank,
            number=row.number,
            attempt=row.attempt,
            at=instant(row.at),
            level=row.level,
            message=row.message,
        )
        for row in rows
    ]
    return LogPage(items=items, next=write_cursor(position), complete=complete)


def read_cursor(text: str) -> LogPosition:
    """Parse ``RANK:NUMBER`` pairs."""
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return {int(rank): int(number) for rank, number in pairs}


def write_cursor(position: LogPosition) -> str:
    """Format ``RANK:NUMBER`` pairs."""
    return ",".join(f"{rank}:{number}" for rank, number in sorted(position.items()))
