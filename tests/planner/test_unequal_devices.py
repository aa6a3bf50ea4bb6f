"""Devices of unequal speed: work follows speed, against brute force and against uniformly slow hardware."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster import ClusterSpec, OtherDevices
from penstock.core.cost_table import CostRow, Pass
from penstock.core.errors import UserError
from penstock.core.job import Objective
from penstock.core.model import UnitKind
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from penstock.planner.decide import decide
from penstock.planner.device_order import devices_in_order, slowness_of_ranks
from penstock.planner.evaluate import Simulated, owners_of
from penstock.planner.floor import floor_ns
from penstock.planner.measured import problem_from_profile
from penstock.planner.outlines import outlines_of
from penstock.planner.pricing import cost_of
from penstock.planner.problem import Mesh, Problem, all_meshes, problem_from_cluster
from penstock.planner.replay import candidate_of
from penstock.planner.stages import balanced_bounds, evened_bounds, rank_loads, slowed_bounds
from penstock.planner.variations import more_memory
from tests.support.every_plan import least_step_ns, random_problem
from tests.support.planning import DEVICE, cluster, job, problem, profile_for, slower_device

SPEEDS = st.sampled_from([1.0, 1.25, 2.0, 3.5])


def mixed(*slowness: float, **changes: Any) -> Problem:
    """A problem on devices of one node, of which each takes so many times as long."""
    described = cluster(1, len(slowness))
    found = problem(described, ranks=len(slowness), global_batch=changes.pop("global_batch", 8), **changes)
    return dataclasses.replace(found, slowness=slowness)


def planned(of: Problem) -> Plan:
    return decide(of).plan


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds


@given(st.lists(st.integers(1, 90), min_size=3, max_size=8), st.lists(SPEEDS, min_size=2, max_size=3))
def test_stages_follow_the_speed_of_their_ranks(unit_ns: list[int], slowness: list[float]) -> None:
    """As well as the best of all cuts."""
    pp = len(slowness)
    owners = tuple(range(pp))
    found = slowed_bounds(unit_ns, owners, slowness)

    def longest(bounds: Sequence[int]) -> float:
        return float((rank_loads(unit_ns, bounds, owners) * slowness).max())

    inner = itertools.combinations(range(1, len(unit_ns)), pp - 1)
    best = min(longest((0, *cuts, len(unit_ns))) for cuts in inner)
    assert longest(found) < best + 1, "a stage's time is rounded up"


@given(st.lists(st.integers(1, 90), min_size=4, max_size=7), st.lists(SPEEDS, min_size=2, max_size=2))
def test_ranks_with_two_stages_are_evened_by_their_speed(unit_ns: list[int], slowness: list[float]) -> None:
    """Up to the move of one unit."""
    owners = (0, 1, 1, 0)
    bounds = slowed_bounds(unit_ns, owners, slowness)
    inner = itertools.combinations(range(1, len(unit_ns)), 3)
    every = [(0, *cuts, len(unit_ns)) for cuts in inner]
    best = min(float((rank_loads(unit_ns, cut, owners) * slowness).max()) for cut in every)
    unaware = evened_bounds(unit_ns, balanced_bounds(unit_ns, 4), owners)
    found, naive = (float((rank_loads(unit_ns, cut, owners) * slowness).max()) for cut in (bounds, unaware))
    assert found <= best + max(unit_ns) * max(slowness)
    assert found <= naive + 1 or max(slowness) == min(slowness)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.data())
def test_many_stages_are_cut_by_their_share_of_the_speed(unit_ns: list[int], data: st.DataObject) -> None:
    """Each within the longest unit of its share, unless stages before it or after it need a unit each."""
    num_stages = data.draw(st.integers(1, len(unit_ns)))
    slowness = [data.draw(SPEEDS) for _ in range(num_stages)]
    with mock.patch("penstock.planner.stages.MOST_SLOWED", 0):
        bounds = slowed_bounds(unit_ns, tuple(range(num_stages)), slowness)
    assert (bounds[0], bounds[-1]) == (0, len(unit_ns))
    assert list(bounds) == sorted(set(bounds))
    if num_stages == 1 or max(unit_ns) * num_stages * max(slowness) > sum(unit_ns) * min(slowness):
        return
    share = sum(unit_ns) / sum(1 / value for value in slowness)
    loads = rank_loads(unit_ns, bounds, tuple(range(num_stages)))
    assert all(abs(load - share / slow) <= max(unit_ns) for load, slow in zip(loads, slowness, strict=True))


@pytest.mark.parametrize("pinned", [{"pp": 2}, {"dp": 2}, {"tp": 2}, {"pp": 2, "recompute": Recompute.FULL}])
def test_devices_that_are_all_slow_are_slower_devices(pinned: dict[str, Any]) -> None:
    """The same plan, and the same time as on a device that is described as so much slower."""
    described = cluster(1, 2, device=slower_device(2.0))
    expected = planned(problem(described, ranks=2, global_batch=8, **pinned))
    found = planned(mixed(2.0, 2.0, **pinned))
    assert found.stages == expected.stages
    assert seconds(found) == pytest.approx(seconds(expected), rel=1e-4)


@pytest.mark.parametrize("slow", [1.5, 2.0, 3.0])
def test_a_slow_device_gets_less_work_than_an_equal_share(slow: float) -> None:
    """The step is shorter than without it, and than that of the best plan for equal devices."""
    alone, even, plan = planned(mixed(1.0)), planned(mixed(1.0, 1.0)), planned(mixed(1.0, slow))
    unaware = Simulated(mixed(1.0, slow)).evaluate(candidate_of(even)).step_ns / 1e9
    assert seconds(even) < seconds(plan) < seconds(alone)
    assert unaware > (1 + (slow - 1) / 4) * seconds(plan)


@settings(max_examples=15, deadline=None)
@given(st.lists(SPEEDS, min_size=2, max_size=4), st.data())
def test_a_faster_device_never_makes_the_plan_slower(slowness: list[float], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(slowness) - 1))
    faster = [*slowness]
    faster[which] /= 2
    assert seconds(planned(mixed(*faster))) <= 1.005 * seconds(planned(mixed(*slowness)))


@settings(max_examples=15, deadline=None)
@given(st.permutations([1.0, 1.0, 2.0, 2.0]))
def test_the_numbering_of_devices_does_not_matter(slowness: list[float]) -> None:
    """But for shards, which are adjacent."""
    expected = seconds(planned(mixed(1.0, 1.0, 2.0, 2.0, tp=1)))
    assert seconds(planned(mixed(*slowness, tp=1))) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.lists(SPEEDS, min_size=1, max_size=4))
def test_no_plan_is_faster_than_the_lower_bound(slowness: list[float]) -> None:
    found = mixed(*slowness)
    assert floor_ns(found, all_meshes(found)) <= 1e9 * seconds(planned(found))


@settings(max_examples=10, deadline=None)
@given(st.lists(SPEEDS, min_size=2, max_size=4))
def test_devices_that_are_not_worth_it_are_left_out(slowness: list[float]) -> None:
    """With `minRanks` a mixed cluster is never slower than its fast devices alone."""
    fastest = [value for value in slowness if value == min(slowness)]
    free = mixed(*slowness, min_ranks=1)
    assert seconds(planned(free)) <= 1.005 * seconds(planned(mixed(*fastest)))


@pytest.mark.parametrize(("slowness", "tp", "device"), [((1.0, 0.25), 1, 1), ((2.0, 2.0), 2, 0)])
def test_estimates_have_the_optimizer_and_collectives_of_slow_devices(
    slowness: tuple[float, ...], tp: int, device: int
) -> None:
    """The optimizer is as slow as its device, and collectives are not slower. Otherwise the order of the search is
    wrong, and a fast device alone is not tried.
    """
    unequal = mixed(*slowness, min_ranks=1)
    [outline] = outlines_of(unequal, [Mesh(dp=1, tp=tp, pp=1, microbatch=8, num_microbatches=1)])
    plan = planned(mixed(*slowness, min_ranks=1, dp=1, tp=tp, pp=1, micro_batch=8))
    assert plan.placement == (device,)
    assert outline.estimate_ns == pytest.approx(1e9 * seconds(plan), rel=1e-3)


def test_replicas_of_a_stage_are_about_equally_fast() -> None:
    found = mixed(2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    mesh = Mesh(dp=2, tp=1, pp=4, microbatch=1, num_microbatches=4)
    devices = devices_in_order(found, mesh)
    assert sorted(devices) == list(range(8))
    assert sorted(slowness_of_ranks(found, mesh, devices)) == [1.0, 1.0, 1.0, 2.0]
    by_shards = Mesh(dp=1, tp=2, pp=4, microbatch=1, num_microbatches=4)
    assert sorted(devices_in_order(found, by_shards)) == [0, 2, 4, 6]
    assert slowness_of_ranks(found, by_shards, (4, 6, 0, 2)).tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("slowness", [(1.0, 2.0), (2.0, 1.0), (1.0, 1.3, 1.3), (1.7, 1.7, 1.0), (3.0, 1.0, 1.0)])
def test_few_devices_are_used_as_well_as_brute_force_finds(slowness: tuple[float, ...]) -> None:
    """Over all cuts and orders of the devices, with the plan's slices: within 3 %."""
    found = mixed(*slowness, pp=len(slowness), schedule="1f1b")
    plan = planned(found)
    candidate, least_ns, num_units = candidate_of(plan), 10**18, found.model.num_units
    for order in itertools.permutations(range(len(slowness))):
        judge = Simulated(found, plan.receive_ahead, lambda mesh, order=order: order)  # type: ignore[misc]
        for cuts in itertools.combinations(range(1, num_units), len(slowness) - 1):
            other = dataclasses.replace(candidate, stages=tuple(itertools.pairwise((0, *cuts, num_units))))
            least_ns = min(least_ns, judge.evaluate(other).step_ns)
    assert owners_of(candidate) == tuple(range(len(slowness)))
    assert 1e9 * seconds(plan) <= 1.03 * least_ns


@pytest.mark.parametrize("number", range(3))
def test_three_devices_are_used_as_well_as_all_meshes_placements_and_cuts(number: int) -> None:
    """Within 3 %, for random problems; ``./dev soak every-plan`` has more, and more devices."""
    drawn = random_problem(random.Random(number), 3)
    plan = planned(drawn)
    least_ns, description = least_step_ns(drawn, plan)
    assert 1e9 * seconds(plan) <= 1.03 * least_ns, description


def test_an_order_is_at_least_as_long_as_its_bound_says() -> None:
    """Orders are made from the costs of their ranks; else the search would rule out fast ones."""
    found = mixed(1.0, 0.5, 0.5, 0.5, pp=4, schedule="zb", global_batch=2048, micro_batch=1, slices=1)
    plan = planned(found)
    judge, candidate = Simulated(found, plan.receive_ahead), candidate_of(plan)
    recorded = dataclasses.replace(candidate, schedule="zb")
    bound = judge.order_bound(recorded)
    assert bound is not None
    assert bound.step_ns <= judge.evaluate(recorded).step_ns


def test_ranks_that_cannot_be_reordered_keep_their_devices() -> None:
    """Processes on the CPU of one machine: stages follow the speed, devices the number."""
    spec = job(ranks=2, global_batch=8, pp=2)
    slow = problem_from_profile(spec, profile_for(spec, slowness=(1.0, 0.5)))
    plan = planned(slow)
    assert plan.placement == (0, 1)
    num_units = [stop - first for first, stop in plan.stages]
    assert num_units[0] < num_units[-1]
    over_hosts = problem_from_profile(spec, profile_for(spec, slowness=(1.0, 0.5), hosts=(0, 1)))
    assert not over_hosts.has_fixed_ranks


ROW = CostRow(unit=UnitKind.MLP, pass_=Pass.F, tokens=1, pairs=0, seconds=1.0)


def described(slow: float, **changes: Any) -> ClusterSpec:
    """Two nodes, of which the second has slower devices."""
    other = dataclasses.replace(slower_device(slow), **changes)
    return cluster(2, 2, other_devices=(OtherDevices(device=other, num_nodes=1),))


def test_a_described_kind_of_device_is_slower_by_the_whole_model() -> None:
    found = problem(described(2.0), ranks=4)
    assert found.slowness == pytest.approx((1.0, 1.0, 2.0, 2.0))
    assert problem(described(2.0), ranks=2).slowness == ()
    assert seconds(planned(found)) < seconds(planned(problem(cluster(2, 2, device=slower_device(2.0)), ranks=4)))


def test_every_rank_may_use_what_the_smallest_device_has() -> None:
    small = described(2.0, memory_bytes=2**20)
    assert problem(small, ranks=4).memory_limit_bytes == 2**20
    assert problem(small, ranks=2).memory_limit_bytes == 2**30


def test_more_memory_is_more_of_every_kind() -> None:
    spec = job(ranks=4)
    more = more_memory(spec, described(2.0))
    assert isinstance(more.hardware, ClusterSpec)
    assert problem_from_cluster(more.spec, more.hardware).memory_limit_bytes == 11 * 2**30


def test_utilization_is_that_of_the_devices_in_use() -> None:
    """A plan that leaves slow devices unused does not count their peak."""
    spec = job(ranks=4, min_ranks=1, global_batch=8)
    plan = planned(problem_from_cluster(spec, described(100.0)))
    assert plan.num_ranks <= 2
    assert plan.prediction is not None
    assert plan.prediction.peak_flops == DEVICE.peak_flops
    assert not any("differ in speed" in reason for reason in plan.reasons)
    both = planned(problem_from_cluster(job(ranks=4, global_batch=8, pp=4), described(2.0)))
    assert both.prediction is not None
    assert both.prediction.peak_flops == pytest.approx(0.75 * DEVICE.peak_flops)
    assert any("up to 2.00: stages have work in proportion" in reason for reason in both.reasons)


def test_a_plan_costs_what_its_devices_do() -> None:
    first = dataclasses.replace(DEVICE, price_per_hour=4.0)
    priced = dataclasses.replace(described(2.0, price_per_hour=1.0), device=first)
    spec = job(ranks=4, global_batch=8)
    cost = cost_of(planned(problem_from_cluster(spec, priced)), spec, priced)
    assert cost is not None
    assert cost.per_hour == 10.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 1}, "otherDevices: have 1 of 1 nodes, which leaves none for device"),
        ({"costs": (ROW,)}, "costs: are of one kind"),
    ],
)
def test_kinds_of_devices_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(described(2.0), **changes)


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([1.3, 2.0, 3.0]), st.sampled_from([0.2, 0.5, 0.9, 1.5]))
def test_a_plan_for_money_never_costs_more_than_one_for_time_or_of_one_kind(slow: float, price: float) -> None:
    first = dataclasses.replace(DEVICE, price_per_hour=1.0)
    mixed_kinds = dataclasses.replace(described(slow, price_per_hour=price), device=first)
    second = dataclasses.replace(slower_device(slow), price_per_hour=price)
    alone = [cluster(1, 2, device=device) for device in (first, second)]

    def per_token(objective: Objective, on: ClusterSpec, ranks: int) -> float:
        spec = job(ranks=ranks, min_ranks=1, global_batch=8, objective=objective)
        cost = cost_of(planned(problem_from_cluster(spec, on)), spec, on)
        assert cost is not None
        return cost.per_million_tokens

    cheapest = per_token(Objective.COST, mixed_kinds, 4)
    assert cheapest <= 1.005 * per_token(Objective.TIME, mixed_kinds, 4)
    assert cheapest <= 1.005 * min(per_token(Objective.COST, on, 2) for on in alone)
