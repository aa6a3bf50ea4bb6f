"""Metrics of requests by operation and class of status, both of bounded cardinality."""

from __future__ import annotations

import time

from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_OPERATION = "none"


class Observer:
    """Middleware; plain ASGI, because live streams must pass unchanged."""

    def __init__(self, app: ASGIApp, requests: Histogram) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure one request until its answer begins. An outer layer answers a failed one with status 500."""
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
    """Return the id of the operation that a request was routed to; for pages, the name of the function."""
    route = scope.get("route")
    name: str = getattr(route, "operation_id", None) or getattr(route, "name", None) or NO_OPERATION
    return name
