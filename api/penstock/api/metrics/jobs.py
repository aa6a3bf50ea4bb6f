"""Jobs as Prometheus sees them, read from the database at every scrape: what has ended vanishes by itself.

Names are those of the ranks' own metrics (``penstock_step_seconds``) with ``job`` in them, so that a sum over one kind
never counts a step twice where both are scraped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine

from penstock.api.store.standing import Count, Promise, Standing, counts, promises, standings
from penstock.core.lifecycle import Phase

MOST_JOBS = 1000
LATELY_SECONDS = 900.0
LABELS = ("namespace", "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one scrape found."""

    counts: Mapping[Phase, Count]
    jobs: list[Standing]
    promises: Mapping[str, Promise | None]

    def promise(self, job: Standing) -> Promise | None:
        """What the plan predicted that the job goes by."""
        return self.promises.get(job.plan_digest or "")


Value = Callable[[Standing, Promise | None], float | None]


def _running(value: Callable[[Standing], float | None]) -> Value:
    """A job that does not run has no speed, whatever it last told."""
    return lambda job, promise: value(job) if job.phase is Phase.RUNNING else None


def _heard(job: Standing) -> float:
    return max(job.reported_at or 0.0, job.phase_entered_at)


GAUGES: Mapping[str, tuple[str, Value]] = {
    "step": ("Steps done", lambda job, _: job.step),
    "num_steps": ("Steps that the job is to take", lambda job, _: job.num_steps),
    "loss": ("Training loss in nats per token", lambda job, _: job.loss),
    "attempt": ("The newest attempt's number", lambda job, _: job.attempt),
    "memory_limit_bytes": ("Memory that a rank may use", lambda job, _: job.memory_limit_bytes),
    "predicted_step_seconds": ("What the plan promised", lambda _, promise: promise.step_seconds if promise else None),
    "predicted_peak_bytes": (
        "Most memory of any rank by the plan",
        lambda _, promise: promise.peak_bytes if promise else None,
    ),
    "step_seconds": (
        "Median seconds of the steps in the newest report, while running",
        _running(lambda job: job.step_seconds),
    ),
    "tokens_per_second": (
        "Tokens per second in the newest step, while running",
        _running(lambda job: job.tokens_per_second),
    ),
    "peak_bytes": (
        "Most memory any rank used in the newest step, while running",
        _running(lambda job: job.peak_bytes),
    ),
    "last_report_timestamp_seconds": ("When the ranks last reported, or began to run, while running", _running(_heard)),
}
"""What is told of each unfinished job, as ``penstock_job_<name>``."""


class JobsCollector(Collector):
    """``clock`` gives seconds since the epoch; ``most`` jobs have metrics of their own."""

    def __init__(self, engine: Engine, clock: Callable[[], float], most: int = MOST_JOBS) -> None:
        self._engine, self._clock, self._most = engine, clock, most
        self._promises: dict[str, Promise | None] = {}
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        with self._lock, self._engine.connect() as connection:
            found = self._find(connection)
        return metrics(found)

    def _find(self, connection: Connection) -> Found:
        """A plan never changes under its digest, and unpacking it costs more than all else."""
        listed = standings(connection, self._most)
        wanted = {each.plan_digest for each in listed if each.plan_digest is not None}
        known = {digest: self._promises[digest] for digest in wanted & self._promises.keys()}
        self._promises = {**known, **promises(connection, wanted - known.keys())}
        by_phase = counts(connection, self._clock() - LATELY_SECONDS)
        return Found(counts=by_phase, jobs=listed, promises=self._promises)


def metrics(found: Found) -> Iterator[Metric]:
    """What Prometheus is told of it."""
    yield _by_phase("penstock_jobs", "Jobs by phase", {phase: each.now for phase, each in found.counts.items()})
    lately = {phase: each.ended_lately for phase, each in found.counts.items() if phase.terminal}
    yield _by_phase("penstock_jobs_ended_lately", f"Jobs that ended in the last {LATELY_SECONDS:.0f} s", lately)
    unfinished = sum(each.now for phase, each in found.counts.items() if not phase.terminal)
    more = "Unfinished jobs beyond those that have metrics of their own"
    yield GaugeMetricFamily("penstock_jobs_left_out", more, value=max(0, unfinished - len(found.jobs)))
    failures = CounterMetricFamily("penstock_job_failures", "Attempts that ended without being asked to", labels=LABELS)
    for job in found.jobs:
        failures.add_metric([job.namespace, job.name], job.failures)
    yield failures
    for name, (text, value) in GAUGES.items():
        told = ((job, value(job, found.promise(job))) for job in found.jobs)
        yield _by_job(f"penstock_job_{name}", text, told)


def _by_phase(name: str, text: str, values: Mapping[Phase, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["phase"])
    for phase, value in values.items():
        family.add_metric([phase.value], value)
    return family


def _by_job(name: str, text: str, told: Iterable[tuple[Standing, float | None]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    for job, value in told:
        if value is not None:
            family.add_metric([job.namespace, job.name], value)
    return family
