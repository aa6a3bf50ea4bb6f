"""What a job's page shows, read from the store as one state, and made into what reports are drawn from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from penstock.api.store import jobs, plans, profiles, records, series
from penstock.api.store.ingest import MOST_RANKS
from penstock.api.store.jobs import StoredJob
from penstock.api.store.records import LinesQuery
from penstock.api.store.series import ALL_RANKS, ChartPoint
from penstock.core.job import JobSpec
from penstock.core.records import StepMetrics
from penstock.core.timeline import Timeline
from penstock.planner.comparison import rank_memory
from penstock.view.data import ReportData

MOST_EVENTS, MOST_LINES = 200, 200
REQUIRED = ("loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes")
SPARSE = "validation_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """Events and log lines oldest first; ``report`` holds what drawings and charts are made from, ``charts`` all series
    by name and rank.
    """

    stored: StoredJob
    spec: JobSpec
    report: ReportData
    charts: Mapping[tuple[str, int], Sequence[ChartPoint]]
    events: Sequence[Row[Any]]
    lines: Sequence[Row[Any]]


def read_job(connection: Connection, namespace: str, name: str) -> JobData:
    """The live or latest job of that name; raises `NoSuchJobError`."""
    stored = jobs.find(connection, namespace, name)
    uid, spec = stored.uid, stored.job.spec
    newest = plans.newest_plan(connection, uid)
    profile = profiles.find(connection, newest.profile_digest) if newest and newest.profile_digest else None
    found = records.timeline(connection, uid, None)
    measured = Timeline.from_manifest(found.timeline) if found else None
    charts = series.charts(connection, uid, (ALL_RANKS, *range(MOST_RANKS)))
    lines, _ = records.lines(connection, uid, LinesQuery(limit=MOST_LINES, tail=True))
    return JobData(
        stored=stored,
        spec=spec,
        report=ReportData(
            job=stored.name,
            phase=stored.phase.value,
            command="",
            plan=newest,
            profile=profile,
            metrics=step_metrics(charts),
            predicted=plans.predicted(connection, newest.digest) if newest else None,
            measured=measured,
            memory=rank_memory(newest, profile.memory.constant_bytes, measured) if newest and profile else (),
            memory_limit_bytes=spec.resources.memory_per_rank,
        ),
        charts=charts,
        events=jobs.history(connection, uid, max(0, stored.last_event - MOST_EVENTS)),
        lines=sorted(lines, key=lambda row: (row.at, row.rank, row.number)),
    )


def step_metrics(charts: Mapping[tuple[str, int], Sequence[ChartPoint]]) -> tuple[StepMetrics, ...]:
    """Charts as the steps they stand for; a validation goes to the step shown at or before it."""
    named = {name: points for (name, rank), points in charts.items() if rank == ALL_RANKS}
    if not all(name in named for name in REQUIRED):
        return ()
    values = {name: {point.step: point.mean for point in named[name]} for name in REQUIRED}
    attempts = {point.step: point.attempt for point in named["loss"]}
    steps = [step for step in attempts if all(step in values[name] for name in REQUIRED)]
    validated: dict[int, float] = {}
    for point in named.get(SPARSE, ()):
        if place := bisect_right(steps, point.step):
            validated[steps[place - 1]] = point.last
    return tuple(
        StepMetrics(
            step=step,
            attempt=attempts[step],
            loss=values["loss"][step],
            step_seconds=values["step_seconds"][step],
            tokens_per_second=values["tokens_per_second"][step],
            learning_rate=values["learning_rate"][step],
            gradient_norm=values["gradient_norm"][step],
            peak_bytes=round(values["peak_bytes"][step]),
            validation_loss=validated.get(step),
        )
        for step in steps
    )
