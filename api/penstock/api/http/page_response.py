"""Answers with a page, which travels compressed with gzip to browsers that accept that.

Streams, downloads and documents for programs are never compressed.
"""

from __future__ import annotations

import gzip

from fastapi.responses import HTMLResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from penstock.api.auth.identity import Identity
from penstock.api.pages.shell import POLICY, Page

HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Vary": "Accept-Encoding"}
LEAST_BYTES = 1_000
LEVEL = 5
"""Compression level: nearly as small as level 9, in a third of the time, about 2 ms for a job's page."""


class PageResponse(HTMLResponse):
    """The page, with the parts that ``identity`` may use."""

    def __init__(self, page: Page, identity: Identity | None, status: int = 200) -> None:
        super().__init__(page.document(identity), status, HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the page."""
        if len(self.body) >= LEAST_BYTES and accepts_gzip(Headers(scope=scope).get("accept-encoding", "")):
            self.body = gzip.compress(self.body, LEVEL, mtime=0)
            self.headers["Content-Encoding"], self.headers["Content-Length"] = "gzip", str(len(self.body))
        await super().__call__(scope, receive, send)


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in header.lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
