"""The audit log: changes by REST and refused ones, with their authors. No bodies, no secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from penstock.api.store.schema import audit


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A request that was answered; ``identity`` is empty without authentication."""

    at: float
    identity: str
    action: str
    method: str
    path: str
    namespace: str
    status: int
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedEntry(Entry):
    """An entry as it is kept; numbers rise."""

    number: int


def add(connection: Connection, entry: Entry) -> None:
    """Write it down."""
    connection.execute(insert(audit).values({name: getattr(entry, name) for name in Entry.__slots__}))


def page(connection: Connection, limit: int, before: int | None = None) -> tuple[list[NumberedEntry], int | None]:
    """Entries, newest first, of a lower number than ``before``; and where those begin that follow, if any do."""
    chosen = select(audit) if before is None else select(audit).where(audit.c.number < before)
    rows = connection.execute(chosen.order_by(audit.c.number.desc()).limit(limit + 1)).all()
    entries = [NumberedEntry(**row._mapping) for row in rows[:limit]]
    return entries, entries[-1].number if len(rows) > limit else None


def old_entries(connection: Connection, before: float, most: int) -> list[int]:
    """Numbers of entries from before then, oldest first."""
    return list(connection.scalars(select(audit.c.number).where(audit.c.at < before).order_by(audit.c.at).limit(most)))


def forget(connection: Connection, numbers: Sequence[int]) -> None:
    """Drop these entries."""
    connection.execute(delete(audit).where(audit.c.number.in_(numbers)))
