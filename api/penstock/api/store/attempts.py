"""Attempts in the store: launches of jobs, their devices, and whether all their records are stored.

An attempt is open from its launch until its executor has collected all its records. Then it is closed, and accepts no
further record. It stays open when the next attempt starts, and when the service ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, insert, or_, select, tuple_, update

from penstock.api.store.schema import attempts, jobs
from penstock.core.lifecycle import LIVE, Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """An attempt that has left its job's live phases and is not closed; ``newest`` is the job's newest attempt."""

    uid: str
    attempt: int
    newest: int


def add(connection: Connection, uid: str, launch: Launch, devices: tuple[str, ...], now: float) -> None:
    """Insert an attempt that is about to start; its number is used once."""
    row = {
        "uid": uid,
        "attempt": launch.attempt,
        "num_ranks": launch.ranks,
        "resume_from": launch.resume_from,
        "launched_at": now,
        "devices": devices,
    }
    connection.execute(insert(attempts).values(row))


def note_checkpoints(connection: Connection, saved_steps: Iterable[tuple[str, int, int]]) -> None:
    """Store the newest checkpoint of each attempt, given by uid, number and step."""
    for uid, attempt, step in saved_steps:
        mine = (attempts.c.uid == uid, attempts.c.attempt == attempt)
        connection.execute(update(attempts).where(*mine).values(last_checkpoint=step))


def newest_checkpoint(connection: Connection, uid: str) -> tuple[int, int] | None:
    """Return attempt and step of the job's newest reported checkpoint."""
    chosen = select(attempts.c.attempt, attempts.c.last_checkpoint).where(attempts.c.uid == uid)
    saved = chosen.where(attempts.c.last_checkpoint.is_not(None)).order_by(attempts.c.attempt.desc())
    newest = connection.execute(saved.limit(1)).one_or_none()
    return None if newest is None else (newest[0], newest[1])


def devices_of(connection: Connection, keys: Collection[tuple[str, int]]) -> tuple[str, ...]:
    """Return all devices of the attempts ``keys``, each by uid and number."""
    chosen = select(attempts.c.devices).where(tuple_(attempts.c.uid, attempts.c.attempt).in_(keys))
    return tuple(name for names in connection.execute(chosen).scalars() for name in names)


def ended_and_open(connection: Connection, executor: str, after: tuple[str, int], most: int) -> list[OpenAttempt]:
    """Return attempts of the executor's jobs whose records may have to be collected, by uid and number, after
    ``after``.
    """
    live = [phase.value for phase in LIVE]
    chosen = select(attempts.c.uid, attempts.c.attempt, jobs.c.attempt.label("newest"))
    chosen = chosen.select_from(attempts.join(jobs, jobs.c.uid == attempts.c.uid))
    chosen = chosen.where(attempts.c.closed_at.is_(None), jobs.c.cluster == "", jobs.c.executor == executor)
    key = tuple_(attempts.c.uid, attempts.c.attempt)
    ended = or_(attempts.c.attempt < jobs.c.attempt, jobs.c.phase.not_in(live), jobs.c.deleted_at.is_not(None))
    chosen = chosen.where(ended, key > tuple_(*after))
    rows = connection.execute(chosen.order_by(attempts.c.uid, attempts.c.attempt).limit(most))
    return [OpenAttempt(**row._mapping) for row in rows]


def close(connection: Connection, uid: str, attempt: int, now: float) -> None:
    """Close the attempt: it accepts no further record. Idempotent: the first time is kept."""
    mine = (attempts.c.uid == uid, attempts.c.attempt == attempt, attempts.c.closed_at.is_(None))
    connection.execute(update(attempts).where(*mine).values(closed_at=now))


def closed_ones(connection: Connection, keys: Collection[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Return the closed ones of these attempts, each by uid and number."""
    mine = tuple_(attempts.c.uid, attempts.c.attempt).in_(keys)
    chosen = select(attempts.c.uid, attempts.c.attempt).where(mine, attempts.c.closed_at.is_not(None))
    return frozenset((uid, attempt) for uid, attempt in connection.execute(chosen))


def has_open(connection: Connection, uid: str) -> bool:
    """Whether the job may get further records."""
    chosen = select(attempts.c.attempt).where(attempts.c.uid == uid, attempts.c.closed_at.is_(None))
    return connection.execute(chosen.limit(1)).first() is not None
