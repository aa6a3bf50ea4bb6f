"""Objectives with limits, and the frontier of time and money: properties on random clusters, brute force on small."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster import ClusterSpec, OtherDevices
from penstock.core.errors import UserError
from penstock.core.explanation import Frontier
from penstock.core.job import JobSpec, Objective
from penstock.planner.budget import Budget
from penstock.planner.choice import Choice, choose
from penstock.planner.decide import decide
from penstock.planner.pricing import cost_of, run_time_of
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated
from penstock.planner.subsets import MOST_SUBSETS, counts, subsets
from tests.support.planning import DEVICE, cluster, job, profile, slow_link, slower_device

QUICK = Budget(candidates=12, opened=24, shortages=10, lean_shortages=10, neighbours=4, actions=50_000, moves=2)
STEPS = 100_000


def priced(ranks: int, **changes: Any) -> JobSpec:
    """A job of many steps, whose devices have a price."""
    limits = {name: changes.pop(name) for name in ("deadline_seconds", "budget") if name in changes}
    spot = changes.pop("spot", False)
    plain = job(ranks=ranks, global_batch=4, **changes)
    training = dataclasses.replace(plain.training, steps=STEPS)
    resources = dataclasses.replace(plain.resources, spot=spot)
    return dataclasses.replace(plain, training=training, resources=resources, **limits)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Up to two kinds of devices with prices and interruptions, four devices at most."""
    device = dataclasses.replace(
        DEVICE,
        price_per_hour=draw(st.sampled_from([0.5, 1.0, 3.0])),
        spot_price_per_hour=draw(st.sampled_from([0.2, 0.6])),
        interruptions_per_hour=draw(st.sampled_from([0.0, 0.05, 1.0])),
    )
    per_node = draw(st.integers(1, 2))
    if draw(st.booleans()):
        return cluster(draw(st.integers(1, 2)), per_node, device=device)
    other = dataclasses.replace(
        slower_device(draw(st.sampled_from([1.3, 2.0, 4.0]))),
        name="slow",
        price_per_hour=draw(st.sampled_from([0.2, 0.5, 1.5])),
        spot_price_per_hour=draw(st.sampled_from([0.1, 0.5])),
        interruptions_per_hour=draw(st.sampled_from([0.0, 0.2])),
    )
    return cluster(2, per_node, device=device, other_devices=(OtherDevices(device=other, num_nodes=1),))


def chosen(spec: JobSpec, on: ClusterSpec, *, frontier: bool = False) -> Choice:
    return choose(spec, on, budget=QUICK, frontier=frontier)


def frontier_of(choice: Choice) -> Frontier:
    assert choice.plan.prediction is not None
    assert choice.plan.prediction.explanation is not None
    assert choice.plan.prediction.explanation.frontier is not None
    return choice.plan.prediction.explanation.frontier


@settings(max_examples=6, deadline=None)
@given(clusters(), st.booleans())
def test_the_frontier_is_monotone_and_limits_choose_from_it(on: ClusterSpec, spot: bool) -> None:
    """Time rises and cost falls. Each point is the choice of its own time as deadline, and of its cost as budget. A
    plan for cost never costs more than one for time.
    """
    ranks = on.num_devices
    fastest = chosen(priced(ranks, min_ranks=1, spot=spot), on, frontier=True)
    points = frontier_of(fastest).points
    for sooner, later in itertools.pairwise(points):
        assert sooner.run_seconds < later.run_seconds
        assert sooner.cost > later.cost
    cheapest = chosen(priced(ranks, min_ranks=1, spot=spot, objective=Objective.COST), on)
    assert cheapest.money <= fastest.money
    assert cheapest.money == points[-1].cost
    assert fastest.seconds >= points[0].run_seconds
    for point in points:
        deadline = math.ceil(point.run_seconds)
        by_deadline = chosen(
            priced(ranks, min_ranks=1, spot=spot, objective=Objective.COST, deadline_seconds=deadline), on
        )
        assert by_deadline.seconds <= deadline
        assert by_deadline.money <= point.cost
        by_budget = chosen(priced(ranks, min_ranks=1, spot=spot, budget=point.cost), on)
        assert by_budget.money <= point.cost
        assert by_budget.seconds <= point.run_seconds


@settings(max_examples=4, deadline=None)
@given(clusters(), st.lists(st.floats(0.8, 4.0), min_size=2, max_size=3))
def test_looser_limits_never_choose_worse_plans(on: ClusterSpec, factors: list[float]) -> None:
    fastest = chosen(priced(on.num_devices), on)
    costs: list[float] = []
    times: list[float] = []
    for factor in sorted(factors):
        late: dict[str, Any] = {"objective": Objective.COST, "deadline_seconds": math.ceil(factor * fastest.seconds)}
        rich: dict[str, Any] = {"budget": factor * fastest.money}
        for results, limits in ((costs, late), (times, rich)):
            try:
                choice = chosen(priced(on.num_devices, **limits), on)
            except UserError:
                results.append(math.inf)
            else:
                results.append(choice.money if results is costs else choice.seconds)
    assert costs == sorted(costs, reverse=True)
    assert times == sorted(times, reverse=True)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from([1, 2]), st.sampled_from([0.0, 0.3, 3.0]))
def test_the_frontier_of_few_devices_is_that_of_every_number_of_devices(per_node: int, per_hour: float) -> None:
    """Brute force: a search for each number of equal devices, with a job of that number."""
    device = dataclasses.replace(DEVICE, spot_price_per_hour=1.0, interruptions_per_hour=per_hour)
    on = cluster(2, per_node, device=device)
    plans = []
    for ranks in range(1, on.num_devices + 1):
        spec = priced(ranks, spot=True)
        try:
            plan = decide(problem_from_cluster(spec, on), QUICK.part(4)).plan
        except UserError:
            continue
        run_time, cost = run_time_of(plan, spec, on), cost_of(plan, spec, on)
        assert run_time is not None
        assert cost is not None
        plans.append((run_time.seconds, cost.whole_job))
    points = frontier_of(chosen(priced(on.num_devices, min_ranks=1, spot=True), on, frontier=True)).points
    for seconds, money in plans:
        assert any(point.run_seconds <= seconds * 1.0001 and point.cost <= money * 1.0001 for point in points)


def test_a_deadline_buys_no_more_devices_than_it_needs() -> None:
    on = cluster(1, 4, device=dataclasses.replace(DEVICE, price_per_hour=1.0))
    points = frontier_of(chosen(priced(4, min_ranks=1), on, frontier=True)).points
    assert [point.num_devices for point in points] == sorted((point.num_devices for point in points), reverse=True)
    middle = points[len(points) // 2]
    spec = priced(4, objective=Objective.COST, deadline_seconds=math.ceil(middle.run_seconds))
    assert chosen(spec, on).plan.num_ranks == middle.num_devices
    assert any("the cheapest that ends all steps in" in reason for reason in chosen(spec, on).plan.reasons)


def refused(spec: JobSpec, on: ClusterSpec) -> UserError:
    with pytest.raises(UserError) as refusal:
        chosen(spec, on)
    return refusal.value


@pytest.mark.parametrize("objective", Objective)
def test_a_limit_that_no_plan_holds_is_refused_with_the_least_that_one_needs(objective: Objective) -> None:
    """The remedy's number is enough."""
    on = cluster(1, 2, device=dataclasses.replace(DEVICE, price_per_hour=1.0))
    late = refused(priced(2, objective=objective, deadline_seconds=60), on)
    assert late.where == "spec.deadlineSeconds"
    assert late.what.startswith("no plan that was found ends all steps in 60 s: the fastest takes ")
    enough = int(late.remedy.split()[3].rstrip(","))
    assert chosen(priced(2, objective=objective, deadline_seconds=enough), on).seconds <= enough
    dear = refused(priced(2, objective=objective, budget=0.01), on)
    assert dear.where == "spec.budget"
    assert dear.what.startswith("no plan that was found costs at most 0.01 for all steps: the cheapest costs ")
    enough_money = float(dear.remedy.split()[3].rstrip(","))
    assert chosen(priced(2, objective=objective, budget=enough_money), on).money <= enough_money


def test_two_limits_that_exclude_each_other_are_refused_with_both_ways_out() -> None:
    on = cluster(1, 4, device=dataclasses.replace(DEVICE, price_per_hour=1.0))
    points = frontier_of(chosen(priced(4, min_ranks=1), on, frontier=True)).points
    limits = {"deadline_seconds": math.ceil(points[0].run_seconds), "budget": points[-1].cost * 1.001}
    error = refused(priced(4, objective=Objective.COST, **limits), on)
    assert error.where == "spec.deadlineSeconds"
    assert "no plan that was found within the budget ends" in error.what
    assert "the cost of the cheapest plan that meets the deadline" in error.remedy
    money = float(error.remedy.split("raise budget to ")[1].split(",")[0])
    enough = priced(4, objective=Objective.COST, deadline_seconds=limits["deadline_seconds"], budget=money)
    assert chosen(enough, on).money <= money


def test_interruptions_make_fewer_devices_faster() -> None:
    """The objective counts them: at some rate a plan of all devices takes longer than one of fewer."""

    def planned(per_hour: float, **changes: Any) -> Choice:
        device = dataclasses.replace(DEVICE, spot_price_per_hour=1.0, interruptions_per_hour=per_hour)
        on = cluster(1, 4, device=device, restart_seconds=600.0)
        return chosen(priced(4, spot=True, **changes), on)

    assert planned(0.0, min_ranks=1).plan.num_ranks == 4
    few, all_of_them = planned(20.0, min_ranks=1), planned(20.0)
    assert few.plan.num_ranks < all_of_them.plan.num_ranks == 4
    deadline = math.ceil((few.seconds + all_of_them.seconds) / 2)
    assert planned(20.0, deadline_seconds=deadline).seconds <= deadline, "a deadline allows fewer devices"


@pytest.mark.parametrize("objective", Objective)
def test_a_kind_with_more_memory_may_use_it_without_the_others(objective: Objective) -> None:
    """Ranks of a plan over both kinds have the memory of the smaller device, in which nothing fits."""
    small = dataclasses.replace(DEVICE, memory_bytes=2**16)
    large = OtherDevices(device=dataclasses.replace(slower_device(2.0), name="large"), num_nodes=1)
    on = cluster(2, 1, device=small, other_devices=(large,))
    assert chosen(priced(2, min_ranks=1, objective=objective), on).plan.placement == (1,)
    with pytest.raises(UserError, match=r"nothing fits in 64 KiB per rank"):
        chosen(priced(2, objective=Objective.TIME), on)


def test_a_slower_kind_is_used_if_the_fast_one_is_interrupted_too_often() -> None:
    fast = dataclasses.replace(DEVICE, spot_price_per_hour=1.0, interruptions_per_hour=20.0)
    steady = dataclasses.replace(slower_device(1.5), name="steady", spot_price_per_hour=1.0)
    on = cluster(2, 1, device=fast, other_devices=(OtherDevices(device=steady, num_nodes=1),), restart_seconds=600.0)
    alone = chosen(priced(1, spot=True), cluster(1, 1, device=steady, restart_seconds=600.0))
    plan_for_time = chosen(priced(2, min_ranks=1, spot=True), on)
    assert plan_for_time.seconds <= 1.005 * alone.seconds
    assert chosen(priced(2, min_ranks=1, spot=True, objective=Objective.COST), on).money <= plan_for_time.money


def test_the_frontier_needs_prices() -> None:
    free = dataclasses.replace(priced(2), price_per_device_hour=0.0)
    with pytest.raises(UserError, match=r"spec.pricePerDeviceHour: the frontier of time and money needs the price"):
        chosen(free, cluster(), frontier=True)


def test_measured_hardware_has_a_frontier_too() -> None:
    points = frontier_of(choose(priced(2, min_ranks=1), profile(), budget=QUICK, frontier=True)).points
    assert {point.devices for point in points} <= {"2 devices", "1 device"}


def mixed(**changes: Any) -> ClusterSpec:
    """A node of fast devices between two of slow ones."""
    first = dataclasses.replace(slower_device(3.0), name="slow", price_per_hour=0.1)
    fast = OtherDevices(device=dataclasses.replace(DEVICE, name="fast", price_per_hour=5.0), num_nodes=1)
    middle = dataclasses.replace(slower_device(2.0), name="middle", price_per_hour=0.9)
    return cluster(3, 2, device=first, other_devices=(fast, OtherDevices(device=middle, num_nodes=1)), **changes)


def test_every_set_of_kinds_is_planned_for_and_bounded() -> None:
    made = subsets(priced(6), mixed())
    names = {
        frozenset(device.name for device in subset.hardware.device_kinds)  # type: ignore[union-attr]
        for subset in made
    }
    assert names == {
        frozenset(kinds) for size in (1, 2, 3) for kinds in itertools.combinations(("slow", "fast", "middle"), size)
    }
    assert len(made) <= MOST_SUBSETS


def test_a_plan_on_some_kinds_has_the_devices_of_the_whole_cluster() -> None:
    """It takes as long there, and links between nodes stay those of their nodes."""
    on, spec = mixed(links=(slow_link(0, 1, 20.0), slow_link(1, 2, 7.0))), priced(6)
    for subset in subsets(spec, on):
        if subset.num_devices < 3 or not subset.devices:
            continue
        decision = decide(subset.problem(Objective.TIME), QUICK)
        plan = subset.in_whole(decision.plan)
        assert plan is not None
        assert plan.prediction is not None
        names = {device.name for device in subset.hardware.device_kinds}  # type: ignore[union-attr]
        kinds = on.kinds_of(6)
        assert {on.device_kinds[kinds[device]].name for device in plan.devices} == names
        seconds = simulated(plan, on).makespan_ns / 1e9
        assert seconds == pytest.approx(plan.prediction.step_seconds, rel=0.02)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 12), st.sampled_from([1, 4, 8]))
def test_numbers_of_devices_are_few_and_have_both_ends(fewest: int, most: int, limit: int, host_size: int) -> None:
    numbers = counts(fewest, most, limit, host_size)
    assert len(numbers) <= limit
    assert numbers == sorted(set(numbers), reverse=True)
    assert all(fewest <= number <= most for number in numbers)
    if fewest <= most:
        assert numbers[0] == most
        assert limit == 1 or numbers[-1] == fewest
        assert len(numbers) == most - fewest + 1 or len(numbers) <= limit
