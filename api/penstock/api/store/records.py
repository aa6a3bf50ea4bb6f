"""What a job's ranks reported, as it is asked for: log lines and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from penstock.api.store.documents import unpack
from penstock.api.store.schema import log_lines, timelines


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTimeline:
    """A sampled step of an attempt; ``timeline`` in manifest form."""

    attempt: int
    step: int
    timeline: dict[str, Any]


def lines(
    connection: Connection, uid: str, *, rank: int | None, after: int, limit: int, tail: bool
) -> Sequence[Row[Any]]:
    """Log lines with a number above ``after``, by rank and number; the last ones if ``tail``, else the first."""
    chosen = select(log_lines).where(log_lines.c.uid == uid, log_lines.c.number > after)
    if rank is not None:
        chosen = chosen.where(log_lines.c.rank == rank)
    if not tail:
        return connection.execute(chosen.order_by(log_lines.c.rank, log_lines.c.number).limit(limit)).all()
    newest = chosen.order_by(log_lines.c.at.desc(), log_lines.c.number.desc()).limit(limit)
    return sorted(connection.execute(newest).all(), key=lambda row: (row.rank, row.number))


def timeline(connection: Connection, uid: str, step: int | None) -> StoredTimeline | None:
    """The timeline of a step, of the newest attempt that sampled it; without a step the newest."""
    chosen = select(timelines).where(timelines.c.uid == uid)
    if step is not None:
        chosen = chosen.where(timelines.c.step == step)
    newest = chosen.order_by(timelines.c.attempt.desc(), timelines.c.step.desc()).limit(1)
    row = connection.execute(newest).one_or_none()
    if row is None:
        return None
    return StoredTimeline(attempt=row.attempt, step=row.step, timeline=unpack(row.body))


def sampled_steps(connection: Connection, uid: str) -> list[tuple[int, int]]:
    """Attempt and step of every timeline, in order."""
    chosen = select(timelines.c.attempt, timelines.c.step).where(timelines.c.uid == uid)
    rows = connection.execute(chosen.order_by(timelines.c.attempt, timelines.c.step))
    return [(attempt, step) for attempt, step in rows]
