"""Prometheus metrics of one run, served by its first rank at the configured address."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from penstock.core.errors import UserError
from penstock.core.records import StepMetrics
from penstock.core.speed import Speed

GAUGES = {
    "loss": "Training loss in nats per token",
    "validation_loss": "Held-out loss in nats per token",
    "learning_rate": "Learning rate of the newest step",
    "gradient_norm": "Norm of all gradients before clipping",
    "peak_bytes": "Most memory any rank used in the newest step",
    "tokens_per_second": "Tokens per second in the newest step",
}
"""Fields of `StepMetrics`, exported with their newest value as ``penstock_<field>``."""

SPEEDS = {
    "tokens_per_second_per_device": "Tokens per second and device in the newest step",
    "model_flops_utilization": "Share of the devices' peak that the model's FLOPs take, where the peak is known",
}
"""Fields of `Speed`, exported likewise; an unknown number is not exported."""


class Exporter:
    """Metrics of a run; `serve` publishes them."""

    def __init__(self, job: str) -> None:
        labels: dict[str, Any] = {"labelnames": ["job_name"], "registry": CollectorRegistry()}
        self._registry: CollectorRegistry = labels["registry"]
        self._gauges = {name: Gauge(f"penstock_{name}", text, **labels).labels(job) for name, text in GAUGES.items()}
        self._speeds = {name: Gauge(f"penstock_{name}", text, **labels) for name, text in SPEEDS.items()}
        self._job = job
        self._predicted = Gauge("penstock_predicted_step_seconds", "Predicted seconds of a step", **labels).labels(job)
        self._seconds = Histogram("penstock_step_seconds", "Seconds of a step", **labels).labels(job)
        self._steps = Counter("penstock_steps", "Steps of this attempt", **labels).labels(job)

    def serve(self, host: str, port: int) -> None:
        """Serve /metrics from a thread until the process ends; raises `UserError` if the port is taken."""
        try:
            start_http_server(port, addr=host, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise UserError(
                what=f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}",
                where="--metrics-port",
                remedy="name a free port, or leave the option out",
            ) from None

    def predict(self, step_seconds: float) -> None:
        """Export the step time that the plan predicts."""
        self._predicted.set(step_seconds)

    def update(self, metrics: StepMetrics, speed: Speed | None = None) -> None:
        """Record one step and its ``speed``."""
        for name, gauge in self._gauges.items():
            value = getattr(metrics, name)
            if value is not None:
                gauge.set(value)
        for name, family in self._speeds.items():
            value = getattr(speed, name, None)
            if value is not None:
                family.labels(self._job).set(value)
        self._seconds.observe(metrics.step_seconds)
        self._steps.inc()
