"""What a job did, below /v1/jobs/{namespace}/{name}: its plans, the curves of its numbers, its steps, its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection

from penstock.api.dependencies import ServiceIn, Viewer
from penstock.api.problems import Problem, answers
from penstock.api.schemas import (
    LogPage,
    LogView,
    MetricsView,
    PlanPage,
    PlanView,
    SeriesPoint,
    SeriesView,
    TimelineView,
    instant,
)
from penstock.api.service import Service
from penstock.api.store import jobs, plans, records, series
from penstock.api.store.records import LinesQuery, Seen
from penstock.api.store.series import ALL_RANKS
from penstock.core.records import NO_RANK

T = TypeVar("T")

router = APIRouter(tags=["jobs"])

READS = answers("unauthenticated", "forbidden", "not-found")
LARGEST_NUMBER = 2**31 - 1
CURSOR = r"^((-1|[0-9]{1,9}):[0-9]{1,15}(,(-1|[0-9]{1,9}):[0-9]{1,15}){0,499})?$"
Rank = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]


def _of_job(service: Service, namespace: str, name: str, question: Callable[[Connection, str], T]) -> T:
    """What ``question`` finds about the job with this name."""

    def asked(connection: Connection) -> T:
        return question(connection, jobs.find(connection, namespace, name).uid)

    return service.read(asked)


@router.get("/v1/jobs/{namespace}/{name}/plans", responses=READS, operation_id="listJobPlans")
def list_plans(service: ServiceIn, identity: Viewer, namespace: str, name: str) -> PlanPage:
    """Every plan that the job went by, oldest first, with its reasons and what was rejected."""
    found = _of_job(service, namespace, name, plans.revisions)
    items = [
        PlanView(
            revision=each.revision,
            attempt=each.attempt,
            created_at=instant(each.created_at),
            digest=each.plan.digest,
            plan=each.plan.to_manifest(),
        )
        for each in found
    ]
    return PlanPage(items=items)


@router.get("/v1/jobs/{namespace}/{name}/metrics", responses=READS, operation_id="getJobMetrics")
def get_metrics(
    service: ServiceIn,
    identity: Viewer,
    namespace: str,
    name: str,
    rank: Annotated[list[Rank], Query(description="Also of these ranks.")] = [],  # noqa: B006
    points: Annotated[int, Query(ge=1, le=series.MOST_POINTS, description="At most so many a series.")] = 500,
) -> MetricsView:
    """The job's numbers over its steps, of all ranks together unless ranks are named.

    Where there are more steps than points, a point stands for several: their least, mean, greatest and last value.
    """
    ranks = [ALL_RANKS, *rank]
    charts = _of_job(service, namespace, name, lambda c, uid: series.charts(c, uid, ranks, points))
    return MetricsView(
        series=[
            SeriesView(
                name=key,
                rank=None if of_rank == ALL_RANKS else of_rank,
                points=[
                    SeriesPoint(
                        step=point.step,
                        attempt=point.attempt,
                        min=point.min,
                        mean=point.mean,
                        max=point.max,
                        last=point.last,
                    )
                    for point in chart
                ],
            )
            for (key, of_rank), chart in charts.items()
        ]
    )


@router.get("/v1/jobs/{namespace}/{name}/timeline", responses=READS, operation_id="getJobTimeline")
def get_timeline(
    service: ServiceIn,
    identity: Viewer,
    namespace: str,
    name: str,
    step: Annotated[int | None, Query(ge=0, le=LARGEST_NUMBER, description="A sampled step; else the newest.")] = None,
) -> TimelineView:
    """What every rank did when, in one measured step."""
    found = _of_job(service, namespace, name, lambda c, uid: records.timeline(c, uid, step))
    if found is None:
        steps = _of_job(service, namespace, name, records.sampled_steps)
        sampled = ", ".join(str(each) for _, each in steps[-10:]) or "none yet"
        detail = "no step was sampled" if step is None else f"step {step} was not sampled"
        raise Problem(kind="not-found", detail=detail, where="step", remedy=f"the newest sampled steps: {sampled}")
    return TimelineView(attempt=found.attempt, step=found.step, timeline=found.timeline)


@router.get("/v1/jobs/{namespace}/{name}/logs", responses=READS, operation_id="getJobLogs")
def get_logs(
    service: ServiceIn,
    identity: Viewer,
    namespace: str,
    name: str,
    rank: Annotated[
        int | None, Query(ge=NO_RANK, le=LARGEST_NUMBER, description="Only this rank; -1: who started the ranks.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only lines with a higher number.")] = 0,
    cursor: Annotated[
        str | None, Query(pattern=CURSOR, max_length=16_384, description="The `next` of an answer before.")
    ] = None,
    tail: Annotated[bool, Query(description="The last lines instead of the first.")] = False,
    limit: Annotated[int, Query(ge=1, le=2000)] = 200,
) -> LogPage:
    """What the ranks printed, by rank; lines of a rank are numbered on across attempts.

    The last 2,000 lines of every rank are here, all of them in the files among the job's artifacts.
    """
    query = LinesQuery(rank=rank, after=after, seen=read_cursor(cursor or ""), tail=tail, limit=limit)
    rows, seen = _of_job(service, namespace, name, lambda c, uid: records.lines(c, uid, query))
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
    return LogPage(items=items, next=write_cursor(seen))


def read_cursor(text: str) -> Seen:
    """``RANK:NUMBER`` pairs."""
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return {int(rank): int(number) for rank, number in pairs}


def write_cursor(seen: Seen) -> str:
    """The same as text."""
    return ",".join(f"{rank}:{number}" for rank, number in sorted(seen.items()))
