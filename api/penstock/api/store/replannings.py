"""Decisions of planning again while a job runs, as events in the store."""

from __future__ import annotations

from sqlalchemy import Connection, select

from penstock.api.store.jobs import add_event
from penstock.api.store.schema import events

KIND = "replanning"


def keep_replanning(connection: Connection, uid: str, attempt: int, message: str, now: float) -> None:
    """Add an event with this decision, unless the job's newest one of this kind is the same."""
    mine = select(events.c.body).where(events.c.uid == uid, events.c.kind == KIND)
    newest = connection.execute(mine.order_by(events.c.number.desc()).limit(1)).scalar_one_or_none()
    body = {"attempt": attempt, "message": message}
    if newest != body:
        add_event(connection, uid, KIND, body, now)
