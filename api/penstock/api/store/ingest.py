"""Ingestion of records: deduplication of a batch, and the table of each kind of record.

A source numbers its records. A row has the highest stored number, and changes in the transaction of the data. So a
batch that is sent again after a lost answer changes nothing, whenever the service was killed.

Concurrent batches are stored together: a statement costs more than the rows that it writes.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import Connection, Insert, Select, select

from penstock.api.store import attempts, reports
from penstock.api.store.documents import pack
from penstock.api.store.engine import upsert
from penstock.api.store.jobs import NoSuchJobError, Reported, report
from penstock.api.store.lines import Line, add_lines
from penstock.api.store.rows import Keys, put, select_rows
from penstock.api.store.schema import jobs, sources, timelines
from penstock.api.store.series import ALL_RANKS, Point, add_points
from penstock.core.errors import PenstockError, UserError
from penstock.core.profile import Profile
from penstock.core.records import NO_RANK, Record, StepMetrics
from penstock.core.timeline import Activity, Timeline
from penstock.core.units import to_seconds

SERIES = tuple(field.name for field in fields(StepMetrics) if field.name not in ("step", "attempt"))
LARGEST_RANK = 2**31 - 1
LONGEST_HOST, LONGEST_DIGEST = 255, 64
BUSY, PEAK = "busy_seconds", "peak_bytes"
"""Series of single ranks."""
MOST_RANKS = 64
"""Number of ranks whose sampled steps are stored as series; timelines contain all ranks."""


class StaleAttemptError(PenstockError):
    """The records are of a closed attempt, or of none."""


class EarlyAttemptError(PenstockError):
    """The records are of an unknown attempt: the stored job may be older than its pods."""


class ForeignJobError(PenstockError):
    """The records are of a job in a namespace that their sender may not report into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Records of one source, with increasing sequence numbers.

    ``namespace`` is the one into which their sender may report, all if none.
    """

    uid: str
    attempt: int
    source: str
    received_at: float
    records: tuple[Record, ...]
    namespace: str | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """Key of the source of the sequence numbers."""
        return self.uid, self.attempt, self.source

    @classmethod
    def of(cls, records: Sequence[Record], received_at: float, namespace: str | None = None) -> Batch:
        """Return the batch of these records; raises `UserError` unless they are of one source and in order."""
        if not records:
            raise UserError(what="is empty", where="records", remedy="send at least one record")
        first = records[0]
        identity = (first.uid, first.attempt, first.source)
        last = -1
        for i, record in enumerate(records):
            if (record.uid, record.attempt, record.source) != identity:
                raise UserError(
                    what="is of another source than the first record",
                    where=f"records[{i}]",
                    remedy="send one batch per uid, attempt and source",
                )
            if record.sequence <= last:
                raise UserError(
                    what=f"{record.sequence} does not follow {last}",
                    where=f"records[{i}].sequence",
                    remedy="send records in their order",
                )
            if record.log is not None and not NO_RANK <= record.log.rank <= LARGEST_RANK:
                raise UserError(
                    what=f"{record.log.rank} is not a rank",
                    where=f"records[{i}].log.rank",
                    remedy=f"number ranks from 0; {NO_RANK} means the supervisor",
                )
            if record.profile is not None:
                _check_profile(record.profile, f"records[{i}].profile")
            last = record.sequence
        return cls(
            uid=first.uid,
            attempt=first.attempt,
            source=first.source,
            received_at=received_at,
            records=tuple(records),
            namespace=namespace,
        )


def _check_profile(profile: Profile, where: str) -> None:
    """Raise for values that exceed their columns: they would fail all batches of the transaction."""
    for name, text, most in (
        ("key.host", profile.key.host, LONGEST_HOST),
        ("modelDigest", profile.model_digest, LONGEST_DIGEST),
    ):
        if len(text) > most:
            raise UserError(what=f"has {len(text)} characters", where=f"{where}.{name}", remedy=f"send up to {most}")
    if not 1 <= profile.num_ranks <= LARGEST_RANK:
        raise UserError(
            what=f"{profile.num_ranks} is not a number of ranks",
            where=f"{where}.numRanks",
            remedy="write a number from 1 on",
        )


def take(connection: Connection, batches: Sequence[Batch]) -> list[int | PenstockError]:
    """Store new records; return for each batch the highest stored sequence, or the reason of its refusal:

    NoSuchJobError: the uid is unknown.
    ForeignJobError: the job is in a namespace that the sender may not report into.
    StaleAttemptError: the attempt is closed.
    EarlyAttemptError: the attempt is unknown yet.
    """
    uids = sorted({batch.uid for batch in batches})
    current = _locked(connection, uids)
    older = {batch.key[:2] for batch in batches if _is_older(batch, current.get(batch.uid))}
    closed = attempts.closed_ones(connection, older) if older else frozenset()
    last_sequences = _last_sequences(connection, uids)
    outcomes: list[int | PenstockError] = []
    fresh: list[Batch] = []
    for batch in batches:
        refusal = _refusal(batch, current.get(batch.uid), closed)
        if refusal is not None:
            outcomes.append(refusal)
            continue
        last = last_sequences.get(batch.key, -1)
        new = tuple(record for record in batch.records if record.sequence > last)
        if new:
            fresh.append(replace(batch, records=new))
        last_sequences[batch.key] = max(last, batch.records[-1].sequence)
        outcomes.append(last_sequences[batch.key])
    if fresh:
        _keep(connection, fresh)
    return outcomes


def _is_older(batch: Batch, current: tuple[str, int] | None) -> bool:
    return current is not None and batch.attempt < current[1]


def _refusal(
    batch: Batch, current: tuple[str, int] | None, closed: Collection[tuple[str, int]]
) -> PenstockError | None:
    """Return the reason to refuse the batch; ``closed`` are the closed ones among older attempts.

    The newest attempt is not checked, which saves a query for each report: its executor closes it after its end, when
    no record of it is left.
    """
    if current is None:
        return NoSuchJobError(batch.uid)
    namespace, attempt = current
    if batch.namespace not in (None, namespace):
        return ForeignJobError(namespace)
    if batch.attempt > attempt:
        return EarlyAttemptError(f"attempt {batch.attempt}, but the newest known attempt is {attempt}")
    if batch.attempt < attempt and (batch.attempt < 1 or batch.key[:2] in closed):
        return StaleAttemptError(f"attempt {batch.attempt}, which is closed; the newest attempt is {attempt}")
    return None


def _locked(connection: Connection, uids: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Lock the jobs' rows; return their namespaces and current attempts. The lock protects the sources' numbers too."""
    rows = select_rows(connection, _lock, [(uid,) for uid in uids])
    return {uid: (namespace, attempt) for uid, namespace, attempt in rows}


def _lock(keys: Keys) -> Select[Any]:
    chosen = select(jobs.c.uid, jobs.c.namespace, jobs.c.attempt).where(jobs.c.uid.in_([uid for (uid,) in keys]))
    return chosen.order_by(jobs.c.uid).with_for_update()


def _last_sequences(connection: Connection, uids: Sequence[str]) -> dict[tuple[str, int, str], int]:
    """Return the highest stored sequence number of each source."""
    rows = select_rows(connection, _of_jobs, [(uid,) for uid in uids])
    return {(uid, attempt, source): sequence for uid, attempt, source, sequence in rows}


def _of_jobs(keys: Keys) -> Select[Any]:
    return select(sources).where(sources.c.uid.in_([uid for (uid,) in keys]))


def _keep(connection: Connection, fresh: Sequence[Batch]) -> None:
    """Store each kind of record of all batches by one statement."""
    last = {batch.key: batch.records[-1].sequence for batch in fresh}
    put(connection, _raise_sequence, [(*key, last[key]) for key in sorted(last)])
    points: dict[tuple[str, int], list[Point]] = {}
    for batch in fresh:
        points.setdefault((batch.uid, batch.attempt), []).extend(_points(batch))
    add_points(connection, points, max(batch.received_at for batch in fresh))
    attempts.note_checkpoints(connection, _checkpoints(fresh))
    report(connection, [(batch.uid, reported) for batch in fresh if (reported := _reported(batch)) is not None])
    put(connection, _keep_timelines, [row for batch in fresh for row in _timeline_rows(batch)])
    add_lines(connection, [line for batch in fresh for line in _lines(batch)])
    for batch in fresh:
        profiles = [
            (batch.uid, batch.attempt, record.profile) for record in batch.records if record.profile is not None
        ]
        reports.keep_profiles(connection, profiles, batch.received_at)


@functools.cache
def _raise_sequence(dialect: str) -> Insert:
    raising = upsert(dialect, sources)
    raised = {"sequence": raising.excluded.sequence}
    return raising.on_conflict_do_update(index_elements=list(sources.primary_key), set_=raised)


def _points(batch: Batch) -> Iterator[Point]:
    for record in batch.records:
        if record.metrics is not None:
            yield from _step_points(record.metrics)
        if record.timeline is not None:
            yield from rank_points(record.timeline)


def _step_points(metrics: StepMetrics) -> Iterator[Point]:
    for name in SERIES:
        value = getattr(metrics, name)
        if value is not None:
            yield Point(name, ALL_RANKS, metrics.step, float(value))


def rank_points(timeline: Timeline) -> Iterator[Point]:
    """Yield the busy seconds of each rank in a sampled step, and the peak of its memory where that is known."""
    step, num_ranks = timeline.step or 0, min(timeline.num_ranks, MOST_RANKS)
    busy_ns: Counter[int] = Counter()
    for event in timeline.events:
        if event.activity is Activity.COMPUTE:
            busy_ns[event.rank] += event.duration_ns
    for rank in range(num_ranks):
        yield Point(BUSY, rank, step, to_seconds(busy_ns[rank]))
    for rank, peak in enumerate(timeline.peak_bytes[:num_ranks]):
        yield Point(PEAK, rank, step, float(peak))


def _reported(batch: Batch) -> Reported | None:
    """Progress of the attempt: the newest step, the newest checkpoint, and the median duration of the batch's steps."""
    steps = [record.metrics for record in batch.records if record.metrics is not None]
    metrics = steps[-1] if steps else None
    progress = next((record.progress for record in reversed(batch.records) if record.progress is not None), None)
    if metrics is None and progress is None:
        return None
    return Reported(
        attempt=batch.attempt,
        step=max(metrics.step + 1 if metrics else 0, progress.step if progress else 0),
        loss=metrics.loss if metrics else None,
        step_seconds=statistics.median(measured.step_seconds for measured in steps) if steps else None,
        last_checkpoint=progress.last_checkpoint if progress else None,
        reported_at=batch.received_at,
    )


def _checkpoints(fresh: Sequence[Batch]) -> Iterator[tuple[str, int, int]]:
    """Yield the newest checkpoint of each batch that reports one."""
    for batch in fresh:
        reported_steps = [record.progress.last_checkpoint for record in batch.records if record.progress is not None]
        saved = [step for step in reported_steps if step is not None]
        if saved:
            yield batch.uid, batch.attempt, saved[-1]


def _timeline_rows(batch: Batch) -> Iterator[tuple[str, int, int, bytes]]:
    for timeline in (record.timeline for record in batch.records if record.timeline is not None):
        yield batch.uid, batch.attempt, timeline.step or 0, pack(timeline.to_manifest())


@functools.cache
def _keep_timelines(dialect: str) -> Insert:
    return upsert(dialect, timelines).on_conflict_do_nothing()


def _lines(batch: Batch) -> Iterator[Line]:
    for record in batch.records:
        if record.log is not None:
            yield Line(
                uid=batch.uid,
                rank=record.log.rank,
                attempt=batch.attempt,
                at=record.recorded_at,
                level=record.log.level,
                message=record.log.message,
            )
