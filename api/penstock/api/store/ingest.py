"""Records taken in: what is new of a batch, and where each kind of record is kept.

A source numbers its records; the highest number taken is a row, changed in the transaction that keeps the data. So a
batch that is sent again after a lost answer changes nothing, whenever the service was killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from penstock.api.store.documents import pack
from penstock.api.store.engine import upsert
from penstock.api.store.jobs import NoSuchJobError, report
from penstock.api.store.schema import jobs, log_lines, sources, timelines
from penstock.api.store.series import ALL_RANKS, Point, add_points
from penstock.core.errors import PenstockError, UserError
from penstock.core.records import NO_RANK, Progress, Record, RecordKind, StepMetrics

NOT_SERIES = frozenset({"step", "attempt"})
MOST_LINES = 2_000
"""Of each rank of a job; the rest stays in files."""
MOST_LINE_CHARACTERS, MOST_LEVEL_CHARACTERS = 8_192, 15
LARGEST_RANK = 2**31 - 1


class StaleAttemptError(PenstockError):
    """The records are of an attempt that another one has followed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Records of one source, oldest first, by rising sequence."""

    uid: str
    attempt: int
    source: str
    records: tuple[Record, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Batch:
        """The batch of these records; raises `UserError` unless they are of one source and in order."""
        if not records:
            raise UserError(what="is empty", where="records", remedy="send at least one record")
        first = records[0]
        identity = (first.uid, first.attempt, first.source)
        last = -1
        for i, record in enumerate(records):
            if (record.uid, record.attempt, record.source) != identity:
                what, remedy = "is of another source", "send one batch per uid, attempt and source"
                raise UserError(what=what, where=f"records[{i}]", remedy=remedy)
            if record.sequence <= last:
                what, remedy = f"{record.sequence} does not follow {last}", "send records in their order"
                raise UserError(what=what, where=f"records[{i}].sequence", remedy=remedy)
            if record.log is not None and not NO_RANK <= record.log.rank <= LARGEST_RANK:
                what, remedy = f"{record.log.rank} is no rank", f"number ranks from 0; {NO_RANK} stands for none"
                raise UserError(what=what, where=f"records[{i}].log.rank", remedy=remedy)
            last = record.sequence
        return cls(uid=first.uid, attempt=first.attempt, source=first.source, records=tuple(records))


def take(connection: Connection, batch: Batch, now: float) -> int:
    """Keep what is new; the highest sequence that is kept.

    Raises:
        NoSuchJobError: the uid is unknown.
        StaleAttemptError: another attempt has followed.
    """
    locked = select(jobs.c.attempt).where(jobs.c.uid == batch.uid).with_for_update()
    current = connection.execute(locked).scalar_one_or_none()
    if current is None:
        raise NoSuchJobError(batch.uid)
    if batch.attempt != current:
        raise StaleAttemptError(f"attempt {batch.attempt}, not {current}")
    last = _raise_sequence(connection, batch)
    fresh = [record for record in batch.records if record.sequence > last]
    if fresh:
        _keep(connection, batch, fresh, now)
    return max(last, batch.records[-1].sequence)


def _raise_sequence(connection: Connection, batch: Batch) -> int:
    """The highest sequence taken before; the row is locked and raised."""
    key = {"uid": batch.uid, "attempt": batch.attempt, "source": batch.source}
    begun = upsert(connection, sources).values(**key, sequence=-1).on_conflict_do_nothing()
    connection.execute(begun)
    mine = [sources.c[name] == value for name, value in key.items()]
    last = int(connection.execute(select(sources.c.sequence).where(*mine).with_for_update()).scalar_one())
    newest = batch.records[-1].sequence
    if newest > last:
        connection.execute(sources.update().where(*mine).values(sequence=newest))
    return last


def _keep(connection: Connection, batch: Batch, fresh: Sequence[Record], now: float) -> None:
    metrics = [record.metrics for record in fresh if record.metrics is not None]
    add_points(connection, batch.uid, batch.attempt, list(_points(metrics)), now)
    told = _told(metrics, [record.progress for record in fresh if record.progress is not None])
    if told:
        report(connection, batch.uid, batch.attempt, now, **told)
    _keep_timelines(connection, batch, fresh)
    _keep_logs(connection, batch, fresh)


def _told(metrics: Sequence[StepMetrics], progress: Sequence[Progress]) -> dict[str, Any]:
    """Where the attempt stands: every step tells it, and checkpoints tell of themselves."""
    told: dict[str, Any] = {}
    if metrics:
        newest = metrics[-1]
        told = {"step": newest.step + 1, "loss": newest.loss, "step_seconds": newest.step_seconds}
    if progress:
        told["step"] = max(progress[-1].step, told.get("step", 0))
        told["last_checkpoint"] = progress[-1].last_checkpoint
    return told


def _points(metrics: Sequence[StepMetrics]) -> Iterator[Point]:
    for entry in metrics:
        for name, value in asdict(entry).items():
            if name not in NOT_SERIES and value is not None:
                yield Point(name, ALL_RANKS, entry.step, float(value))


def _keep_timelines(connection: Connection, batch: Batch, fresh: Sequence[Record]) -> None:
    for record in fresh:
        if record.timeline is not None:
            body = pack(record.timeline.to_manifest())
            step = record.timeline.step or 0
            row = {"uid": batch.uid, "attempt": batch.attempt, "step": step, "body": body}
            connection.execute(upsert(connection, timelines).values(row).on_conflict_do_nothing())


def _keep_logs(connection: Connection, batch: Batch, fresh: Sequence[Record]) -> None:
    """Lines are numbered on by rank, across attempts; the newest of each rank are kept."""
    by_rank: dict[int, list[Record]] = {}
    for record in fresh:
        if record.kind is RecordKind.LOG and record.log is not None:
            by_rank.setdefault(record.log.rank, []).append(record)
    for rank, records in by_rank.items():
        mine = (log_lines.c.uid == batch.uid, log_lines.c.rank == rank)
        newest = connection.execute(select(func.max(log_lines.c.number)).where(*mine)).scalar_one() or 0
        rows = list(_rows(batch, records[-MOST_LINES:], newest + 1 + max(len(records) - MOST_LINES, 0)))
        connection.execute(insert(log_lines), rows)
        if rows[-1]["number"] > MOST_LINES:
            old = log_lines.c.number <= rows[-1]["number"] - MOST_LINES
            connection.execute(delete(log_lines).where(*mine, old))


def _rows(batch: Batch, records: Sequence[Record], first: int) -> Iterator[dict[str, Any]]:
    for number, record in enumerate(records, start=first):
        assert record.log is not None
        yield {
            "uid": batch.uid,
            "rank": record.log.rank,
            "number": number,
            "attempt": batch.attempt,
            "at": record.recorded_at,
            "level": _text(record.log.level, MOST_LEVEL_CHARACTERS),
            "message": _text(record.log.message, MOST_LINE_CHARACTERS),
        }


def _text(value: str, most: int) -> str:
    """As PostgreSQL takes it: no NUL, and no longer than there is room for."""
    return value[:most].replace("\0", "\N{REPLACEMENT CHARACTER}")
