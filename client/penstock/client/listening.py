"""Live streams and downloads as data: the headers of the next request, and parsed lines. Nothing is sent here.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.client.calls import Readable, Retries
from penstock.client.types import ServiceError

MEDIA_TYPE = "text/event-stream"
RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream: ``hello``, ``job`` (a job's current status) or ``event`` (an event of a job)."""

    kind: str
    data: Any


@dataclass
class EventStream(Retries):
    """One stream over any number of connections; every event is delivered once.

    ``retry_seconds`` is the pause after a connection that the service ended.
    """

    last_event: str | None = None
    retry_seconds: float = RETRY_SECONDS
    _fields: dict[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """Headers of the next request."""
        self._fields = {}
        return {"Accept": MEDIA_TYPE, **({} if self.last_event is None else {"Last-Event-ID": self.last_event})}

    def parse_line(self, line: str) -> Message | None:
        """Parse a line; return the message that ends with it."""
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        self.failures = 0
        self.last_event = fields.get("id", self.last_event)
        if fields.get("retry", "").isdecimal():
            self.retry_seconds = int(fields["retry"]) / 1000
        return Message(fields.get("event", "message"), json.loads(fields["data"])) if "data" in fields else None


def stream_path(place: Readable | None) -> str:
    """Return the path of a job's stream, or of the stream of all jobs."""
    return "/v1/events" if place is None else f"{place.path}/events"


@dataclass
class Download(Retries):
    """One download over any number of connections, each of which continues where the last one broke."""

    got_bytes: int = 0
    tag: str = ""

    def headers(self) -> dict[str, str]:
        """Headers of the next request."""
        plain = {"Accept-Encoding": "identity"}
        return {**plain, "Range": f"bytes={self.got_bytes}-", "If-Range": self.tag} if self.got_bytes else plain

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take over the answer's headers; raises `ServiceError` if the file has changed in between."""
        if self.got_bytes and status != 206:
            raise ServiceError(
                status=status, kind="changed", detail="the file changed while it was sent", remedy="download it again"
            )
        self.tag = headers.get("etag", "")

    def take(self, chunk: bytes) -> bytes:
        """Count and return a piece that was received."""
        self.got_bytes += len(chunk)
        self.failures = 0
        return chunk
