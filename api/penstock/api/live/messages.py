"""What live streams send: Server-Sent Events, each written once however many listen.

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
"""The first message: from here on nothing is missed."""
KEEP_ALIVE = b":\n\n"
"""A comment: keeps proxies from closing the connection, and detects a client that is gone."""


def message(kind: str, view: BaseModel, number: int | None = None) -> bytes:
    """One event of that kind; a client that comes back names the last ``number`` that it got."""
    numbered = "" if number is None else f"id: {number}\n"
    return f"{numbered}event: {kind}\ndata: {view.model_dump_json(by_alias=True)}\n\n".encode()


class JobUpdate:
    """A change as it is sent."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self.signature: Signature = signature(change.job)

    @property
    def job(self) -> StoredJob:
        """The job as it is now."""
        return self._change.job

    @cached_property
    def job_message(self) -> bytes:
        """How the job is."""
        return message("job", job_row(self.job))

    @cached_property
    def events(self) -> list[tuple[int, bytes]]:
        """Events, each with its number."""
        views = [
            EventView(number=row.number, at=instant(row.at), kind=row.kind, body=row.body)
            for row in self._change.events
        ]
        return [(view.number, message("event", view, view.number)) for view in views]
