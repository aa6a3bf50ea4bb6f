"""Predicted and measured memory of every rank."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.layout import Precision, stage_parameters
from penstock.core.plan import Plan, Prediction
from penstock.core.timeline import Source, Timeline
from penstock.planner.comparison import rank_memory
from penstock.planner.memory import state_bytes_per_parameter
from tests.support.small_plans import small_plan

CONSTANT, TRANSIENT = 1000, 70


def predicted_plan(dp: int, tp: int, pp: int) -> Plan:
    """Every pipeline rank's slots and peak are its own."""
    plan = dataclasses.replace(small_plan(dp=dp, pp=pp, precision=Precision.FP32), tp=tp)
    slots = tuple(100 * (rank + 1) for rank in range(pp))
    state = [
        stage_parameters(plan.model, *units, tp) * state_bytes_per_parameter(plan.precision) for units in plan.stages
    ]
    seconds = ("step", "compute", "bubble", "communication", "reduction", "optimizer")
    prediction = Prediction(
        **{f"{name}_seconds": 1.0 for name in seconds},  # type: ignore[arg-type]
        peak_bytes=tuple(CONSTANT + sum(held) + TRANSIENT for held in zip(state, slots, strict=True)),
        slot_bytes=slots,
    )
    return dataclasses.replace(plan, prediction=prediction)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 1)])
def test_every_rank_has_the_prediction_of_its_own_stages(dp: int, tp: int, pp: int) -> None:
    plan = predicted_plan(dp, tp, pp)
    peaks = tuple(range(1, plan.num_ranks + 1))
    measured = Timeline(source=Source.MEASURED, num_ranks=plan.num_ranks, step_ns=1, events=(), peak_bytes=peaks)
    memory = rank_memory(plan, CONSTANT, measured)
    expected = [100 * (own + 1) for _ in range(dp) for own in range(pp) for _ in range(tp)]
    assert [rank.slot_bytes for rank in memory] == expected
    assert {rank.transient_bytes for rank in memory} == {TRANSIENT}
    assert [rank.measured_bytes for rank in memory] == list(peaks)


def test_without_a_prediction_nothing_is_compared() -> None:
    assert rank_memory(small_plan(), CONSTANT, None) == ()
