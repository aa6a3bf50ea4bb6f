"""Gzip compression of pages for browsers that accept it.

Streams, downloads and documents for programs are unchanged.
"""

from __future__ import annotations

import gzip

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_BYTES = 1_000
LEVEL = 5
"""Compression level: nearly as small as level 9, in a third of the time, about 2 ms for a job's page."""


class Compressed:
    """Middleware; plain ASGI, because live streams must pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and accepts_gzip(Headers(scope=scope).get("accept-encoding", "")):
            send = _Page(send)
        await self._app(scope, receive, send)


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in header.lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class _Page:
    """Sends the answer, with gzip if it is a page in one piece."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            if headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers:
                headers.add_vary_header("Accept-Encoding")
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            if not message.get("more_body", False) and len(message.get("body", b"")) >= LEAST_BYTES:
                message["body"] = gzip.compress(message["body"], LEVEL, mtime=0)
                headers = MutableHeaders(raw=start["headers"])
                headers["Content-Encoding"], headers["Content-Length"] = "gzip", str(len(message["body"]))
            await self._send(start)
        await self._send(message)
