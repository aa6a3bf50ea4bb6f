"""Expected time on devices that are taken away: closed form against a direct simulation, and what follows for plans."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import CheckpointSpec, JobSpec, Objective
from penstock.core.plan import RunTime
from penstock.planner.interruptions import SECONDS_PER_HOUR, Interruptions
from penstock.planner.pricing import cost_of, run_time_of
from penstock.planner.problem import Problem, problem_from_cluster
from tests.support.planning import DEVICE, cluster, job
from tests.support.sample_run import sample_plan

RUNS = 4_000

rates = st.floats(0.0, 50.0)
steps = st.floats(1e-3, 1e4)
models = st.builds(Interruptions, steps_between=st.integers(1, 1000), restart_seconds=st.floats(0.0, 3600.0))


def simulated_run(model: Interruptions, step_seconds: float, per_hour: float, num_steps: int, seed: int) -> float:
    """The time of one run: steps, interruptions at random moments, restarts that may be interrupted, too."""
    draw, rate = random.Random(seed), per_hour / SECONDS_PER_HOUR
    now = done = 0.0
    interrupted_at = draw.expovariate(rate)
    while done < num_steps:
        end = now + min(model.steps_between, num_steps - done) * step_seconds
        if end <= interrupted_at:
            now, done = end, done + model.steps_between
            continue
        while True:
            now = interrupted_at + model.restart_seconds
            restarted_from, interrupted_at = interrupted_at, interrupted_at + draw.expovariate(rate)
            if interrupted_at >= restarted_from + model.restart_seconds:
                break
    return now


@pytest.mark.parametrize(
    ("per_hour", "steps_between", "restart_seconds"),
    [(0.2, 50, 300.0), (1.0, 50, 300.0), (1.0, 50, 0.0), (3.0, 25, 600.0), (0.5, 200, 60.0)],
)
def test_the_closed_form_is_the_mean_of_simulated_runs(
    per_hour: float, steps_between: int, restart_seconds: float
) -> None:
    """Within four standard errors of the mean."""
    model, num_steps = Interruptions(steps_between=steps_between, restart_seconds=restart_seconds), 200
    runs = [simulated_run(model, 36.0, per_hour, num_steps, seed) for seed in range(RUNS)]
    error = statistics.stdev(runs) / math.sqrt(RUNS)
    assert statistics.mean(runs) == pytest.approx(num_steps * model.expected_seconds(36.0, per_hour), abs=4 * error)


def test_a_last_interval_that_is_shorter_counts_in_proportion() -> None:
    """Ten steps with a checkpoint after every eight: the closed form is a little above the mean of simulated runs."""
    model = Interruptions(steps_between=8, restart_seconds=60.0)
    mean = statistics.mean(simulated_run(model, 60.0, 2.0, 10, seed) for seed in range(RUNS))
    assert 1.0 < 10 * model.expected_seconds(60.0, 2.0) / mean < 1.05


@given(models, steps, st.floats(1e-9, 1e-3))
def test_rare_interruptions_cost_half_an_interval_and_a_restart(
    model: Interruptions, step: float, share: float
) -> None:
    """Young's first-order form: the difference is of second order."""
    interval = model.steps_between * step
    per_hour = share * SECONDS_PER_HOUR / (interval + model.restart_seconds)
    rate = per_hour / SECONDS_PER_HOUR
    first_order = step * (1 + rate * (interval / 2 + model.restart_seconds))
    assert model.expected_seconds(step, per_hour) == pytest.approx(first_order, rel=2 * share**2 + 1e-12)


@given(models, steps, rates, st.floats(1.0, 3.0))
def test_longer_steps_and_more_interruptions_take_longer(
    model: Interruptions, step: float, per_hour: float, factor: float
) -> None:
    expected = model.expected_seconds(step, per_hour)
    assert step * (1 - 1e-12) <= expected < math.inf
    assert model.expected_seconds(factor * step, per_hour) >= expected * (1 - 1e-12)
    assert model.expected_seconds(step, factor * per_hour) >= expected * (1 - 1e-12)


@given(models, steps, st.floats(0.0, 20.0))
def test_the_step_of_an_expected_time_is_the_inverse(model: Interruptions, step: float, per_hour: float) -> None:
    assert model.step_seconds(model.expected_seconds(step, per_hour), per_hour) == pytest.approx(step, rel=1e-6)


def spot_job(**changes: Any) -> JobSpec:
    """Steps of 36 s on two devices would save a checkpoint every half hour."""
    plain = job(ranks=4, min_ranks=1)
    training = dataclasses.replace(plain.training, steps=200)
    resources = dataclasses.replace(plain.resources, spot=True)
    return dataclasses.replace(plain, training=training, resources=resources, **changes)


SPOT = cluster(
    device=dataclasses.replace(DEVICE, price_per_hour=3.0, spot_price_per_hour=1.0, interruptions_per_hour=0.5),
    restart_seconds=300.0,
)


def test_a_run_on_spot_devices_counts_their_price_and_interruptions() -> None:
    """Two devices are interrupted once an hour. Half an hour between checkpoints: e^(1/12) (e^0.5 - 1) hours for it."""
    plan = sample_plan()
    assert plan.prediction is not None
    plan = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_seconds=36.0))
    run_time, cost = run_time_of(plan, spot_job(), SPOT), cost_of(plan, spot_job(), SPOT)
    hours = 4 * math.exp(1 / 12) * math.expm1(0.5)
    assert run_time is not None
    assert run_time.seconds == pytest.approx(3600 * hours)
    assert run_time.interruptions == pytest.approx(hours)
    assert run_time.interruption_seconds == pytest.approx(3600 * (hours - 2))
    assert cost is not None
    assert (cost.per_hour, cost.whole_job) == pytest.approx((2.0, 2.0 * hours))
    steady = job(ranks=4)
    assert run_time_of(plan, steady, SPOT) == RunTime(seconds=36.0)
    assert cost_of(plan, steady, SPOT).per_hour == 6.0  # type: ignore[union-attr]


def test_an_interval_is_no_longer_than_the_job() -> None:
    short = dataclasses.replace(spot_job(), checkpoint=CheckpointSpec(every_steps=10_000))
    plan = sample_plan()
    often = run_time_of(plan, dataclasses.replace(spot_job(), checkpoint=CheckpointSpec(every_steps=200)), SPOT)
    assert run_time_of(plan, short, SPOT) == often


def test_spot_devices_need_a_spot_price() -> None:
    with pytest.raises(UserError, match=r"spec.resources.spot: the job asks for spot devices, and 'abacus' has no"):
        problem_from_cluster(spot_job(), cluster())


def spot_problem(objective: Objective = Objective.TIME, every_steps: int = 50) -> Problem:
    return problem_from_cluster(spot_job(objective=objective, checkpoint=CheckpointSpec(every_steps=every_steps)), SPOT)


@given(
    st.sampled_from(Objective),
    st.integers(1, 200),
    st.integers(1, 4),
    st.integers(10**3, 10**12),
)
def test_the_longest_step_of_a_score_has_at_most_that_score(
    objective: Objective, every_steps: int, num_devices: int, duration_ns: int
) -> None:
    """`Problem.longest_ns` is the inverse of `Problem.score`, which the search rules plans out by."""
    spot = spot_problem(objective, every_steps)
    score = spot.score(duration_ns, num_devices)
    assert spot.longest_ns(score, num_devices) == pytest.approx(duration_ns, rel=1e-5, abs=2)


def test_more_devices_are_interrupted_more_often() -> None:
    """An hour between checkpoints: four devices have to be faster by more than their extra interruptions."""
    hour = 72_000_000_000
    spot = spot_problem()
    assert spot.score(hour, 1) < spot.score(hour, 2) < spot.score(hour, 4)
    steady = problem_from_cluster(job(ranks=4, min_ranks=1), SPOT)
    assert steady.score(hour, 1) == steady.score(hour, 2) >= steady.score(hour, 4) == hour
