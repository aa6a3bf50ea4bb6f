"""Queries of ranks' records: log lines and timelines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select

from penstock.api.store import attempts, series
from penstock.api.store.documents import unpack
from penstock.api.store.schema import jobs, log_lines, timelines
from penstock.core.lifecycle import Phase
from penstock.core.units import to_seconds

STEP_SECONDS = "step_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTimeline:
    """Sampled step of an attempt; ``timeline`` is in manifest form."""

    attempt: int
    step: int
    timeline: dict[str, Any]


LogPosition = Mapping[int, int]
"""Number of the last line that was read, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinesQuery:
    """Query of log lines: of ``rank`` or of all, after ``after`` and ``position``; with ``tail`` the last ones."""

    rank: int | None = None
    after: int = 0
    position: LogPosition = field(default_factory=dict)
    tail: bool = False
    limit: int = 200


def lines(connection: Connection, uid: str, query: LinesQuery) -> tuple[Sequence[Row[Any]], LogPosition]:
    """Return log lines by rank and number, and the position after them."""
    chosen = select(log_lines).where(log_lines.c.uid == uid, log_lines.c.number > query.after)
    if query.rank is not None:
        chosen = chosen.where(log_lines.c.rank == query.rank)
    if query.position:
        chosen = chosen.where(_after_position(query.position))
    if not query.tail:
        rows = connection.execute(chosen.order_by(log_lines.c.rank, log_lines.c.number).limit(query.limit)).all()
        return rows, {**query.position, **{row.rank: row.number for row in rows}}
    newest = chosen.order_by(log_lines.c.at.desc(), log_lines.c.number.desc(), log_lines.c.rank.desc()).limit(
        query.limit
    )
    rows = sorted(connection.execute(newest).all(), key=lambda row: (row.rank, row.number))
    last = select(log_lines.c.rank, func.max(log_lines.c.number)).where(log_lines.c.uid == uid)
    return rows, {row[0]: row[1] for row in connection.execute(last.group_by(log_lines.c.rank))}


def _after_position(position: LogPosition) -> ColumnElement[bool]:
    newer = [and_(log_lines.c.rank == rank, log_lines.c.number > number) for rank, number in position.items()]
    return or_(log_lines.c.rank.not_in(list(position)), *newer)


def is_complete(connection: Connection, uid: str) -> bool:
    """Whether the job gets no further records unless it is resumed: it has stopped, and all its attempts are closed.

    Attempts on a cluster are never closed.
    """
    row = connection.execute(select(jobs.c.phase, jobs.c.cluster).where(jobs.c.uid == uid)).one_or_none()
    if row is None:
        return True
    phase = Phase(row.phase)
    rests = phase.terminal or phase is Phase.SUSPENDED
    return rests and (row.cluster != "" or not attempts.has_open(connection, uid))


def timeline(connection: Connection, uid: str, step: int | None) -> StoredTimeline | None:
    """Return the timeline of a step, of the newest attempt that sampled it; without a step the newest."""
    chosen = select(timelines).where(timelines.c.uid == uid)
    if step is not None:
        chosen = chosen.where(timelines.c.step == step)
    newest = chosen.order_by(timelines.c.attempt.desc(), timelines.c.step.desc()).limit(1)
    row = connection.execute(newest).one_or_none()
    if row is None:
        return None
    return StoredTimeline(attempt=row.attempt, step=row.step, timeline=unpack(row.body))


def sampled_steps(connection: Connection, uid: str) -> list[tuple[int, int]]:
    """Return attempt and step of every timeline, in order."""
    chosen = select(timelines.c.attempt, timelines.c.step).where(timelines.c.uid == uid)
    rows = connection.execute(chosen.order_by(timelines.c.attempt, timelines.c.step))
    return [(attempt, step) for attempt, step in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Steps with a timeline, in order, and the typical one among them."""

    steps: tuple[int, ...]
    typical: int | None


def sampled(connection: Connection, uid: str, usual_seconds: float | None) -> Sampled:
    """Return the sampled steps.

    The typical one has the duration nearest to the usual one; without that it is the newest.
    """
    newest = {step: attempt for attempt, step in sampled_steps(connection, uid)}
    if not newest:
        return Sampled(steps=(), typical=None)
    if usual_seconds is None:
        return Sampled(steps=tuple(sorted(newest)), typical=max(newest))
    seconds = series.values_at(connection, uid, STEP_SECONDS, newest)
    for step in newest.keys() - seconds.keys():  # its point is no longer kept
        if (stored := timeline(connection, uid, step)) is not None:
            seconds[step] = to_seconds(int(stored.timeline["stepNs"]))
    typical = min(sorted(newest), key=lambda step: abs(seconds.get(step, math.inf) - usual_seconds))
    return Sampled(steps=tuple(sorted(newest)), typical=typical)
