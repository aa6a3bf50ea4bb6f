"""Data of a job's page, read as one snapshot of the store and converted for reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row

from penstock.api.store import jobs, plans, profiles, records, series
from penstock.api.store.ingest import MOST_RANKS
from penstock.api.store.jobs import OutdatedJobError, StoredJob
from penstock.api.store.records import LinesQuery, Sampled
from penstock.api.store.series import ALL_RANKS, usual_of
from penstock.core.curves import Curve, RunCurves, StepValue
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.timeline import Timeline
from penstock.planner.comparison import rank_memory
from penstock.view.data import ReportData

MOST_EVENTS, MOST_LINES = 200, 200
USUAL = ("step_seconds", "tokens_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """Data of a page. Events and log lines are ordered, oldest first.

    ``report`` is the data of drawings and charts, ``charts`` are all series by name and rank. ``sampled`` are the steps
    that can be drawn, of which ``report`` has one. ``spec`` is none for a job that this version cannot read, and
    ``mistakes`` are the reasons why it starts no further attempt.
    """

    stored: StoredJob
    spec: JobSpec | None
    mistakes: Sequence[UserError]
    report: ReportData
    charts: Mapping[tuple[str, int], Curve]
    sampled: Sampled
    events: Sequence[Row[Any]]
    lines: Sequence[Row[Any]]


class NotSampledError(LookupError):
    """The step has no timeline."""

    def __init__(self, step: int, sampled: Sampled) -> None:
        super().__init__(f"step {step} was not sampled")
        self.sampled = sampled


def read_job(connection: Connection, namespace: str, name: str, step: int | None = None) -> JobData:
    """Read the existing or latest job of that name, with the timeline of ``step``, or of the typical step.

    Raises `NoSuchJobError`, and `NotSampledError`.
    """
    stored = jobs.find(connection, namespace, name)
    uid, spec = stored.uid, _spec(stored)
    newest = plans.newest_plan(connection, uid)
    profile = profiles.find(connection, newest.profile_digest) if newest and newest.profile_digest else None
    charts = series.charts(connection, uid, (ALL_RANKS, *range(MOST_RANKS)))
    run = run_curves(connection, uid, charts)
    sampled = records.sampled(connection, uid, run.step_seconds.value if run.step_seconds else None)
    if step is not None and step not in sampled.steps:
        raise NotSampledError(step, sampled)
    displayed = _timeline(connection, uid, sampled.typical if step is None else step)
    last = _timeline(connection, uid, None)  # the newest has the largest peaks: they only grow
    lines, _ = records.lines(connection, uid, LinesQuery(limit=MOST_LINES, tail=True))
    return JobData(
        stored=stored,
        spec=spec,
        mistakes=stored.mistakes,
        report=ReportData(
            job=stored.name,
            phase=stored.phase.value,
            command="",
            plan=newest,
            profile=profile,
            run=run,
            predicted=plans.predicted(connection, newest.digest) if newest else None,
            measured=displayed,
            memory=rank_memory(newest, profile.memory.constant_bytes, last) if newest and profile else (),
            memory_limit_bytes=spec.resources.memory_per_rank if spec else None,
        ),
        charts=charts,
        sampled=sampled,
        events=jobs.history(connection, uid, max(0, stored.last_event - MOST_EVENTS)),
        lines=sorted(lines, key=lambda row: (row.at, row.rank, row.number)),
    )


def _spec(stored: StoredJob) -> JobSpec | None:
    try:
        return stored.recorded_job.spec
    except OutdatedJobError:
        return None


def _timeline(connection: Connection, uid: str, step: int | None) -> Timeline | None:
    sample = records.timeline(connection, uid, step)
    return Timeline.from_manifest(sample.timeline) if sample else None


def run_curves(connection: Connection, uid: str, charts: Mapping[tuple[str, int], Curve]) -> RunCurves:
    """Return the metrics over all ranks, with the usual values of single steps."""
    curves = {name: curve for (name, rank), curve in charts.items() if rank == ALL_RANKS}
    usual = {name: usual_of(connection, uid, name, curves[name]) for name in USUAL if name in curves}
    if "loss" in curves and (taken := curves.get("step_seconds")) and curves["loss"].last.step < taken.last.step:
        # Every step reports a loss, but only finite values are stored: that of the newest steps was not finite.
        curves["loss"] = replace(curves["loss"], last=StepValue(taken.last.step, math.nan))
    return RunCurves(curves=curves, step_seconds=usual.get(USUAL[0]), tokens_per_second=usual.get(USUAL[1]))
