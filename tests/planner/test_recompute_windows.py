"""Recomputation in waits: what of it a step hides, and R that are moved into earlier waits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.recomputation import recompute_times
from penstock.core.schedule import Kind, ScheduleSpec, parse_schedule
from penstock.planner.candidate import Candidate
from penstock.planner.compile import program_of
from penstock.planner.decide import draft_plan
from penstock.planner.evaluate import Simulated, owners_of
from penstock.planner.order import RECOMPUTE, Order, actions_of, from_schedule, to_schedule
from penstock.planner.problem import Mesh, Problem
from penstock.planner.recompute_windows import TracedStep, exposed_shares, hidden_in_waits
from penstock.planner.remainder import remainder_slices
from penstock.planner.schedules.registry import BUILT_IN, SPLITTING, find
from penstock.planner.simulate import kernel
from penstock.planner.simulate.arrays import link_order, simulate_linked
from penstock.planner.simulate.costs import compute_table, uncontended
from penstock.planner.simulate.simulation import simulate
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, problem
from tests.support.remaking import random_remakes


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Problem, Candidate]:
    """Draw a schedule on two to four ranks that recomputes random operations of random units."""
    asked = problem(
        cluster(num_nodes=2, devices_per_node=8),
        model=draw(st.sampled_from([TINY_LLAMA, TINY_GPT2])),
        ranks=16,
        global_batch=12,
    )
    name, pp = draw(st.sampled_from(sorted(BUILT_IN))), draw(st.integers(2, 4))
    share = draw(st.integers(2, 6))
    mesh = Mesh.of_share(dp=1, tp=draw(st.sampled_from([1, 2])), pp=pp, microbatch=draw(st.integers(1, 2)), share=share)
    num_units, num_stages = asked.model.num_units, pp * find(name).per_rank(pp, None)
    cuts = draw(st.sets(st.integers(1, num_units - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), num_units)))
    slices = draw(st.sampled_from([(16,), (9, 7), (4, 4, 4, 4)]))
    remakes = random_remakes(asked.model, stages, draw(st.integers(0, 2**32)))
    return asked, Candidate(
        mesh=mesh,
        stages=stages,
        slices=slices,
        schedule=name,
        remainder_slices=remainder_slices(asked, mesh, slices),
        recompute=remakes if any(remakes) else (),
        recompute_ahead=draw(st.sampled_from([0, 0, 2])),
        recompute_inside=draw(st.booleans()),
    )


@settings(max_examples=20)
@given(candidates())
def test_exposed_recomputation_is_that_of_the_timeline(chosen: tuple[Problem, Candidate]) -> None:
    asked, candidate = chosen
    judge = Simulated(asked)
    evaluation = judge.evaluate(candidate, in_full=True)
    program = program_of(draft_plan(judge, evaluation))
    by_rank = recompute_times(simulate(program, judge.costs(candidate, owners_of(candidate))).timeline)
    shares = judge.exposed_shares(evaluation.candidate)
    if not any(candidate.recompute):
        assert not shares
        assert not by_rank
        return
    expected = [time.exposed_ns / time.total_ns if time.total_ns else 1.0 for time in by_rank]
    assert shares == pytest.approx(expected or [1.0] * candidate.mesh.pp)


def without_recomputation(order: Order) -> list[str]:
    return [str(action) for action in actions_of(order) if action.kind is not Kind.R]


@settings(max_examples=30)
@given(candidates(), st.floats(0, 1))
def test_recomputations_move_within_the_limit(chosen: tuple[Problem, Candidate], part: float) -> None:
    asked, candidate = chosen
    direct = dataclasses.replace(candidate, recompute_ahead=0)
    before = Simulated(asked).evaluate(direct, in_full=True)
    kept = Simulated(asked).evaluate(dataclasses.replace(direct, recompute=()), in_full=True)
    highest = max(before.peak_bytes) + int(part * max(0, max(kept.peak_bytes) - max(before.peak_bytes)))
    judge = Simulated(asked).limited(highest)
    hiding = judge.with_windows(before.candidate)
    if hiding is None:
        return
    after = judge.evaluate(hiding, in_full=True)
    assert after.step_ns < before.step_ns
    assert max(after.peak_bytes) <= highest
    orders = judge.order(before.candidate), judge.order(hiding)
    if candidate.recompute_inside:
        assert sorted(without_recomputation(orders[0])) == sorted(without_recomputation(orders[1]))
    else:
        assert sorted(map(str, actions_of(orders[0]))) == sorted(map(str, actions_of(orders[1])))
    if str(candidate.schedule) not in SPLITTING or candidate.recompute_inside:
        assert without_recomputation(orders[0]) == without_recomputation(orders[1])
    plan = draft_plan(judge, after)
    program = program_of(plan)  # proved
    assert simulate(program, judge.costs(hiding, owners_of(hiding))).makespan_ns == after.step_ns
    assert isinstance(hiding.schedule, ScheduleSpec)
    assert plan.schedule == hiding.schedule


ORDER = "0F0,0F1,0B0,0B1\n1F0,1F1,1R0,1B0,1R1,1B1\n"
"""Rank 1 waits for the input of its second forward, and for no gradient: it has the last stage."""


def traced(order: Order, held: int = 1) -> TracedStep:
    """F of the first stage takes 30 and of the second 10, B takes 10 and R 20, which makes 5 bytes: then ranks hold 6,
    else ``held``.
    """
    halves = [[5], [5]]
    compute = compute_table([[30], [10]], halves, halves)
    compute[RECOMPUTE] = [[0], [20]]
    linked = link_order(order, 4, width=kernel.ARRIVED + 1)
    costs = uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))
    costs = dataclasses.replace(costs, inside_ns=compute[RECOMPUTE])
    return TracedStep(
        order=order,
        linked=linked,
        makespan_ns=simulate_linked(order, linked, costs, receive_ahead=4).makespan_ns,
        levels=np.where(order.kinds == RECOMPUTE, 6, held).astype(np.int64),
        remade_bytes=np.array([[0], [5]]),
        remade_ns=compute[RECOMPUTE],
        inside_ns=compute[RECOMPUTE],
    )


def test_a_recomputation_moves_into_a_wait_for_an_input() -> None:
    """Rank 1 waits from 40 to 60. The R of the second micro-batch has no wait between its forward and its backward."""
    direct = from_schedule(parse_schedule(ORDER)[0])
    step = traced(direct)
    assert (step.makespan_ns, exposed_shares(step)) == (140, (1.0, 1.0))
    hidden = hidden_in_waits(direct, traced, np.array([100, 6]))
    assert hidden is not None
    rows = to_schedule(hidden.order).ranks
    assert [str(action) for action in rows[1]] == ["1F0.0", "1R0.0", "1F1.0", "1B0.0", "1R1.0", "1B1.0"]
    assert (hidden.makespan_ns, exposed_shares(hidden)) == (120, (1.0, 0.5))
    assert hidden_in_waits(direct, traced, np.array([100, 5])) is None


def test_backwards_that_recompute_inside_get_an_r_in_a_wait() -> None:
    """The same rank: an R of the first micro-batch has the wait before the second forward, the other none."""
    direct = from_schedule(parse_schedule("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")[0])
    step = traced(direct)
    assert (step.makespan_ns, exposed_shares(step)) == (140, (1.0, 1.0))
    hidden = hidden_in_waits(direct, traced, np.array([100, 6]))
    assert hidden is not None
    rows = to_schedule(hidden.order).ranks
    assert [str(action) for action in rows[1]] == ["1F0.0", "1R0.0", "1F1.0", "1B0.0", "1B1.0"]
    assert hidden.makespan_ns == 120
    without_memory = hidden_in_waits(direct, traced, np.array([100, 5]))
    assert without_memory is not None
    assert without_memory.order.same_as(direct)


def test_a_rank_without_memory_for_longer_keeps_its_recomputations() -> None:
    direct = from_schedule(parse_schedule(ORDER)[0])
    kept = hidden_in_waits(direct, lambda order: traced(order, held=2), np.array([100, 6]))
    assert kept is not None
    assert kept.order.same_as(direct)


def test_without_a_late_recomputation_nothing_moves() -> None:
    direct = from_schedule(parse_schedule("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n")[0])
    hidden = hidden_in_waits(direct, traced, np.array([100, 100]))
    assert hidden is not None
    assert hidden.order.same_as(direct)
