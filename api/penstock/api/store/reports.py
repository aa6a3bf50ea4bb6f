"""Reports for the jobs of a cluster: their progress, in the form of a PipelineJob's status, and the measurements of
their attempts, with the ConfigMaps that hold them for planners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, or_, select, update

from penstock.api.store import profiles
from penstock.api.store.engine import upsert
from penstock.api.store.schema import jobs, measurements, progress
from penstock.api.store.step_predictions import StepPredictions, speed_of_step, step_predictions
from penstock.core.lifecycle import Phase
from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH
from penstock.core.profile import Profile
from penstock.core.status import JobProgress

LOSS_DIGITS = 6
"""Digits of the loss in a status; the store has all digits."""

AnyRow = Row[*tuple[Any, ...]]
UNFINISHED = [phase.value for phase in Phase if not phase.terminal]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A job in its phase, and the progress of its newest attempt."""

    uid: str
    namespace: str
    name: str
    progress: JobProgress
    phase: Phase


def reported_rows(connection: Connection, cluster: str, others: Collection[str] | None = None) -> dict[str, AnyRow]:
    """Return what the cluster's unfinished jobs reported, by uid, and ``others`` by uid, or all jobs if that is None.

    Jobs are not chosen by time: a report has the time of the service that received it, whose clock may differ.
    """
    reported = and_(progress.c.uid == jobs.c.uid, progress.c.attempt == jobs.c.attempt)
    measured = and_(measurements.c.uid == jobs.c.uid, measurements.c.attempt == jobs.c.attempt)
    progress_columns = (
        progress.c.step,
        progress.c.loss,
        progress.c.step_seconds,
        progress.c.last_checkpoint,
        jobs.c.plan_digest,
    )
    columns = (jobs.c.uid, jobs.c.namespace, jobs.c.name, jobs.c.attempt, jobs.c.phase, measurements.c.ref)
    times = (progress.c.reported_at, measurements.c.reported_at.label("measured_at"))
    joined = jobs.outerjoin(progress, reported).outerjoin(measurements, measured)
    chosen = select(*columns, *progress_columns, *times).select_from(joined)
    has_reported = or_(progress.c.uid.is_not(None), measurements.c.uid.is_not(None))
    chosen = chosen.where(jobs.c.cluster == cluster, jobs.c.deleted_at.is_(None), has_reported)
    if others is not None:
        chosen = chosen.where(or_(jobs.c.phase.in_(UNFINISHED), jobs.c.uid.in_(sorted(others))))
    return {row.uid: row for row in connection.execute(chosen)}


def reports(connection: Connection, rows: Collection[AnyRow]) -> list[Report]:
    """Return the reports of these rows of `reported_rows`."""
    digests = {row.plan_digest for row in rows if row.plan_digest and row.step_seconds}
    predictions = step_predictions(connection, digests)
    return [_report(row, predictions) for row in rows]


def _report(row: AnyRow, predictions: StepPredictions) -> Report:
    """Return the report of a row, whose ``step`` is the number of finished steps, none before the first."""
    trains = row.step is not None
    job_progress = JobProgress(
        attempt=row.attempt,
        epoch=TRAIN_EPOCH if trains else MEASURE_EPOCH,
        step=row.step or 0,
        loss=None if row.loss is None else float(f"{row.loss:.{LOSS_DIGITS}g}"),
        step_seconds=row.step_seconds,
        speed=speed_of_step(predictions, row.plan_digest, row.step_seconds),
        last_checkpoint=row.last_checkpoint,
        profile_ref=row.ref or "",
        reported_at=row.reported_at if trains else row.measured_at,
    )
    return Report(uid=row.uid, namespace=row.namespace, name=row.name, progress=job_progress, phase=Phase(row.phase))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement of an attempt that has no ConfigMap yet."""

    uid: str
    namespace: str
    name: str
    attempt: int
    digest: str


def keep_profiles(connection: Connection, measured: Iterable[tuple[str, int, Profile]], now: float) -> None:
    """Store attempts' profiles, each by uid and number; the first of an attempt is kept, because plans use it."""
    for uid, attempt, profile in measured:
        profiles.keep(connection, profile)
        row = {"uid": uid, "attempt": attempt, "digest": profile.digest, "reported_at": now, "ref": ""}
        connection.execute(upsert(connection.dialect.name, measurements).values(row).on_conflict_do_nothing())


def unpublished(connection: Connection, cluster: str, most: int = 100) -> list[Measurement]:
    """Return unpublished measurements of the newest attempts of the cluster's jobs, oldest first."""
    mine = (jobs.c.uid == measurements.c.uid) & (jobs.c.attempt == measurements.c.attempt)
    columns = (jobs.c.uid, jobs.c.namespace, jobs.c.name, measurements.c.attempt, measurements.c.digest)
    chosen = select(*columns).select_from(measurements.join(jobs, mine))
    chosen = chosen.where(measurements.c.ref == "", jobs.c.cluster == cluster, jobs.c.deleted_at.is_(None))
    rows = connection.execute(chosen.order_by(measurements.c.reported_at).limit(most))
    return [Measurement(**row._mapping) for row in rows]


def mark_published(connection: Connection, uid: str, attempt: int, ref: str) -> None:
    """Store that the ConfigMap ``ref`` holds the measurement."""
    mine = (measurements.c.uid == uid, measurements.c.attempt == attempt)
    connection.execute(update(measurements).where(*mine).values(ref=ref))
