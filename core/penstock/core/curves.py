"""A number of a run over its steps, reduced to few points without losing extremes.

A run may have a million steps, and a chart shows some hundreds of points. A point therefore stands for one or more
consecutive steps and keeps their least, mean, greatest and last value: a spike of a single step is the greatest value
of its point at any length. First, last, least and greatest value of the whole run are kept exactly, next to the points.
The typical value is a median of single steps, never of points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.records import WARM_UP_STEPS, StepMetrics


class StepValue(NamedTuple):
    """The value at a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """``count`` steps from ``step`` on, as one. Values that are not finite count, but do not affect the numbers."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float
    count: int = 1


def point_of(values: Sequence[StepValue], attempt: int) -> CurvePoint:
    """The steps as one point."""
    return joined([CurvePoint(step, attempt, value, value, value, value) for step, value in values])


def joined(parts: Sequence[CurvePoint]) -> CurvePoint:
    """Adjacent points as one point; its mean is that of all their steps."""
    if len(parts) == 1:
        return parts[0]
    finite = [part for part in parts if math.isfinite(part.mean)] or parts
    least, greatest = min(part.min for part in finite), max(part.max for part in finite)
    steps = sum(part.count for part in finite)
    mean = math.fsum(part.mean * (part.count / steps) for part in finite)
    return CurvePoint(
        step=parts[0].step,
        attempt=parts[-1].attempt,
        min=least,
        mean=min(max(mean, least), greatest),  # rounding must not move it outside
        max=greatest,
        last=parts[-1].last,
        count=sum(part.count for part in parts),
    )


def thinned(points: Sequence[CurvePoint], most: int) -> tuple[CurvePoint, ...]:
    """Join adjacent points until there are at most ``most`` points."""
    points_per_group = -(-len(points) // most) if points else 1
    if points_per_group == 1:
        return tuple(points)
    return tuple(joined(points[i : i + points_per_group]) for i in range(0, len(points), points_per_group))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """At least one point, in the order of steps. ``first`` is None only if the first step is no longer kept."""

    points: tuple[CurvePoint, ...]
    first: StepValue | None
    last: StepValue

    @property
    def min(self) -> float:
        """The least value of all steps."""
        return min(point.min for point in self.points)

    @property
    def max(self) -> float:
        """The greatest value of all steps."""
        return max(point.max for point in self.points)

    @property
    def count(self) -> int:
        """Number of steps it covers."""
        return sum(point.count for point in self.points)

    @property
    def is_bucketed(self) -> bool:
        """Whether any point stands for more than one step."""
        return any(point.count > 1 for point in self.points)


MEDIAN_STEPS = 10_000
"""A run's typical step is the median of this many last steps. The number limits the data that a page reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """A number of a run's typical step: the median of ``count`` steps, or their mean if only sums of them are kept."""

    value: float
    count: int
    is_median: bool = True

    @property
    def origin(self) -> str:
        """Description of the value's origin."""
        steps = "1 step" if self.count == 1 else f"{self.count:,} steps"
        return f"{'median' if self.is_median else 'mean'} of {steps}"


def usual(values: Sequence[float]) -> Usual | None:
    """The median of the last steps after warm-up; ``values`` has one per step, in order."""
    recent = values[-(MEDIAN_STEPS + WARM_UP_STEPS) :]
    chosen = recent[WARM_UP_STEPS:] or recent
    return Usual(value=statistics.median(chosen), count=len(chosen)) if chosen else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """The numbers of a run: ``curves`` by the names of `StepMetrics`, and its typical speed."""

    curves: Mapping[str, Curve] = field(default_factory=dict)
    step_seconds: Usual | None = None
    tokens_per_second: Usual | None = None

    def __bool__(self) -> bool:
        return bool(self.curves)

    def last(self, name: str) -> StepValue | None:
        """The last value of a number, if it was reported."""
        curve = self.curves.get(name)
        return curve.last if curve else None


CURVES = (
    "loss",
    "validation_loss",
    "step_seconds",
    "tokens_per_second",
    "learning_rate",
    "gradient_norm",
    "peak_bytes",
)
MAX_POINTS = 2_000
"""Most points of a curve, for any length of the run."""


def curves_of(metrics: Iterable[StepMetrics]) -> RunCurves:
    """The curves of a run whose steps are all given; of two entries for a step the later attempt's counts."""
    entries = newest(metrics)
    curves = {}
    for name in CURVES:
        values = [(m, getattr(m, name)) for m in entries]
        points = [CurvePoint(m.step, m.attempt, *4 * (float(value),)) for m, value in values if value is not None]
        if points:
            ends = [StepValue(point.step, point.last) for point in (points[0], points[-1])]
            curves[name] = Curve(points=thinned(points, MAX_POINTS), first=ends[0], last=ends[1])
    return RunCurves(
        curves=curves,
        step_seconds=usual([m.step_seconds for m in entries]),
        tokens_per_second=usual([m.tokens_per_second for m in entries]),
    )


def newest(metrics: Iterable[StepMetrics]) -> tuple[StepMetrics, ...]:
    """One entry per step in order of steps: the latest attempt's, and of equal attempts the last one."""
    by_step: dict[int, StepMetrics] = {}
    for entry in metrics:
        if entry.step not in by_step or entry.attempt >= by_step[entry.step].attempt:
            by_step[entry.step] = entry
    return tuple(by_step[step] for step in sorted(by_step))
