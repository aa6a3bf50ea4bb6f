"""Attempts in the store: each launch of a job, and the devices that it was given."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, insert, select, tuple_

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


def devices_of(connection: Connection, found: Collection[tuple[str, int]]) -> tuple[str, ...]:
    """What the attempts ``found``, each by uid and number, were given together."""
    chosen = select(attempts.c.devices).where(tuple_(attempts.c.uid, attempts.c.attempt).in_(found))
    return tuple(name for names in connection.execute(chosen).scalars() for name in names)
