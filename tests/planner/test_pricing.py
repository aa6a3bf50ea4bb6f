"""Cost of a plan in money, with numbers computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.plan import Cost, Plan
from penstock.planner.pricing import cost_of
from tests.support.planning import DEVICE, cluster, job
from tests.support.sample_run import sample_plan

STEPS = 500


def priced(per_hour: float) -> JobSpec:
    plain = job()
    training = dataclasses.replace(plain.training, steps=STEPS)
    return dataclasses.replace(plain, training=training, price_per_device_hour=per_hour)


def plan_of(step_seconds: float) -> Plan:
    """Two ranks, four sequences of 1,024 tokens a step."""
    plan = sample_plan()
    assert plan.prediction is not None
    return dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_seconds=step_seconds))


def test_devices_cost_for_as_long_as_steps_take() -> None:
    """Two devices at 3.00 an hour, 36 s a step: 0.06 a step of 4,096 tokens."""
    found = cost_of(plan_of(36.0), priced(3.0))
    assert found is not None
    assert found.per_hour == 6.0
    assert found.per_million_tokens == pytest.approx(0.06 * 1e6 / 4096)
    assert found.whole_job == pytest.approx(0.06 * STEPS)


def test_the_described_device_s_price_comes_before_the_job_s() -> None:
    dear = cluster(device=dataclasses.replace(DEVICE, price_per_hour=5.0))
    found = [cost_of(plan_of(1.0), priced(3.0), where) for where in (dear, cluster(), None)]
    assert [each and each.per_hour for each in found] == [10.0, 6.0, 6.0]


def test_without_a_price_there_is_no_cost() -> None:
    assert cost_of(plan_of(1.0), priced(0.0)) is None


@pytest.mark.parametrize("price", [-1.0, math.inf, math.nan])
def test_invalid_prices_are_refused(price: float) -> None:
    with pytest.raises(UserError, match="pricePer"):
        priced(price)
    with pytest.raises(UserError, match="pricePer"):
        dataclasses.replace(DEVICE, price_per_hour=price)


def test_without_a_prediction_there_is_no_cost() -> None:
    assert cost_of(dataclasses.replace(sample_plan(), prediction=None), priced(3.0)) is None


def test_a_cost_can_be_written_and_read() -> None:
    cost = Cost(per_hour=6.0, per_million_tokens=14.6, whole_job=30.0)
    assert cost.to_manifest() == {"perHour": 6.0, "perMillionTokens": 14.6, "wholeJob": 30.0}
    assert Cost.from_manifest(cost.to_manifest()) == cost
