"""Metrics of a service about itself. Each service has its own registry: several may be in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import core
from penstock.api.live.feed import Feed

REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.1, 0.25, 1.0, 2.5, 10.0)
CHANGES = (1, 2, 4, 8, 16, 32, 64, 128)


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
