"""Metrics of a service about itself. Each service has its own registry: several may be in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import core
from penstock.api.live.feed import Feed

REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.1, 0.25, 1.0, 2.5, 10.0)
CHANGES = (1, 2, 4, 8, 16, 32, 64, 128)
NO_OPERATION = "none"


@dataclass(frozen=True, slots=True)
class Instruments:
    """``registry`` has them all. ``requests`` are observed by operation and status class."""

    registry: CollectorRegistry
    requests: Histogram
    records: Counter
    commits: Histogram

    def committed(self, keys: Sequence[str]) -> None:
        """Count one transaction with that many changes."""
        self.commits.observe(len(keys))


def make_instruments(feed: Feed, *collectors: Collector) -> Instruments:
    """Return the instruments of a new service, with further collectors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in (*collectors, _Gauges(feed)):
        registry.register(collector)
    return Instruments(
        registry=registry,
        requests=Histogram(
            "penstock_http_request_seconds",
            "Seconds from a request to the first byte of its answer",
            labelnames=("operation", "status"),
            buckets=REQUEST_SECONDS,
            registry=registry,
        ),
        records=Counter("penstock_ingested_records", "Records acknowledged to their senders", registry=registry),
        commits=Histogram(
            "penstock_commit_changes", "Changes of the store that shared a commit", buckets=CHANGES, registry=registry
        ),
    )


class _Gauges(Collector):
    """Gauges of the current state."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def collect(self) -> list[Metric]:
        slow, build = "Streams whose reader was too slow", {"version": core.__version__}
        return [
            GaugeMetricFamily("penstock_streams", "Live streams that are open", value=self._feed.num_listeners),
            CounterMetricFamily("penstock_streams_dropped", slow, value=self._feed.num_dropped),
            InfoMetricFamily("penstock_build", "The program that answers", value=build),
        ]


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
