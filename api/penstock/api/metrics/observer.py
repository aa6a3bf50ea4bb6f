"""Measures every request: by operation and class of status, both few for any requests of clients."""

from __future__ import annotations

import time

from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_OPERATION = "none"


class Observer:
    """Wraps the application; plain ASGI, because live streams must pass as they are."""

    def __init__(self, app: ASGIApp, requests: Histogram) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, until its answer begins; one that fails is answered outside of here, by a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, answered = time.perf_counter(), False

        async def observed(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._observe(scope, message["status"], time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception:
            if not answered:
                self._observe(scope, 500, time.perf_counter() - began)
            raise

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        self._requests.labels(operation(scope), f"{status // 100}xx").observe(seconds)


def operation(scope: Scope) -> str:
    """The id of the operation that a request was routed to; pages have the names of their functions."""
    route = scope.get("route")
    name: str = getattr(route, "operation_id", None) or getattr(route, "name", None) or NO_OPERATION
    return name
