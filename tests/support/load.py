"""A load on the service: jobs that report at their times, and what a database must hold of it afterwards.

Every job is a row, and its reports are written in advance, so that who sends them takes little of the machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, func, select, update

from penstock.api.auth.identity import Identity, Role
from penstock.api.store import jobs as stored_jobs
from penstock.api.store import tokens
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import jobs, log_lines, points, rollups, series
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.records import LogLine, Record, RecordKind, StepMetrics
from tests.support.service import job_manifest, make_tables

STEPS, LINES = 5, 5
POINTS_PER_STEP = 6
NUM_TEAMS = 10
RECORDED_AT = 1_700_000_000.0
UID_PREFIX = "00000000-0000-0000-0000-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``num_jobs`` jobs of ``num_reports`` reports each: one every ``period_seconds``, of 30 points and 5 log lines."""

    num_jobs: int = 1000
    num_reports: int
    period_seconds: float = 5.0

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.num_reports * self.period_seconds

    def due(self, job: int, report: int) -> float:
        """When a report is sent, in seconds after the start: jobs are spread over the period."""
        return (report + job / self.num_jobs) * self.period_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A database that has the load's jobs, and secrets of who reports and who listens."""

    folder: Path
    database: str
    ingest: str
    viewer: str


def uid_of(job: int) -> str:
    """The uid of a job by its number."""
    return f"{UID_PREFIX}{job:012d}"


def prepare(load: Load, folder: Path, database: str = "") -> Target:
    """Tables, running jobs and tokens in a new database; without a URL in a file of the folder."""
    database = database or f"sqlite:///{folder / 'penstock.db'}"
    make_tables(database)
    engine = make_engine(parse_url(database))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        for job in range(load.num_jobs):
            _add(connection, job)
        _, ingest = tokens.add(connection, Identity(name="ranks", role=Role.INGEST), RECORDED_AT)
        _, viewer = tokens.add(connection, Identity(name="people", role=Role.VIEWER), RECORDED_AT)
    engine.dispose()
    return Target(folder=folder, database=database, ingest=ingest, viewer=viewer)


def _add(connection: Connection, job: int) -> None:
    manifest = job_manifest(f"job-{job}", labels={"team": f"t{job % NUM_TEAMS}"})
    stored_jobs.create(connection, PipelineJob.from_manifest(manifest), uid_of(job), "load", RECORDED_AT)
    running = update(jobs).where(jobs.c.uid == uid_of(job))
    connection.execute(running.values(attempt=1, phase=Phase.RUNNING.value, executor="another"))


def bodies(load: Load) -> Iterator[list[bytes]]:
    """Of each report the compressed bodies of all jobs."""
    for report in range(load.num_reports):
        text = json.dumps({"records": [record.to_manifest() for record in records(report)]}, separators=(",", ":"))
        yield [gzip.compress(text.replace(uid_of(0), uid_of(job)).encode(), 5) for job in range(load.num_jobs)]


def records(report: int) -> list[Record]:
    """A report of job 0."""
    steps: list[dict[str, Any]] = [{"metrics": _metrics(report * STEPS + i)} for i in range(STEPS)]
    lines: list[dict[str, Any]] = [
        {"log": LogLine(rank=0, level="INFO", message=f"line {report * LINES + i}")} for i in range(LINES)
    ]
    return [
        Record(
            uid=uid_of(0),
            attempt=1,
            source="rank-0",
            sequence=report * (STEPS + LINES) + i,
            recorded_at=RECORDED_AT + report,
            kind=RecordKind(next(iter(content))),
            **content,
        )
        for i, content in enumerate([*steps, *lines])
    ]


def _metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=3.0 + 7.0 / (step + 1),
        step_seconds=1.0 + 0.001 * (step % 17),
        tokens_per_second=8192.0 - step % 31,
        learning_rate=3e-4,
        gradient_norm=0.5 + 1.0 / (step + 1),
        peak_bytes=10**10 + step,
        attempt=1,
    )


# Afterwards


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Records of the load in a database, compared with those it should have: lost and duplicated ones."""

    points: int
    rolled_up: int
    lines: int
    different_lines: int
    jobs_complete: int

    def missing(self, load: Load) -> list[str]:
        """What is not as it should be, in words."""
        reports = load.num_jobs * load.num_reports
        wanted = {
            "points": reports * STEPS * POINTS_PER_STEP,
            "rolled_up": 2 * reports * STEPS * POINTS_PER_STEP,
            "lines": reports * LINES,
            "different_lines": reports * LINES,
            "jobs_complete": load.num_jobs,
        }
        return [
            f"{name}: {getattr(self, name)}, not {value}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]


def kept(load: Load, target: Target) -> Kept:
    """Count the records of the load's jobs, once all are acknowledged. A service may have run other jobs as well."""
    engine = make_engine(parse_url(target.database))
    of_load = select(series.c.id, series.c.uid).where(series.c.uid.startswith(UID_PREFIX)).subquery()
    their_points = points.join(of_load, points.c.series == of_load.c.id)
    their_rollups = rollups.join(of_load, rollups.c.series == of_load.c.id)
    of_job = select(func.count()).select_from(their_points).group_by(of_load.c.uid)
    lines = select(log_lines.c.uid, log_lines.c.message).where(log_lines.c.uid.startswith(UID_PREFIX))
    complete = load.num_reports * STEPS * POINTS_PER_STEP
    with engine.connect() as connection:
        found = Kept(
            points=_count(connection, select(func.count()).select_from(their_points)),
            rolled_up=_count(connection, select(func.sum(rollups.c.count)).select_from(their_rollups)),
            lines=_count(connection, select(func.count()).select_from(lines.subquery())),
            different_lines=_count(connection, select(func.count()).select_from(lines.distinct().subquery())),
            jobs_complete=sum(number == complete for (number,) in connection.execute(of_job)),
        )
    engine.dispose()
    return found


def _count(connection: Connection, chosen: Select[Any]) -> int:
    return int(connection.execute(chosen).scalar_one() or 0)
