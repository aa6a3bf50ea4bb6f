"""Messages of live streams: Server-Sent Events, each serialized once for all listeners.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from functools import cached_property

from pydantic import BaseModel

from penstock.api.schemas.jobs import EventView, job_row
from penstock.api.schemas.wire import instant
from penstock.api.store.changes import Change, Signature, signature
from penstock.api.store.jobs import StoredJob

MEDIA_TYPE = "text/event-stream"
RETRY_MILLISECONDS = 2000

HELLO = f"retry: {RETRY_MILLISECONDS}\nevent: hello\ndata: {{}}\n\n".encode()
"""First message: no later change is missed."""
KEEP_ALIVE = b":\n\n"
"""Comment that keeps proxies from closing the connection, and detects a disconnected client."""


def message(kind: str, view: BaseModel, number: int | None = None) -> bytes:
    """Format one event of that kind; a client that reconnects sends the last ``number`` that it got."""
    numbered = "" if number is None else f"id: {number}\n"
    return f"{numbered}event: {kind}\ndata: {view.model_dump_json(by_alias=True)}\n\n".encode()


class JobUpdate:
    """Change of a job, with its serialized messages."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self.signature: Signature = signature(change.job)

    @property
    def job(self) -> StoredJob:
        """The current job."""
        return self._change.job

    @cached_property
    def job_message(self) -> bytes:
        """The message with the job's state."""
        return message("job", job_row(self.job))

    @cached_property
    def events(self) -> list[tuple[int, bytes]]:
        """Events, each with its number."""
        views = [
            EventView(number=row.number, at=instant(row.at), kind=row.kind, body=row.body)
            for row in self._change.events
        ]
        return [(view.number, message("event", view, view.number)) for view in views]
