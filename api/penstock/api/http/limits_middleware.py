"""Checks of every request: its Host header, its size and its speed; and headers of every answer.

Plain ASGI, because the bytes of a body are counted as they arrive, before they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.http.errors import answer
from penstock.api.http.problems import Problem
from penstock.api.settings import Settings

HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, this service's own forms would be sent with Origin: null
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class LimitsMiddleware:
    """Middleware around the application."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._limits = app, settings.limits
        self._hosts = frozenset(host.lower() for host in settings.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"host", b"content-length")}
        try:
            self._check(headers)
            await self._app(scope, _Body(receive, self._limits.body_bytes, self._limits.request_seconds), _sealed(send))
        except Problem as problem:
            await answer(problem)(scope, receive, _sealed(send))

    def _check(self, headers: dict[bytes, bytes]) -> None:
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if host not in self._hosts:
            raise Problem(
                kind="misdirected",
                detail=f"{host!r} is not this service",
                where="Host",
                remedy=f"use {' or '.join(sorted(self._hosts))}, or start the service with --allow-host NAME",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise Problem(
                kind="bad-request",
                detail="is not a number",
                where="Content-Length",
                remedy="send the number of the body's bytes, or Transfer-Encoding: chunked",
            )
        if int(length) > self._limits.body_bytes:
            raise too_large(self._limits.body_bytes)


class _Body:
    """Receives a limited number of bytes, in a limited time."""

    def __init__(self, receive: Receive, most_bytes: int, seconds: float) -> None:
        self._receive, self._most_bytes, self._seconds = receive, most_bytes, seconds
        self._got_bytes = 0
        self._end: float | None = None
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()  # after the body, only the client's disconnect can follow
        if self._end is None:
            self._end = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            raise Problem(
                kind="timeout",
                detail=f"the body did not arrive within {self._seconds:.0f} s",
                remedy="send it in several requests, or compressed",
            ) from None
        self._got_bytes += len(message.get("body", b""))
        if self._got_bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        self._complete = not message.get("more_body", False)
        return message


def too_large(most_bytes: int) -> Problem:
    """Return the problem of a body beyond the limit."""
    return Problem(
        kind="too-large",
        detail=f"the body has more than {most_bytes} bytes",
        remedy="send the data in several requests",
    )


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port."""
    name, _, port = header.rpartition(":")
    return (name if name and port.isdigit() else header).lower()


def _sealed(send: Send) -> Send:
    async def sealed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_missing(message.get("headers", []))]
        await send(message)

    return sealed


def _missing(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    present = {name.lower() for name, _ in headers}
    return [(name, value) for name, value in HEADERS if name not in present]
