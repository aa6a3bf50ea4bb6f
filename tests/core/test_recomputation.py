"""Hidden and exposed recomputation: by hand, and against steps that are simulated without it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.recomputation import RecomputeTime, over_ranks, recompute_times
from penstock.core.schedule import parse_schedule
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.lowering import lower
from penstock.planner.order import RECOMPUTE
from penstock.planner.simulate.costs import Costs
from penstock.planner.simulate.simulation import simulate
from tests.support.step_costs import equal_costs, random_costs
from tests.support.timelines import timelines


def timeline(*events: Event, num_ranks: int = 2) -> Timeline:
    step_ns = max(event.stop_ns for event in events)
    return Timeline(source=Source.MEASURED, num_ranks=num_ranks, step_ns=step_ns, events=events)


def compute(rank: int, action: str, start: int, stop: int) -> Event:
    return Event(rank, Activity.COMPUTE, action, start, stop)


def hand_made(arrival: int, *, wait: int = 0, backward: str = "0B0.0") -> Timeline:
    """R from 100 to 110 on rank 0, whose gradient comes at ``arrival``; its rank then waits for ``wait``."""
    return timeline(
        compute(0, "0F0.0", 0, 20),
        compute(1, "1F0.0", 30, 50),
        compute(1, "1B0.0", 50, 80),
        Event(1, Activity.TRANSFER, "1SEND_B0.0", 80, arrival),
        compute(0, "0R0.0", 100, 110),
        Event(0, Activity.WAIT, "0WAIT_RECV_B0.0", 110, 110 + wait),
        compute(0, backward, 110 + wait, 140 + wait),
    )


@pytest.mark.parametrize(("arrival", "wait", "hidden"), [(107, 0, 7), (112, 2, 10), (90, 0, 0), (100, 0, 0)])
@pytest.mark.parametrize("backward", ["0B0.0", "0I0.0", "(0B0.0;0F1.0)OVERLAP_F_B"])
def test_r_is_hidden_until_its_gradient_arrives(arrival: int, wait: int, hidden: int, backward: str) -> None:
    found = recompute_times(hand_made(arrival, wait=wait, backward=backward))
    assert found == (RecomputeTime(hidden_ns=hidden, exposed_ns=10 - hidden), RecomputeTime())


def test_a_message_without_a_send_that_took_time_arrives_when_it_was_made() -> None:
    events = [event for event in hand_made(90).events if event.activity is not Activity.TRANSFER]
    late = [replace(event, stop_ns=106) if event.action == "1B0.0" else event for event in events]
    assert recompute_times(timeline(*events))[0].hidden_ns == 0
    assert recompute_times(timeline(*late))[0].hidden_ns == 6


def test_the_last_stage_hides_nothing_although_its_rank_waits_afterwards() -> None:
    """Its gradient is sent later by all of R, whatever the rank does then."""
    found = recompute_times(
        timeline(
            compute(0, "0F0.0", 0, 10),
            compute(1, "1F0.0", 10, 20),
            compute(1, "1R0.0", 20, 25),
            compute(1, "1B0.0", 25, 35),
            compute(0, "0F1.0", 30, 50),
            Event(1, Activity.WAIT, "1WAIT_RECV_F1.0", 35, 50),
            compute(1, "1F1.0", 50, 60),
        )
    )
    assert found[1] == RecomputeTime(exposed_ns=5)


def test_the_last_stage_hides_what_runs_before_a_wait_for_the_next_forward() -> None:
    """R of one micro-batch before F of the next, which comes at 50: the rank would have waited for that from 20 on."""
    found = recompute_times(
        timeline(
            compute(0, "0F0.0", 0, 10),
            compute(1, "1F0.0", 10, 20),
            compute(1, "1R0.0", 20, 45),
            compute(0, "0F1.0", 10, 40),
            compute(1, "1F1.0", 45, 55),
            compute(1, "1B0.0", 55, 60),
        )
    )
    assert found[1] == RecomputeTime(hidden_ns=20, exposed_ns=5)


def test_a_lead_lasts_over_weight_gradients_and_backwards_that_send_nothing() -> None:
    """Without both R, I of slice 1 begins at 80 as it does, and of slice 0 at 100, not 105: 12 of 17 are hidden."""
    found = recompute_times(
        timeline(
            compute(0, "0F0.0", 0, 10),
            compute(0, "0F0.1", 10, 20),
            compute(1, "1F0.0", 10, 20),
            compute(1, "1F0.1", 20, 30),
            compute(1, "1B0.1", 30, 80),
            compute(1, "1B0.0", 80, 97),
            compute(0, "0R0.1", 20, 27),
            Event(0, Activity.WAIT, "0WAIT_RECV_B0.1", 27, 80),
            compute(0, "0I0.1", 80, 88),
            compute(0, "0R0.0", 88, 98),
            compute(0, "0W0.1", 98, 105),
            compute(0, "0I0.0", 105, 110),
        )
    )
    assert found[0] == RecomputeTime(hidden_ns=7 + 2, exposed_ns=8)


def test_stages_on_one_rank_wait_for_no_message_of_each_other() -> None:
    found = recompute_times(
        timeline(
            compute(0, "0F0.0", 0, 10),
            compute(0, "1F0.0", 10, 20),
            compute(0, "1B0.0", 20, 40),
            compute(0, "0R0.0", 40, 47),
            compute(0, "0B0.0", 47, 60),
            num_ranks=1,
        )
    )
    assert found == (RecomputeTime(exposed_ns=7),)


def test_hidden_time_depends_on_the_same_replica_and_shard_only() -> None:
    """Two replicas of a pipeline of two: the second one's gradient is later by 5."""
    one, other = hand_made(103), hand_made(108)
    moved = (replace(event, rank=event.rank + 2) for event in other.events)
    found = recompute_times(timeline(*one.events, *moved, num_ranks=4))
    assert [each.hidden_ns for each in found] == [3, 0, 8, 0]
    shards = [replace(event, rank=2 * event.rank + shard) for shard in range(2) for event in (one, other)[shard].events]
    assert [each.hidden_ns for each in recompute_times(timeline(*shards, num_ranks=4))] == [3, 8, 0, 0]


def test_a_step_without_recomputation_has_no_summary() -> None:
    pair = compute(0, "(0F1.0;0B0.0)OVERLAP_F_B", 0, 5)
    assert recompute_times(timeline(compute(0, "0F0.0", 0, 5), pair)) == ()
    assert over_ranks(()) == RecomputeTime()
    assert RecomputeTime().hidden_share == 0


@given(timelines())
def test_any_timeline_is_summed_up(step: Timeline) -> None:
    found = recompute_times(step)
    spent = [
        sum(e.duration_ns for e in step.events if e.rank == rank and e.action == "1R0.0") for rank in range(len(found))
    ]
    assert [each.total_ns for each in found] == spent
    assert all(each.hidden_ns >= 0 and each.exposed_ns >= 0 for each in found)


def flush(num_slices: int, num_microbatches: int, split: bool) -> str:
    """Two ranks of a stage each: all forwards, then all backwards, those of the first rank with an R each."""
    cells = [f"{m}.{s}" for m in range(num_microbatches) for s in range(num_slices)]
    back = [f"{m}.{s}" for m in range(num_microbatches) for s in reversed(range(num_slices))]
    kinds = ("I", "W") if split else ("B",)
    first = [*(f"0F{cell}" for cell in cells), *(f"0{kind}{cell}" for cell in back for kind in ("R", *kinds))]
    second = [*(f"1F{cell}" for cell in cells), *(f"1B{cell}" for cell in back)]
    return "\n".join((",".join(first), ",".join(second)))


def simulated(text: str, costs: Costs, num_slices: int) -> Timeline:
    program = lower(
        parse_schedule(text)[0],
        lambda kind, stage, tokens: 64,
        slices=(1,) * num_slices,
        receive_ahead=64,
        dp=False,
    )
    return simulate(program, costs).timeline


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([0, 40, 4000]))
def test_exposed_recomputation_is_the_time_by_which_the_step_is_longer(
    seed: int, num_slices: int, num_microbatches: int, split: bool, delay: int
) -> None:
    """Nothing waits for the backwards of the first rank, so its R lengthens the step by what is exposed alone."""
    rng = random.Random(seed)
    costs = replace(
        equal_costs(2, num_slices, 1, 1, 1),
        compute_ns=random_costs(rng, 2, 2, num_slices).compute_ns,
        transfer_ns=np.full((2, 2, num_slices), delay),
    )
    text = flush(num_slices, num_microbatches, split)
    found = simulated(text, costs, num_slices)
    free = costs.compute_ns.copy()
    free[RECOMPUTE] = 0
    without = simulated(text, replace(costs, compute_ns=free), num_slices)
    longer, shorter = (max(e.stop_ns for e in each.events if e.rank == 0) for each in (found, without))
    times = recompute_times(found)
    assert over_ranks(times).total_ns == sum(e.duration_ns for e in found.events if e.action.startswith("0R"))
    assert (times[0].exposed_ns if times else 0) == longer - shorter


LOOPED = "0F0,2F0,0F1,2F1,2R0,2B0,2R1,2B1,0R0,0B0,0R1,0B1\n1F0,3F0,1F1,3F1,3R0,3B0,3R1,3B1,1R0,1B0,1R1,1B1\n"
IN_PARTS = "0F0,0R0[0],0F1,0R0[1:3],0B0,0R1[0:3],0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n"


@pytest.mark.parametrize("delay", [0, 25])
@pytest.mark.parametrize("text", [LOOPED, IN_PARTS])
@given(seed=st.integers(0, 2**32))
def test_hidden_and_exposed_time_sum_to_all_recomputation(text: str, delay: int, seed: int) -> None:
    num_stages = 4 if text is LOOPED else 2
    costs = random_costs(random.Random(seed), 2, num_stages, 1)
    found = simulated(text, replace(costs, transfer_ns=costs.transfer_ns + delay), 1)
    for rank, time in enumerate(recompute_times(found)):
        spent = sum(e.duration_ns for e in found.events if e.rank == rank and "R" in e.action and "_" not in e.action)
        assert time.total_ns == spent
        assert 0 <= time.hidden_ns <= spent
