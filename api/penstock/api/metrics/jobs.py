"""Prometheus metrics of jobs, read from the database at every scrape: jobs that have ended disappear.

Names are those of the ranks' own metrics (``penstock_step_seconds``) with ``job`` in them, so that a sum over one kind
never counts a step twice where both are scraped. A job's name is the label ``job_name``, because ``job`` is Prometheus'
own. Jobs that ended are a counter, so a rule counts all of them for any window and scrape interval.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine

from penstock.api.store.job_summaries import (
    Count,
    JobSummary,
    counts,
    failed,
    job_summaries,
)
from penstock.api.store.step_predictions import StepPrediction, step_predictions
from penstock.core.lifecycle import Phase
from penstock.core.speed import Speed

MOST_JOBS, MOST_FAILED = 1000, 100
DAY_SECONDS = 86_400.0
LABELS = ("namespace", "job_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrape:
    """Data of one scrape."""

    counts: Mapping[Phase, Count]
    ended: Mapping[Phase, int]
    failed: Sequence[tuple[str, str, float]]
    jobs: list[JobSummary]
    step_predictions: Mapping[str, StepPrediction]

    def prediction(self, job: JobSummary) -> StepPrediction | None:
        """The prediction of the job's current plan."""
        return self.step_predictions.get(job.plan_digest or "")


Value = Callable[[JobSummary, StepPrediction | None], float | None]


def _running(value: Callable[[JobSummary], float | None]) -> Value:
    """Value of a running job; none for others, regardless of their last report."""
    return lambda job, prediction: value(job) if job.phase is Phase.RUNNING else None


def _speed(value: Callable[[Speed], float | None]) -> Value:
    """Speed of the measured step, with the tokens and FLOPs of the plan."""

    def of_job(job: JobSummary, prediction: StepPrediction | None) -> float | None:
        speed = prediction.of_a_second if prediction else None
        if speed is None or not job.step_seconds or job.phase is not Phase.RUNNING:
            return None
        return value(speed.slowed(job.step_seconds))

    return of_job


GAUGES: Mapping[str, tuple[str, Value]] = {
    "step": ("Steps done", lambda job, _: job.step),
    "num_steps": ("Steps that the job is to take", lambda job, _: job.num_steps),
    "loss": ("Training loss in nats per token", lambda job, _: job.loss),
    "attempt": ("The newest attempt's number", lambda job, _: job.attempt),
    "memory_limit_bytes": ("Memory that a rank may use", lambda job, _: job.memory_limit_bytes),
    "predicted_step_seconds": (
        "Seconds of a step that the plan predicted",
        lambda _, prediction: prediction.step_seconds if prediction else None,
    ),
    "predicted_peak_bytes": (
        "Most memory of any rank by the plan",
        lambda _, prediction: prediction.peak_bytes if prediction else None,
    ),
    "step_seconds": (
        "Median seconds of the steps in the newest report, while running",
        _running(lambda job: job.step_seconds),
    ),
    "tokens_per_second": (
        "Tokens per second in the newest step, while running",
        _running(lambda job: job.tokens_per_second),
    ),
    "tokens_per_second_per_device": (
        "Tokens per second and device in the steps of the newest report, while running",
        _speed(lambda speed: speed.tokens_per_second_per_device),
    ),
    "model_flops_utilization": (
        "Model FLOPs as a share of the devices' peak, where the peak is known, while running",
        _speed(lambda speed: speed.model_flops_utilization),
    ),
    "peak_bytes": (
        "Most memory any rank used in the newest step, while running",
        _running(lambda job: job.peak_bytes),
    ),
    "last_report_timestamp_seconds": (
        "When the ranks last reported, or began to run, while running",
        _running(lambda job: max(job.reported_at or 0.0, job.phase_entered_at)),
    ),
}
"""Gauges of every unfinished job, as ``penstock_job_<name>``."""


class Ended:
    """Counts jobs that ended since it was created, by phase.

    The database deletes ended jobs after their retention, and a counter must not decrease. So each scrape adds how many
    more jobs ended since a start than at the scrape before. The start is moved along: it lies at most two days in the
    past, and so never before jobs that retention has deleted.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._known: Mapping[Phase, int] = {}
        self.totals: dict[Phase, int] = {phase: 0 for phase in Phase if phase.terminal}

    def count(self, connection: Connection, now: float) -> dict[Phase, Count]:
        """Count jobs that ended since the last scrape; return the current jobs by phase."""
        counted = counts(connection, self._since)
        for phase in self.totals:
            self.totals[phase] += max(0, counted[phase].ended - self._known.get(phase, 0))
        if now - self._since > 2 * DAY_SECONDS:
            self._since = now - DAY_SECONDS
            counted = counts(connection, self._since)
        self._known = {phase: counted[phase].ended for phase in self.totals}
        return counted


class JobsCollector(Collector):
    """Collects metrics of jobs; ``clock`` returns seconds since the epoch, ``most`` jobs have their own metrics."""

    def __init__(self, engine: Engine, clock: Callable[[], float], most: int = MOST_JOBS) -> None:
        self._engine, self._clock, self._most = engine, clock, most
        self._ended = Ended(clock())
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._lock, self._engine.connect() as connection:
            collected = self._find(connection)
        return metrics(collected)

    def _find(self, connection: Connection) -> Scrape:
        """Read the data of a scrape."""
        listed = job_summaries(connection, self._most)
        digests = {summary.plan_digest for summary in listed if summary.plan_digest is not None}
        predictions = step_predictions(connection, digests)
        by_phase, lost = self._ended.count(connection, self._clock()), failed(connection, MOST_FAILED)
        ended = dict(self._ended.totals)
        return Scrape(counts=by_phase, ended=ended, failed=lost, jobs=listed, step_predictions=predictions)


def metrics(snapshot: Scrape) -> Iterator[Metric]:
    """Yield the metrics of a scrape."""
    by_phase = GaugeMetricFamily("penstock_jobs", "Jobs by phase", labels=["phase"])
    yield _family(by_phase, (((phase.value,), count.now) for phase, count in snapshot.counts.items()))
    ended = CounterMetricFamily("penstock_jobs_ended", "Jobs that ended since the service began", labels=["phase"])
    yield _family(ended, (((phase.value,), count) for phase, count in snapshot.ended.items()))
    failed_at = GaugeMetricFamily("penstock_job_failed_timestamp_seconds", "When the job failed", labels=LABELS)
    yield _family(failed_at, (((namespace, name), at) for namespace, name, at in snapshot.failed))
    unfinished = sum(count.now for phase, count in snapshot.counts.items() if not phase.terminal)
    more = "Unfinished jobs beyond those that have metrics of their own"
    yield GaugeMetricFamily("penstock_jobs_left_out", more, value=max(0, unfinished - len(snapshot.jobs)))
    counted = "Attempts that failed, without those that were preempted, evicted, stopped or given up for places"
    failures = CounterMetricFamily("penstock_job_failures", counted, labels=LABELS)
    yield _family(failures, (((job.namespace, job.name), job.failures) for job in snapshot.jobs))
    for name, (text, value) in GAUGES.items():
        values = (((job.namespace, job.name), value(job, snapshot.prediction(job))) for job in snapshot.jobs)
        yield _family(GaugeMetricFamily(f"penstock_job_{name}", text, labels=LABELS), values)


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[tuple[str, ...], float | None]]
) -> Metric:
    """Return the family with these values, each with the values of its labels; unknown ones are left out."""
    for labels, value in values:
        if value is not None:
            family.add_metric(labels, value)
    return family
