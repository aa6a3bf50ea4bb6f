"""Timelines that the first rank requests when steps have drifted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.replanning import NUM_TIMELINES, WINDOW, is_sampled
from penstock.trainer.loop import DriftSampling


@given(st.floats(0.9, 1.1), st.integers(0, 200))
def test_steps_as_predicted_request_nothing(ratio: float, num_steps: int) -> None:
    sampling = DriftSampling(1.0)
    assert not any(sampling.wants_timeline(ratio) for _ in range(num_steps))


@given(st.floats(1.4, 5.0) | st.floats(0.2, 0.7), st.integers(WINDOW, 200))
def test_drifted_steps_request_few_timelines(ratio: float, num_steps: int) -> None:
    sampling = DriftSampling(1.0)
    requested = [step for step in range(num_steps) if sampling.wants_timeline(ratio)]
    assert requested == [step for step in range(num_steps) if is_sampled(step + 2 - WINDOW)]


def test_a_second_drift_is_sampled_like_the_first() -> None:
    sampling = DriftSampling(1.0)
    steps = [2.0] * 30 + [1.0] * 30 + [2.0] * 30
    requested = [step for step, seconds in enumerate(steps) if sampling.wants_timeline(seconds)]
    assert len([step for step in requested if step >= 60]) >= NUM_TIMELINES
    assert not [step for step in requested if 40 <= step < 60]
