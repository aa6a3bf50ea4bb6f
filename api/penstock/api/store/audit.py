"""Audit log: changes by REST and refused ones, with their authors, without bodies and secrets."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from penstock.api.store.schema import audit


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An answered request; ``identity`` is empty without authentication."""

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
    """A stored entry; numbers increase."""

    number: int


def add(connection: Connection, entry: Entry) -> None:
    """Insert the entry."""
    connection.execute(insert(audit).values({name: getattr(entry, name) for name in Entry.__slots__}))


def page(connection: Connection, limit: int, before: int | None = None) -> tuple[list[NumberedEntry], int | None]:
    """Return entries below the number ``before``, newest first, and the start of the next page, if there is one."""
    chosen = select(audit) if before is None else select(audit).where(audit.c.number < before)
    rows = connection.execute(chosen.order_by(audit.c.number.desc()).limit(limit + 1)).all()
    entries = [NumberedEntry(**row._mapping) for row in rows[:limit]]
    return entries, entries[-1].number if len(rows) > limit else None
