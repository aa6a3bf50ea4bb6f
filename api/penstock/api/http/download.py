"""A file, or the part of it that a client requests (RFC 9110, section 14).

Starlette's own answer sends bytes that were appended meanwhile, beyond its Content-Length, and refuses in plain text.
A job's logs grow all the time.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import PurePosixPath
from typing import BinaryIO
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.http.problems import Problem
from penstock.api.live.stream import left

MEDIA_TYPE = "application/octet-stream"
CHUNK_BYTES = 2**18
SEALED = "default-src 'none'; sandbox"
"""Content-Security-Policy of downloads: no file of a job may run as a page of this service."""

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def requested_part(header: str | None, size: int) -> range | None:
    """Return the bytes that a Range header requests; none for all of them, also for an unknown form of the header.

    Raises:
        Problem: the file has no such bytes.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        part = range(max(size - int(last), 0), size)
    elif last and int(last) < int(first):
        return None
    else:
        part = range(int(first), min(int(last) + 1, size) if last else size)
    if not part:
        raise Problem(
            kind="out-of-range",
            detail=f"the file has {size} bytes",
            where="Range",
            remedy=f"request a part of bytes=0-{max(size - 1, 0)}, or leave Range out",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return part


class FilePart(Response):
    """Sends ``file``, or the requested part of it, as a download named by the last part of ``name``."""

    media_type = MEDIA_TYPE

    def __init__(self, file: BinaryIO, name: str, range_header: str | None, if_range: str | None) -> None:
        self._file = file
        info = os.fstat(file.fileno())
        etag = f'"{info.st_mtime_ns:x}-{info.st_size:x}-{info.st_ino:x}"'
        part = requested_part(range_header if if_range in (None, etag) else None, info.st_size)
        self._part = range(info.st_size) if part is None else part
        filename = quote(PurePosixPath(name).name)
        headers = {
            "Accept-Ranges": "bytes",
            "Cache-Control": "no-cache",
            "Content-Disposition": f"attachment; filename*=utf-8''{filename}",
            "Content-Length": str(len(self._part)),
            "Content-Security-Policy": SEALED,
            "ETag": etag,
        }
        if part is not None:
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{info.st_size}"
        super().__init__(status_code=200 if part is None else 206, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client disconnects."""
        ends = [asyncio.create_task(self._send(send)), asyncio.create_task(left(receive))]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            self._file.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        place = self._part.start
        while place < self._part.stop:
            num_bytes = min(CHUNK_BYTES, self._part.stop - place)
            chunk = await run_in_threadpool(os.pread, self._file.fileno(), num_bytes, place)
            if not chunk:
                raise RuntimeError("the file was truncated while it was sent")  # the client sees a broken connection
            place += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
