"""The simulation of a plan equals its prediction for every placement of its ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import Objective
from penstock.core.moments import MomentType
from penstock.core.profile import CollectiveRecord, LinkRecord, OptimizerRecord
from penstock.core.replicas import ReductionType
from penstock.core.units import to_seconds
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.replay import simulated
from tests.support.planning import cluster, job, problem, profile, slow_link

QUICK = Budget(candidates=12, moves=0)
SUM = CollectiveRecord(num_ranks=2, num_bytes=1 << 20, seconds=1e-3, spread=0.0)


def hidden_path(num_nodes: int, path: tuple[int, ...]) -> ClusterSpec:
    """Nodes with fast links between neighbours of ``path`` alone."""
    near = {frozenset(pair) for pair in itertools.pairwise(path)}
    pairs = ((a, b) for a in range(num_nodes) for b in range(a) if frozenset((a, b)) not in near)
    return cluster(num_nodes=num_nodes, devices_per_node=1, links=tuple(slow_link(a, b, 40) for a, b in pairs))


PINNED: list[dict[str, Any]] = [{"pp": 4}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "schedule": "zb"}, {"dp": 4}]


@settings(max_examples=12)
@given(st.permutations(range(4)).map(tuple), st.sampled_from(PINNED))
def test_on_unequal_links_a_placed_plan_is_simulated_as_it_was_predicted(
    path: tuple[int, ...], pinned: dict[str, Any]
) -> None:
    described = hidden_path(4, path)
    plan = decide(problem(described, ranks=4, global_batch=4, **pinned), QUICK).plan
    assert plan.prediction is not None
    assert to_seconds(simulated(plan, described).makespan_ns) == plan.prediction.step_seconds


def test_placement_is_what_makes_the_difference() -> None:
    described = hidden_path(4, (0, 2, 1, 3))
    plan = decide(problem(described, ranks=4, global_batch=4, pp=4, dp=1), QUICK).plan
    assert plan.placement in ((0, 2, 1, 3), (3, 1, 2, 0))
    in_order = dataclasses.replace(plan, placement=())
    assert simulated(in_order, described).makespan_ns > simulated(plan, described).makespan_ns


def test_a_plan_on_measured_links_is_simulated_as_it_was_predicted() -> None:
    speeds = {(0, 1): 1e7, (1, 2): 1e9, (0, 2): 1e9}
    links = tuple(
        LinkRecord(source=s, target=t, latency_seconds=1e-5, bytes_per_second=speed, error=0.0)
        for (a, b), speed in speeds.items()
        for s, t in ((a, b), (b, a))
    )
    measured = profile(links=links, num_ranks=3)
    plan = decide(problem_from_profile(job(ranks=3, global_batch=3, pp=3), measured), QUICK).plan
    assert plan.placement in ((0, 2, 1), (1, 2, 0))
    assert plan.prediction is not None
    assert to_seconds(simulated(plan, measured).makespan_ns) == plan.prediction.step_seconds


def test_a_plan_of_fewer_ranks_than_devices_keeps_those_it_chose() -> None:
    described = hidden_path(4, (0, 3, 1, 2))
    wanted = problem(described, ranks=4, global_batch=1, pp=2, dp=1, objective=Objective.COST)
    plan = dataclasses.replace(decide(wanted, QUICK).plan, placement=(0, 3))
    slow = dataclasses.replace(plan, placement=(0, 1))
    assert simulated(plan, described).makespan_ns < simulated(slow, described).makespan_ns
    with pytest.raises(UserError, match="the cluster has 2 devices"):
        simulated(plan, cluster(num_nodes=2, devices_per_node=1))


@pytest.mark.parametrize("dp", [1, 2])
def test_a_plan_whose_sums_were_not_measured_is_refused(dp: int) -> None:
    """The exchange would take 0 s. A plan without replicas exchanges nothing."""
    measured = profile(num_ranks=2, collectives=(SUM,))
    plan = decide(problem_from_profile(job(ranks=2, global_batch=2, dp=dp), measured), QUICK).plan
    narrow = dataclasses.replace(plan, gradient_reduction_type=ReductionType.BF16)
    assert plan.dp == dp
    assert simulated(plan, measured).makespan_ns > 0
    if dp == 1:
        assert simulated(narrow, measured).makespan_ns == simulated(plan, measured).makespan_ns
        return
    with pytest.raises(UserError, match="profile: lacks sums of gradients in bf16, which the plan has"):
        simulated(narrow, measured)
    both = dataclasses.replace(
        measured, collectives=(SUM, dataclasses.replace(SUM, reduction_type=ReductionType.BF16, seconds=1.0))
    )
    assert simulated(narrow, both).makespan_ns > simulated(plan, both).makespan_ns + 500_000_000


def test_a_plan_whose_moments_were_not_measured_is_refused() -> None:
    measured = profile(num_ranks=2, optimizer=(OptimizerRecord(num_parameters=1000, seconds=1e-3, spread=0.0),))
    plan = decide(problem_from_profile(job(ranks=2, global_batch=2, pp=2), measured), QUICK).plan
    assert simulated(plan, measured).makespan_ns > 0
    with pytest.raises(UserError, match="profile: lacks times of the optimizer with moments in bf16"):
        simulated(dataclasses.replace(plan, moment_type=MomentType.BF16), measured)
