"""Attempts in the store: each launch of a job, and the devices that it was given."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import Connection, insert, select, tuple_, update

from penstock.api.store.schema import attempts
from penstock.core.lifecycle import Launch


def add(connection: Connection, uid: str, launch: Launch, devices: tuple[str, ...], now: float) -> None:
    """An attempt that is about to start; its number is given once."""
    row = {
        "uid": uid,
        "attempt": launch.attempt,
        "num_ranks": launch.ranks,
        "resume_from": launch.resume_from,
        "launched_at": now,
        "devices": devices,
    }
    connection.execute(insert(attempts).values(row))


def note_checkpoints(connection: Connection, told: Iterable[tuple[str, int, int]]) -> None:
    """Keep which steps attempts saved last, each by uid, number and step."""
    for uid, attempt, step in told:
        mine = (attempts.c.uid == uid, attempts.c.attempt == attempt)
        connection.execute(update(attempts).where(*mine).values(last_checkpoint=step))


def newest_checkpoint(connection: Connection, uid: str) -> tuple[int, int] | None:
    """Attempt and step of what the job saved last, as it was reported."""
    chosen = select(attempts.c.attempt, attempts.c.last_checkpoint).where(attempts.c.uid == uid)
    saved = chosen.where(attempts.c.last_checkpoint.is_not(None)).order_by(attempts.c.attempt.desc())
    found = connection.execute(saved.limit(1)).one_or_none()
    return None if found is None else (found[0], found[1])


def devices_of(connection: Connection, found: Collection[tuple[str, int]]) -> tuple[str, ...]:
    """What the attempts ``found``, each by uid and number, were given together."""
    chosen = select(attempts.c.devices).where(tuple_(attempts.c.uid, attempts.c.attempt).in_(found))
    return tuple(name for names in connection.execute(chosen).scalars() for name in names)
