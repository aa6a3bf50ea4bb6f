"""Prometheus metrics of the operator. The cardinality of labels does not depend on the number of jobs."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.lifecycle import Phase, SetPhase
from penstock.kube.resources import Resource
from penstock.kube.transport import Change, KubeError, Listing, Object
from penstock.operator.kube import KINDS, Kube

RECONCILE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
CALL_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PLANNING_BUCKETS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)
UNREACHABLE = "unreachable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """Gauges at the time of a scrape. ``watch_ages`` are seconds since the last answer of a watch, by resource.

    ``lease_held`` is None if the operator has no service, and so no Lease to watch.
    """

    queued: int
    in_flight: int
    phases: Iterable[Phase]
    watch_ages: Mapping[str, float]
    plans_working: int
    plans_waiting: int
    lease_held: bool | None = None


class Metrics(Collector):
    """The operator's metrics. ``now`` is called for every scrape."""

    def __init__(self, now: Callable[[], Now], registry: CollectorRegistry) -> None:
        self._now = now
        self.reconciles = Histogram(
            "penstock_operator_reconcile_seconds", "One reconcile of one job.", ["result"],
            buckets=RECONCILE_BUCKETS, registry=registry,
        )  # fmt: skip
        self.retries = Counter(
            "penstock_operator_retries_total", "Reconciles of a job that failed and are retried.", registry=registry
        )
        self.planning = Histogram(
            "penstock_operator_planning_seconds", "One plan request, from the start of its planning to its answer.",
            buckets=PLANNING_BUCKETS, registry=registry,
        )  # fmt: skip
        self.ends = Counter(
            "penstock_operator_attempts_ended_total", "Attempts that ended, by the phase that followed and its reason.",
            ["phase", "reason"], registry=registry,
        )  # fmt: skip
        self.calls = Histogram(
            "penstock_operator_api_seconds", "Calls of Kubernetes; of a watch, until its first change or its end.",
            ["verb", "resource", "code"], buckets=CALL_BUCKETS, registry=registry,
        )  # fmt: skip
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        now, phases = self._now(), Tally[Phase]()
        phases.update(now.phases)
        yield GaugeMetricFamily("penstock_operator_queue_length", "Jobs that wait for a reconcile.", now.queued)
        yield GaugeMetricFamily("penstock_operator_in_flight", "Jobs that are being reconciled.", now.in_flight)
        jobs = GaugeMetricFamily("penstock_operator_jobs", "PipelineJobs by phase.", labels=["phase"])
        for phase in Phase:
            jobs.add_metric([phase.value], phases[phase])
        yield jobs
        ages = GaugeMetricFamily(
            "penstock_operator_watch_age_seconds", "Seconds since the last answer of a watch.", labels=["resource"]
        )
        for resource, seconds in now.watch_ages.items():
            ages.add_metric([resource], seconds)
        yield ages
        plans = GaugeMetricFamily("penstock_operator_planning_questions", "Plan requests by state.", labels=["state"])
        plans.add_metric(["working"], now.plans_working)
        plans.add_metric(["waiting"], now.plans_waiting)
        yield plans
        if now.lease_held is not None:
            yield GaugeMetricFamily(
                "penstock_operator_service_lease_held", "Whether a service renews its Lease.", float(now.lease_held)
            )

    def ended(self, decision: SetPhase) -> None:
        """Count the end of an attempt."""
        if decision.phase.terminal or decision.phase in (Phase.RECOVERING, Phase.SUSPENDED):
            self.ends.labels(decision.phase.value, decision.reason).inc()

    @contextmanager
    def call(self, verb: str, resource: str) -> Iterator[None]:
        """Measure the call to Kubernetes in the ``with`` block."""
        began, code = time.monotonic(), "200"
        try:
            yield
        except KubeError as error:
            code = str(error.status) if error.status else UNREACHABLE
            raise
        finally:
            self.calls.labels(verb, resource, code).observe(time.monotonic() - began)


class MeteredKube:
    """A `Kube` that measures the calls to another one."""

    def __init__(self, kube: Kube, metrics: Metrics) -> None:
        self._kube, self._metrics = kube, metrics

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        with self._metrics.call("get", resource.plural):
            return self._kube.get(resource, namespace, name)

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """List the objects."""
        with self._metrics.call("list", resource.plural):
            return self._kube.list(resource, namespace, selector)

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """Watch for changes, for a minute at most."""
        changes = self._kube.watch(resource, version, namespace, selector)
        with self._metrics.call("watch", resource.plural):
            first = next(changes, None)
        if first is not None:
            yield first
            yield from changes

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Create an object."""
        with self._metrics.call("create", KINDS[manifest["kind"]].plural):
            return self._kube.create(manifest)

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        """Apply fields, server-side."""
        plural = KINDS[manifest["kind"]].plural
        with self._metrics.call("apply", f"{plural}/{subresource}" if subresource else plural):
            return self._kube.apply(manifest, subresource)

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        """Annotate a pod."""
        with self._metrics.call("annotate", "pods"):
            return self._kube.annotate(pod, annotations)

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete an object and its dependents."""
        with self._metrics.call("delete", resource.plural):
            self._kube.delete(resource, namespace, name, uid)


def serve(registry: CollectorRegistry, port: int) -> Callable[[], None]:
    """Serve Prometheus on this port of all addresses; return a function that ends it. Raises OSError if it is taken."""
    server, thread = start_http_server(port, registry=registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
