"""Prometheus metrics of the operator. The cardinality of labels does not depend on the number of jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from penstock.core.lifecycle import Phase, SetPhase
from penstock.kube.resources import Resource
from penstock.kube.transport import Change, KubeError, Listing, Object
from penstock.operator.kube import KINDS, Kube

RECONCILE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
CALL_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PLANNING_BUCKETS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)
UNREACHABLE = "unreachable"


class Metrics:
    """The operator's metrics. An operator without a service has no Lease to watch, and no gauge for it."""

    def __init__(self, registry: CollectorRegistry, *, has_service: bool) -> None:
        self.queued = Gauge("penstock_operator_queue_length", "Jobs that wait for a reconcile.", registry=registry)
        self.in_flight = Gauge("penstock_operator_in_flight", "Jobs that are being reconciled.", registry=registry)
        self.jobs = Gauge("penstock_operator_jobs", "PipelineJobs by phase.", ["phase"], registry=registry)
        self.watch_ages = Gauge(
            "penstock_operator_watch_age_seconds", "Seconds since the last answer of a watch.",
            ["resource"], registry=registry,
        )  # fmt: skip
        self.plans = Gauge(
            "penstock_operator_planning_questions", "Plan requests by state.", ["state"], registry=registry
        )
        self.lease_held = Gauge(
            "penstock_operator_service_lease_held", "Whether a service renews its Lease.",
            registry=registry if has_service else None,
        )  # fmt: skip
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
