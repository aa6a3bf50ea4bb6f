"""Plans for a running job: measured steps give back the true speeds of devices, and the plans are those for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import Objective, ResourcesSpec
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.profile import Profile
from penstock.core.replanning import Drift, Replanning, corrected
from penstock.core.timeline import Source, Timeline
from penstock.core.units import to_seconds
from penstock.planner.compile import schedule_of
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.replanning import drift_of, replan
from penstock.planner.replay import simulated
from penstock.planner.worker.__main__ import Counter, answer
from penstock.planner.worker.protocol import Answer, PlanningRequest
from tests.support.planning import cluster, job, profile_for

SPEC = job(ranks=2, global_batch=4, pp=2, dp=1, micro_batch=1, slices=2)
EQUAL = profile_for(SPEC, num_ranks=2)


def planned(profile: Profile, spec: Any = SPEC) -> Plan:
    return decide(problem_from_profile(spec, profile)).plan


def measured_on(profile: Profile, plan: Plan) -> Timeline:
    """A step of the plan on hardware with this profile."""
    return dataclasses.replace(simulated(plan, profile).timeline, source=Source.MEASURED)


def replanned(true: Profile, plan: Plan, spec: Any = SPEC) -> Replanning:
    timelines = (measured_on(true, plan),) * 3
    found = answer(PlanningRequest(spec=spec, profile=EQUAL, plan=plan, timelines=timelines))
    assert found.replanning is not None, found.error
    assert Answer.from_manifest(found.to_manifest()) == found
    return found.replanning


@pytest.mark.parametrize(("first", "second"), [(0.5, 1.0), (1.0, 2.0), (3.0, 1.0), (1.5, 1.5)])
def test_the_plans_are_those_for_the_true_speeds(first: float, second: float) -> None:
    plan = planned(EQUAL)
    true = slowed(first, second)
    found = replanned(true, plan)
    assert found.drift.devices == pytest.approx((first, second), rel=1e-3)
    best = planned(true)
    assert best.prediction is not None
    assert found.options[0].step_seconds == pytest.approx(best.prediction.step_seconds, rel=5e-3)
    assert found.step_seconds == pytest.approx(to_seconds(simulated(plan, true).timeline.step_ns), rel=5e-3)


def slowed(first: float, second: float) -> Profile:
    """Both devices take longer, also for the optimizer and the fixed part of actions."""
    units = tuple(
        dataclasses.replace(
            record, alone_seconds=record.alone_seconds * first, together_seconds=record.together_seconds * first
        )
        for record in EQUAL.units
    )
    optimizer = tuple(dataclasses.replace(record, seconds=record.seconds * first) for record in EQUAL.optimizer)
    return dataclasses.replace(
        EQUAL,
        units=units,
        optimizer=optimizer,
        action_overhead_seconds=EQUAL.action_overhead_seconds * first,
        slowness=() if first == second else (1.0, second / first),
    )


def test_one_plan_is_best_and_another_keeps_the_stages() -> None:
    plan = planned(EQUAL)
    best, same = replanned(slowed(1.0, 3.0), plan).options
    assert best.restart_reasons
    assert best.plan.stages != plan.stages
    assert same.restart_reasons == ()
    assert same.plan.stages == plan.stages
    ranks = schedule_of(plan).stage_ranks
    assert restart_reasons(plan, ranks, same.plan, schedule_of(same.plan).stage_ranks) == ()
    assert best.step_seconds <= same.step_seconds


def test_what_the_job_pins_stays_pinned() -> None:
    spec = dataclasses.replace(SPEC, parallelism=dataclasses.replace(SPEC.parallelism, slices=2, schedule="1f1b"))
    plan = planned(EQUAL, spec)
    for option in replanned(slowed(1.0, 3.0), plan, spec).options:
        assert len(option.plan.slices) == 2
        assert option.plan.schedule.generator == "1f1b"


@pytest.mark.parametrize("factor", [1 / 1.09, 1.09])
def test_a_device_that_is_about_as_fast_counts_as_measured(factor: float) -> None:
    assert replanned(slowed(1.0, factor), planned(EQUAL)).drift.changed_devices == ()


@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_slower_links_are_noticed(factor: float) -> None:
    plan = planned(EQUAL)
    true = corrected(EQUAL, Drift(devices=(1.0, 1.0), communication=factor))
    found = replanned(true, plan)
    assert found.drift.changed_devices == ()
    assert found.drift.communication == pytest.approx(factor, rel=0.05)
    assert found.drift.rest == pytest.approx(1.0, abs=0.02)
    assert found.step_seconds == pytest.approx(to_seconds(simulated(plan, true).timeline.step_ns), rel=5e-3)


def test_what_no_device_or_link_explains_is_a_factor_of_everything() -> None:
    """Here a step is longer than its events."""
    plan = planned(EQUAL)
    step = measured_on(slowed(1.0, 2.0), plan)
    longer = dataclasses.replace(step, step_ns=round(1.2 * step.step_ns))
    drift = drift_of(EQUAL, plan, (longer,))
    assert drift.devices == pytest.approx((1.0, 2.0), rel=1e-3)
    assert drift.communication == 1.0
    assert drift.rest > 1.15
    now = corrected(EQUAL, drift)
    assert simulated(plan, now).timeline.step_ns == pytest.approx(longer.step_ns, rel=0.01)


def test_without_drift_the_plan_stays() -> None:
    plan = planned(EQUAL)
    found = replanned(EQUAL, plan)
    assert found.drift == Drift(devices=(1.0, 1.0))
    assert found.profile == EQUAL
    (option,) = found.options
    assert option.plan.stages == plan.stages
    assert option.restart_reasons == ()


def test_timelines_correct_measurements_only() -> None:
    plan = planned(EQUAL)
    described: ClusterSpec = cluster(1, 2)
    request = PlanningRequest(spec=SPEC, cluster=described, plan=plan, timelines=(measured_on(EQUAL, plan),))
    assert answer(request).what == "timelines correct a profile, and none is given"


def test_where_nothing_fits_the_answer_says_so() -> None:
    plan = planned(EQUAL)
    small = dataclasses.replace(SPEC, resources=dataclasses.replace(SPEC.resources, memory_per_rank=1))
    with pytest.raises(UserError):
        replan(small, EQUAL, plan, (measured_on(EQUAL, plan),), lambda change: None)


class LimitedSecondSearch(Counter):
    """Its second search may simulate no candidate."""

    def of_change(self, change: str) -> Counter:
        return Counter(self._report, 0) if change == "of the same stages" else super().of_change(change)


def test_an_error_of_the_second_search_leaves_the_first_one_s_plan() -> None:
    plan = planned(EQUAL)
    timelines = (measured_on(slowed(1.0, 3.0), plan),) * 3
    request = PlanningRequest(spec=SPEC, profile=EQUAL, plan=plan, timelines=timelines)
    reply = answer(request, LimitedSecondSearch(lambda progress: None))
    assert reply.replanning is not None, reply.error
    (option,) = reply.replanning.options
    assert option.restart_reasons


@pytest.mark.parametrize(
    "limits",
    [
        {"objective": Objective.COST},
        {"budget": 1e9},
        {"objective": Objective.COST, "budget": 1e9, "resources": ResourcesSpec(ranks=2, min_ranks=1)},
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_with_money_at_stake_other_plans_have_as_many_ranks(limits: dict[str, Any], num_ranks: int) -> None:
    """Plans of other numbers of ranks were compared by cost, of which a comparison of steps knows nothing."""
    spec = dataclasses.replace(job(ranks=2, global_batch=4, dp=1, micro_batch=1), **limits)
    running = job(ranks=num_ranks, global_batch=4, dp=1, pp=num_ranks, micro_batch=1, slices=1)
    plan = planned(EQUAL, running)
    assert plan.num_ranks == num_ranks
    for option in replanned(slowed(3.0, 3.0), plan, spec).options:
        assert option.plan.num_ranks == num_ranks
