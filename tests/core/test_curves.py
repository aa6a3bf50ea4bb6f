"""A run's numbers in few points: nothing exact gets lost, no spike is averaged away, medians are of single steps."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.curves import (
    MAX_POINTS,
    MEDIAN_STEPS,
    CurvePoint,
    curves_of,
    newest,
    thinned,
    usual,
)
from penstock.core.records import WARM_UP_STEPS, StepMetrics

METRICS = StepMetrics(
    step=0, loss=1.0, step_seconds=0.1, tokens_per_second=10.0, learning_rate=0.1, gradient_norm=1.0, peak_bytes=7
)


def points(values: list[float]) -> list[CurvePoint]:
    return [CurvePoint(step, 0, *4 * (value,)) for step, value in enumerate(values)]


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=300),
    most=st.integers(1, 40),
)
def test_an_envelope_has_the_least_greatest_mean_and_last_of_its_steps(values: list[float], most: int) -> None:
    found = thinned(points(values), most)
    assert len(found) <= most
    assert (min(p.min for p in found), max(p.max for p in found)) == (min(values), max(values))
    starts = [point.step for point in found]
    for point, stop in zip(found, [*starts[1:], len(values)], strict=True):
        part = values[point.step : stop]
        assert (point.min, point.max, point.last, point.count) == (min(part), max(part), part[-1], len(part))
        assert point.min <= point.mean <= point.max
        assert point.mean == pytest.approx(statistics.fmean(part), rel=1e-6, abs=1e-30 + 1e-9 * max(map(abs, part)))


@given(count=st.integers(1, 1_000_000), place=st.floats(0, 1, exclude_max=True))
@example(count=1_000_000, place=0.5170001)
@example(count=MAX_POINTS + 1, place=0.9999)
def test_a_spike_of_one_step_is_in_the_chart_at_every_length(count: int, place: float) -> None:
    """Points of several steps are merged, as the service does with its roll-ups."""
    spike = int(count * place)
    rolled = [
        CurvePoint(first, 0, 1.0, 1.0, 9.0 if first <= spike < first + 256 else 1.0, 1.0, min(256, count - first))
        for first in range(0, count, 256)
    ]
    found = thinned(rolled, 500)
    assert len(found) <= 500
    assert max(point.max for point in found) == 9.0
    assert sum(point.count for point in found) == count
    (holder,) = [point for point in found if point.max == 9.0]
    assert holder.step <= spike < holder.step + holder.count


def test_a_mean_weighs_points_by_their_steps() -> None:
    (found,) = thinned([CurvePoint(0, 0, 1.0, 1.0, 1.0, 1.0, 99), CurvePoint(99, 0, 2.0, 2.0, 2.0, 2.0, 1)], 1)
    assert found.mean == pytest.approx(1.01)


def test_a_diverged_step_does_not_hide_others() -> None:
    (found,) = thinned(points([1.0, math.nan, 3.0, math.inf]), 1)
    assert (found.min, found.mean, found.max, found.count) == (1.0, 2.0, 3.0, 4)
    assert found.last == math.inf


def entry(step: int, attempt: int = 0, loss: float = 1.0) -> StepMetrics:
    return dataclasses.replace(METRICS, step=step, attempt=attempt, loss=loss)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=60))
def test_the_newest_attempt_s_last_entry_counts(keys: list[tuple[int, int]]) -> None:
    metrics = [entry(step, attempt, loss=float(i)) for i, (step, attempt) in enumerate(keys)]
    found = newest(metrics)
    assert [m.step for m in found] == sorted({step for step, _ in keys})
    for m in found:
        rivals = [r for r in metrics if r.step == m.step]
        assert (m.attempt, m.loss) == max((r.attempt, r.loss) for r in rivals)


def test_a_long_run_s_ends_are_exact() -> None:
    count = 3 * MAX_POINTS + 7
    run = curves_of(entry(step, loss=9.0 if step == 17 else 1.0 / (step + 1)) for step in range(count))
    loss = run.curves["loss"]
    assert len(loss.points) <= MAX_POINTS
    assert loss.is_bucketed
    assert (loss.first, loss.last) == ((0, 1.0), (count - 1, 1.0 / count))
    assert (loss.max, loss.min, loss.count) == (9.0, 1.0 / count, count)
    assert "validation_loss" not in run.curves


@pytest.mark.parametrize("count", [1, WARM_UP_STEPS, WARM_UP_STEPS + 1, 100, MEDIAN_STEPS + WARM_UP_STEPS + 9])
def test_typical_values_are_medians_of_single_steps_after_warm_up(count: int) -> None:
    values = [float(step % 10 == 0) + step * 1e-6 for step in range(count)]
    found = usual(values)
    assert found is not None
    chosen = values if count <= WARM_UP_STEPS else values[WARM_UP_STEPS:][-MEDIAN_STEPS:]
    assert (found.value, found.count) == (statistics.median(chosen), len(chosen))
    assert found.origin == ("median of 1 step" if len(chosen) == 1 else f"median of {len(chosen):,} steps")


def test_a_run_without_steps_has_no_typical_values() -> None:
    assert usual([]) is None
    assert not curves_of([])
