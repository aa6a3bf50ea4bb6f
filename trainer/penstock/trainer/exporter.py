"""Prometheus metrics of one run, served by its first rank on an address the job was given."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from penstock.core.errors import UserError
from penstock.core.records import StepMetrics


class Exporter:
    """Gauges and counters of a run's progress; `serve` makes them visible."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        labels: dict[str, Any] = {"labelnames": ["job"], "registry": self.registry}
        self._job = job
        self._loss = Gauge("penstock_loss", "Training loss in nats per token", **labels)
        self._validation = Gauge("penstock_validation_loss", "Held-out loss in nats per token", **labels)
        self._rate = Gauge("penstock_learning_rate", "Learning rate of the newest step", **labels)
        self._norm = Gauge("penstock_gradient_norm", "Norm of all gradients before clipping", **labels)
        self._peak = Gauge("penstock_peak_bytes", "Most memory any rank used in the newest step", **labels)
        self._throughput = Gauge("penstock_tokens_per_second", "Tokens per second in the newest step", **labels)
        self._predicted = Gauge("penstock_predicted_step_seconds", "What the plan promised for a step", **labels)
        self._seconds = Histogram("penstock_step_seconds", "Seconds of a step", **labels)
        self._steps = Counter("penstock_steps", "Steps taken", **labels)

    def serve(self, host: str, port: int) -> None:
        """Serve /metrics until the process ends; raises `UserError` if the port is taken."""
        try:
            start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise UserError(
                what=f"port {port} cannot be used: {error.strerror}",
                where="--metrics-port",
                remedy="name a free port, or leave the option out",
            ) from None

    def predict(self, step_seconds: float) -> None:
        """State the plan's promise."""
        self._predicted.labels(self._job).set(step_seconds)

    def update(self, metrics: StepMetrics) -> None:
        """Take in one step."""
        self._loss.labels(self._job).set(metrics.loss)
        self._rate.labels(self._job).set(metrics.learning_rate)
        self._norm.labels(self._job).set(metrics.gradient_norm)
        self._peak.labels(self._job).set(metrics.peak_bytes)
        self._throughput.labels(self._job).set(metrics.tokens_per_second)
        self._seconds.labels(self._job).observe(metrics.step_seconds)
        self._steps.labels(self._job).inc()
        if metrics.validation_loss is not None:
            self._validation.labels(self._job).set(metrics.validation_loss)
