"""The simulator's rules one by one, on steps small enough to follow by hand."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.program import Reduction
from penstock.core.schedule import Group, Part, parse_schedule
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.lowering import lower
from penstock.planner.order import Order, from_schedule
from penstock.planner.schedules.registry import find
from penstock.planner.simulate import kernel
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.bound import lower_bound_ns
from penstock.planner.simulate.costs import (
    MILLION,
    Bucket,
    Costs,
    Hosts,
    InstructionCosts,
    compute_table,
    hosts,
    uncontended,
)
from penstock.planner.simulate.simulation import simulate
from tests.support.small_programs import one_line_each
from tests.support.step_costs import equal_costs, random_costs, shape


def parse(text: str) -> Order:
    schedule, _ = parse_schedule(text)
    return from_schedule(schedule)


def on_one_host(costs: Costs, factor_ppm: int, replicas: int = 1) -> Costs:
    num_ranks = costs.num_ranks
    nothing = (-1,) * num_ranks
    return dataclasses.replace(
        costs,
        slowdown_ppm=np.full_like(costs.compute_ns, factor_ppm),
        hosts=Hosts(host_of=(0,) * num_ranks, local_cards=nothing, network_cards=nothing, replicas=replicas),
    )


# Contention


def test_neighbours_slow_each_other_only_while_both_compute() -> None:
    """Ranks with actions of 30 and of 10; together each takes twice as long.

    Rank 0: F0 alone to 30; F1 with rank 1 to 70, then alone to 80; B0 with rank 1 to 120, alone to 130; B1 to 160.
    """
    compute = np.full((5, 2, 1), 30, dtype=np.int64)
    compute[:, 1] = 10
    alone = uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))
    order = parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert simulate_arrays(order, alone).makespan_ns == 120
    found = simulate_arrays(order, on_one_host(alone, 2 * MILLION))
    assert found.compute_ns.tolist() == [160, 80]
    assert found.makespan_ns == 160
    one_at_a_time = parse("0F0,0B0\n1F0,1B0\n")
    assert simulate_arrays(one_at_a_time, on_one_host(alone, 2 * MILLION)).makespan_ns == 80


def test_replicas_in_lockstep_count_as_neighbours() -> None:
    """A pipeline of one rank whose replica runs on the same host always computes together with it."""
    order = find("1f1b").generate(shape(1, 4, 1))
    costs = on_one_host(equal_costs(1, 1, 10, 10, 10), 2 * MILLION, replicas=2)
    assert simulate_arrays(order, costs).makespan_ns == 4 * (20 + 40)


def test_in_between_the_slowdown_is_linear_in_the_number_of_ranks() -> None:
    """Three ranks on a host, a factor of 3 with all of them: 2 with two."""
    order = find("gpipe").generate(shape(3, 2, 1))
    compute = np.zeros((5, 3, 1), dtype=np.int64)
    compute[0, :2, 0] = 60
    costs = on_one_host(uncontended(compute, np.zeros((2, 3, 1), dtype=np.int64)), 3 * MILLION)
    assert simulate_arrays(order, costs).makespan_ns == 60 + 120 + 60


# Transfers


def test_compute_continues_while_a_message_is_in_flight() -> None:
    costs = equal_costs(2, 1, 10, 10, 0, transfer=10)
    found = simulate_arrays(parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"), costs)
    assert found.makespan_ns == 10 + 10 + 10 + 10 + 10 + 10 + 10 + 10
    assert found.communication_ns.tolist() == [10, 20]


def test_blocking_ranks_do_not_compute_while_messages_are_in_flight() -> None:
    """Rank 0 sends after both forwards; rank 1 waits for the first, and spends the time of the second after it."""
    costs = dataclasses.replace(equal_costs(2, 1, 10, 10, 0, transfer=10), is_blocking=True)
    found = simulate_arrays(parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"), costs)
    assert found.makespan_ns == (10 + 10) + 10 + 10 + 10 + 10 + 10 + 10 + 10 + 10
    assert found.communication_ns.tolist() == [40, 40]


@pytest.mark.parametrize("transfer", [0, 1, 7, 10, 25])
def test_blocking_never_helps(transfer: int) -> None:
    order = find("gpipe").generate(shape(4, 6, 2))
    costs = equal_costs(4, 2, 10, 10, 10, transfer=transfer)
    blocked = simulate_arrays(order, dataclasses.replace(costs, is_blocking=True)).makespan_ns
    free = simulate_arrays(order, costs).makespan_ns
    assert free <= blocked <= free + 4 * transfer * 6 * 2 * 4
    assert (blocked == free) == (transfer == 0)


def test_cards_of_a_host_carry_messages_at_once() -> None:
    compute = np.zeros((5, 4, 1), dtype=np.int64)
    transfer = np.zeros((2, 4, 1), dtype=np.int64)
    transfer[0, :3, 0] = 10
    plain = uncontended(compute, transfer)
    order = find("gpipe").generate(shape(4, 3, 1))
    shared, apart = (
        simulate_arrays(order, dataclasses.replace(plain, hosts=hosts((0, 1, 0, 1), 1, cards)), receive_ahead=3)
        for cards in ((0, 1, 0, 1), (0, 1, 2, 3))
    )
    assert apart.makespan_ns == 10 * (3 + 2) < shared.makespan_ns


# Steps without a barrier


def unbarred(costs: Costs) -> Costs:
    return dataclasses.replace(costs, has_barrier=False)


def test_without_a_barrier_a_step_takes_the_longest_span_of_a_rank() -> None:
    """1F1B with equal actions: every rank but the first begins later and ends earlier, so rank 0 counts."""
    order, costs = find("1f1b").generate(shape(4, 8, 1)), equal_costs(4, 1, 10, 10, 10)
    assert simulate_arrays(order, unbarred(costs)).makespan_ns == simulate_arrays(order, costs).makespan_ns


def test_a_parallelogram_has_no_bubble_without_a_barrier() -> None:
    """The second rank begins one action later and ends one later: neither waits inside its span."""
    order = parse("0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n")
    compute = np.full((5, 2, 1), 10, dtype=np.int64)
    costs = uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))
    costs = dataclasses.replace(costs, reduce_ns={Group.NORM: (5, 5)}, optimizer_ns=(7, 7))
    norm = [Reduction(Group.NORM, (0, 1))]
    barred = simulate_arrays(order, costs, reductions=norm)
    free = simulate_arrays(order, unbarred(costs), reductions=norm)
    assert barred.makespan_ns == 10 + 9 * 10 + 5 + 7
    assert free.makespan_ns == 9 * 10 + 5 + 7
    assert free.bubble_ns.tolist() == [0, 0]


def test_without_a_barrier_no_rank_waits_for_anothers_end() -> None:
    order = parse("0F0\n1F0\n")
    compute = np.zeros((5, 2, 1), dtype=np.int64)
    compute[0, :, 0] = 10, 40
    costs = uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))
    norm = [Reduction(Group.NORM, (0, 1))]
    assert simulate_arrays(order, costs, reductions=norm).makespan_ns == 50
    free = simulate_arrays(order, unbarred(costs), reductions=norm)
    assert free.makespan_ns == 40
    assert free.bubble_ns.tolist() == [30, 0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_step_is_longer_without_a_barrier_nor_shorter_than_its_bound(name: str) -> None:
    order, costs = find(name).generate(shape(4, 6, 2)), equal_costs(4, 2, 10, 11, 12, transfer=3)
    norm = [Reduction(Group.NORM, (0, 1, 2, 3))]
    free = simulate_arrays(order, unbarred(costs), reductions=norm).makespan_ns
    assert free <= simulate_arrays(order, costs, reductions=norm).makespan_ns
    owners = tuple(range(4))
    assert free >= lower_bound_ns(unbarred(costs), 6, stage_ranks=owners, split=name == "zb-h1", reductions=norm)


def test_messages_of_one_channel_follow_each_other() -> None:
    compute = np.zeros((5, 2, 1), dtype=np.int64)
    compute[0, :, 0] = 1
    transfer = np.array([[[10], [0]], [[0], [0]]], dtype=np.int64)
    found = simulate_arrays(find("gpipe").generate(shape(2, 5, 1)), uncontended(compute, transfer), receive_ahead=5)
    assert found.makespan_ns == 1 + 5 * 10 + 1


def shared_card_step(host_of: tuple[int, ...]) -> int:
    """Ranks 0 to 3 with a message of 10 from every one to the next, all forwards at no cost."""
    compute = np.zeros((5, 4, 1), dtype=np.int64)
    transfer = np.zeros((2, 4, 1), dtype=np.int64)
    transfer[0, :3, 0] = 10
    costs = dataclasses.replace(uncontended(compute, transfer), hosts=hosts(host_of))
    return simulate_arrays(find("gpipe").generate(shape(4, 3, 1)), costs, receive_ahead=3).makespan_ns


def test_ranks_of_a_host_share_its_card_only_between_hosts() -> None:
    """Three messages over three hops: a pipeline of hops, unless two hops leave the same host by one card."""
    assert shared_card_step((0, 1, 2, 3)) == 10 * (3 + 2)
    assert shared_card_step((0, 0, 1, 1)) == 10 * (3 + 2)
    assert shared_card_step((0, 1, 0, 1)) > 10 * (3 + 2)


@pytest.mark.parametrize(
    ("down", "up", "expected"),
    [
        pytest.param((10_000, 1.0), (10_000, 1.0), (20_000, 20_000), id="each has half of the card"),
        pytest.param((30_000, 1.0), (10_000, 1.0), (40_000, 20_000), id="the longer has all of it in the end"),
        pytest.param((90_000, 0.1), (9_000, 1.0), (90_000, 10_000), id="a slow link leaves what it cannot use"),
        pytest.param((10_000, 0.4), (10_000, 0.6), (10_000, 10_000), id="there is enough for both"),
        pytest.param((10_000, 0.4), (10_000, 0.8), (10_000, 12_500), id="what needs less than half has all it needs"),
    ],
)
def test_messages_that_leave_by_one_card_share_it(
    down: tuple[int, float], up: tuple[int, float], expected: tuple[int, int]
) -> None:
    """The middle of three ranks sends F1 down and B0 up at once: how long each takes, given its time and part alone."""
    transfer, parts = np.zeros((2, 3, 1), dtype=np.int64), np.full((2, 2, 3), MILLION)
    for direction, (duration, part) in enumerate((down, up)):
        transfer[direction, 1], parts[0, direction, 1] = duration, round(part * MILLION)
    costs = dataclasses.replace(
        uncontended(np.zeros((5, 3, 1), dtype=np.int64), transfer), card_ppm=parts, hosts=hosts((0, 1, 2))
    )
    order = parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n")
    trace = simulate_arrays(order, costs, receive_ahead=2, traced=True).trace
    departed, arrived = (trace[4:8, column - kernel.REACHED] for column in (kernel.DEPARTED, kernel.ARRIVED))
    assert departed[1] == departed[2] == down[0]
    took = arrived - departed
    assert took[2] == pytest.approx(expected[0], abs=1)
    assert took[1] == pytest.approx(expected[1], abs=1)


def test_a_sender_waits_for_a_free_slot_at_its_receiver() -> None:
    """receive_ahead 1: the second message may only leave when the first is being consumed."""
    compute = np.zeros((5, 2, 1), dtype=np.int64)
    compute[0, :, 0] = (1, 10)
    costs = uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))
    order = find("gpipe").generate(shape(2, 3, 1))
    near = simulate_arrays(order, costs, receive_ahead=1, traced=True)
    far = simulate_arrays(order, costs, receive_ahead=3, traced=True)
    assert near.makespan_ns == far.makespan_ns == 31
    assert near.finish_ns.tolist() == [31, 31]
    assert near.trace[2, 2] == 2
    assert near.trace[2, 6] == 11
    assert far.trace[2, 6] == 3


def test_transport_instructions_take_their_time() -> None:
    """Two POST_RECVs at the start of rank 1, then WAIT_RECV and compute; rank 0 pays for SEND and for both waits."""
    instructions = InstructionCosts(post_ns=1, wait_receive_ns=2, send_ns=4, wait_send_ns=8)
    costs = dataclasses.replace(equal_costs(2, 1, 100, 100, 0), instructions=instructions)
    found = simulate_arrays(parse("0F0,0B0\n1F0,1B0\n"), costs)
    assert found.makespan_ns == (1 + 100 + 4) + (2 + 100) + (100 + 4) + (2 + 100 + 8)
    assert found.communication_ns.tolist() == [1 + 4 + 2 + 8, 1 + 2 + 4 + 8]


def test_waiting_is_bubble_until_the_message_leaves_and_communication_from_then_on() -> None:
    found = simulate_arrays(parse("0F0,0B0\n1F0,1B0\n"), equal_costs(2, 1, 10, 20, 0, transfer=3))
    assert found.compute_ns.tolist() == [30, 30]
    assert found.communication_ns.tolist() == [3, 3 + 3]
    assert found.bubble_ns.tolist() == [3 + 30, 10 + 20]


# The end of the step


def test_reductions_are_barriers_but_for_dp() -> None:
    """With dp each rank joins its own peers elsewhere; the norm joins all; then everyone steps."""
    costs = dataclasses.replace(
        equal_costs(2, 1, 10, 10, 0),
        reduce_ns={Group.DP: (100, 1), Group.TIE: (5, 7), Group.NORM: (2, 3)},
        optimizer_ns=(4, 9),
    )
    order = parse("0F0,0B0\n1F0,1B0\n")
    everyone = (0, 1)
    found = simulate_arrays(order, costs, reductions=[Reduction(Group.DP, everyone), Reduction(Group.NORM, everyone)])
    assert found.finish_ns.tolist() == [40, 30]
    assert found.makespan_ns == 40 + 100 + 3 + 9
    assert found.reduction_ns.tolist() == [103, 4]
    tied = simulate_arrays(order, costs, reductions=[Reduction(Group.TIE, everyone)])
    assert tied.makespan_ns == 40 + 7 + 9
    assert tied.step_ns.tolist() == [47, 47]


def test_a_reduction_over_replicas_runs_next_to_compute() -> None:
    """Stage 2 is complete at 50, stage 0 at 80; the second reduction of a rank waits for the first."""
    costs = dataclasses.replace(
        uncontended(compute_table(*np.full((3, 4, 1), 10)), np.zeros((2, 4, 1), dtype=np.int64), num_ranks=2),
        reduce_ns={Group.DP: (4, 0, 35, 0), Group.NORM: (2, 2)},
    )
    order = parse("0F0,2F0,2I0,2W0,0I0,0W0\n1F0,3F0,3B0,1B0\n")
    both = [Reduction(Group.DP, (0, 1)), Reduction(Group.NORM, (0, 1))]
    found = simulate_arrays(order, costs, reductions=both)
    first, second = [each for each in found.reductions if (each.group, each.rank) == (Group.DP, 0)]
    complete = int(found.finish_ns[0])
    assert (first.stage, second.stage) == (2, 0)
    assert first.begin_ns < complete < first.over_ns
    assert (second.begin_ns, second.over_ns) == (first.over_ns, first.over_ns + 4)
    assert found.reduction_ns.tolist() == [second.over_ns - complete + 2, 2]
    assert found.makespan_ns == second.over_ns + 2
    late = simulate_arrays(order, costs, reductions=both, late_receives=True)
    assert late.makespan_ns == int(late.finish_ns[0]) + 35 + 4 + 2


def test_a_reduction_over_shards_holds_up_its_rank_and_lets_that_over_replicas_start() -> None:
    """The reduction of stage 2 runs while the rank waits for a gradient; that of stage 0 follows all compute."""
    costs = dataclasses.replace(
        uncontended(compute_table(*np.full((3, 4, 1), 10)), np.zeros((2, 4, 1), dtype=np.int64), num_ranks=2),
        reduce_ns={Group.TP: (3, 0, 5, 0), Group.DP: (4, 0, 35, 0), Group.NORM: (2, 2)},
    )
    order = parse("0F0,2F0,2I0,2W0,0I0,0W0\n1F0,3F0,3B0,1B0\n")
    groups = [Reduction(group, (0, 1)) for group in (Group.DP, Group.NORM)]
    alone = simulate_arrays(order, costs, reductions=groups)
    found = simulate_arrays(order, costs, reductions=[Reduction(Group.TP, (0, 1)), *groups])
    spans = {(r.group, r.stage): (r.begin_ns, r.over_ns) for r in found.reductions if r.rank == 0}
    complete = int(alone.reductions[0].begin_ns)
    assert spans[Group.TP, 2] == (complete, complete + 5)
    assert spans[Group.DP, 2] == (complete + 5, complete + 5 + 35)
    finish = int(found.finish_ns[0])
    assert finish == int(alone.finish_ns[0])
    assert spans[Group.TP, 0] == (finish, finish + 3)
    assert found.communication_ns.tolist() == alone.communication_ns.tolist()
    assert found.reduction_ns.tolist()[0] == 5 + 3 + (found.makespan_ns - 2 - finish - 3) + 2
    late = simulate_arrays(order, costs, reductions=[Reduction(Group.TP, (0, 1)), *groups], late_receives=True)
    assert late.makespan_ns == int(late.finish_ns[0]) + 3 + 5 + 35 + 2


# The begin of the step


def with_gathers(costs: Costs, whole_ns: int, *of_buckets_ns: int) -> Costs:
    """With gathers of every stage, as a whole and in equal buckets, from its first units to its last."""
    num_buckets = len(of_buckets_ns)
    shares = [MILLION * (number + 1) // num_buckets for number in range(num_buckets)]
    buckets = tuple(
        Bucket(
            part=Part(first, first + 1),
            done_ppm=(share, share, share),
            reduce_ns={Group.DP: 0},
            gather_ns=of_buckets_ns[first],
        )
        for first, share in zip(reversed(range(num_buckets)), shares, strict=True)
    )
    num_stages = costs.num_stages
    return dataclasses.replace(costs, gather_ns=(whole_ns,) * num_stages, buckets=(buckets,) * num_stages)


REPLICAS = [Reduction(Group.DP, (0, 1)), Reduction(Group.NORM, (0, 1))]


@pytest.mark.parametrize("has_barrier", [True, False])
@pytest.mark.parametrize(
    ("gathers_ns", "waited_ns"),
    [
        pytest.param((16,), 16, id="of the stage: exposed"),
        pytest.param((8, 8), 8 + 3, id="of buckets: next to half of a forward each"),
        pytest.param((3, 3), 3, id="the second is shorter than half of a forward"),
        pytest.param((4, 4, 4), 4 + 1, id="a part of 3 ns and one of 4 between gathers of 4 and 4"),
        pytest.param((0, 20), 20 - 5, id="only the second takes time"),
    ],
)
def test_parts_of_a_first_forward_wait_for_their_gathers(
    gathers_ns: tuple[int, ...], waited_ns: int, has_barrier: bool
) -> None:
    """A rank alone, whose next step begins when this one ends, with a barrier or without."""
    plain = dataclasses.replace(equal_costs(1, 1, 10, 10, 10), has_barrier=has_barrier)
    order, alone = parse("0F0,0F1,0B0,0B1\n"), [Reduction(Group.DP, (0,)), Reduction(Group.NORM, (0,))]
    costs = with_gathers(plain, sum(gathers_ns), *gathers_ns)
    step = simulate_arrays(order, costs, reductions=alone)
    assert step.makespan_ns == 60 + waited_ns
    assert step.reduction_ns.tolist() == [waited_ns if has_barrier else 0]
    assert step.communication_ns.tolist() == [0]
    late = simulate_arrays(order, costs, reductions=alone, late_receives=True)
    assert late.makespan_ns == 60 + sum(gathers_ns)
    for times in (step, late):
        assert times.makespan_ns >= lower_bound_ns(costs, 2, stage_ranks=(0,), split=False, reductions=alone)


def test_a_rank_gathers_while_it_waits_for_its_first_message() -> None:
    """Rank 0 waits for its first bucket, rank 1 for a message that comes after its buckets."""
    costs = with_gathers(equal_costs(2, 1, 10, 10, 10), 8, 4, 4)
    step = simulate_arrays(parse("0F0,0B0\n1F0,1B0\n"), costs, reductions=REPLICAS)
    assert step.makespan_ns == 4 + 60
    assert step.reduction_ns.tolist() == [4, 0]
    assert step.bubble_ns.tolist() == [30, 34]


def test_without_a_barrier_gathers_are_part_of_a_ranks_span() -> None:
    """Neither rank waits inside its span, so it waits for its first bucket, and for the rest of its second."""
    order = parse("0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n")
    compute = np.full((5, 2, 1), 10, dtype=np.int64)
    costs = with_gathers(unbarred(uncontended(compute, np.zeros((2, 2, 1), dtype=np.int64))), 11, 4, 7)
    step = simulate_arrays(order, costs, reductions=REPLICAS)
    assert step.makespan_ns == 9 * 10 + 4 + (7 - 5)
    assert step.makespan_ns >= lower_bound_ns(costs, 3, stage_ranks=(0, 1), split=True, reductions=REPLICAS)


def test_the_timeline_shows_every_kind_of_event() -> None:
    schedule, _ = parse_schedule("0F0,0B0\n1F0,1B0\n")
    program = lower(schedule, one_line_each, slices=(1,), receive_ahead=1, dp=False)
    costs = dataclasses.replace(
        equal_costs(2, 1, 10, 20, 0, transfer=3), reduce_ns={Group.NORM: (2, 2)}, optimizer_ns=(4, 4)
    )
    found = simulate(program, costs, static_bytes=(1000, 2000))
    assert isinstance(found.timeline, Timeline)
    assert found.timeline.source is Source.SIMULATED
    assert [event for event in found.timeline.events if event.rank == 0] == [
        Event(0, Activity.COMPUTE, "0F0.0", 0, 10),
        Event(0, Activity.TRANSFER, "0SEND_F0.0", 10, 13),
        Event(0, Activity.WAIT, "0WAIT_RECV_B0.0", 10, 46),
        Event(0, Activity.COMPUTE, "0B0.0", 46, 66),
        Event(0, Activity.TRANSFER, "0START_REDUCE(norm)", 66, 68),
        Event(0, Activity.REDUCE, "0WAIT_REDUCE(norm)", 66, 68),
        Event(0, Activity.STEP, "0STEP", 68, 72),
    ]
    assert found.makespan_ns == found.timeline.step_ns == 72
    reduce_of_1 = next(e for e in found.timeline.events if e.rank == 1 and e.activity is Activity.REDUCE)
    assert (reduce_of_1.start_ns, reduce_of_1.stop_ns) == (46, 68)
    assert Timeline.from_manifest(found.timeline.to_manifest()) == found.timeline
    slots_of_0 = ["a", "l", "kv", "y", "g_in", "dkv", "w"]
    slots_of_1 = ["x", "a", "l", "kv", "h", "dkv", "w", "g_out"]
    assert found.peak_bytes == (1000 + 64 * len(slots_of_0), 2000 + 64 * len(slots_of_1))


# What holds whatever the costs


def test_an_order_that_cannot_run_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"rank 0: 0B0\.0 never gets what it needs") as refused:
        simulate_arrays(parse("0B0,0F0\n1F0,1B0\n"), equal_costs(2, 1, 1, 1, 1))
    assert "order the actions" in refused.value.remedy


def test_costs_of_another_pipeline_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages on 3 ranks for 2 stages"):
        simulate_arrays(find("gpipe").generate(shape(2, 1, 1)), equal_costs(3, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="disagree about their shape"):
        uncontended(np.ones((5, 2, 1), dtype=np.int64), np.ones((2, 3, 1), dtype=np.int64))


def test_negative_times_are_refused() -> None:
    with pytest.raises(UserError, match="negative time"):
        uncontended(-np.ones((5, 2, 1), dtype=np.int64), np.ones((2, 2, 1), dtype=np.int64))


def test_a_time_beyond_all_sense_is_refused() -> None:
    with pytest.raises(UserError, match="over 1,000 seconds"):
        uncontended(np.full((5, 2, 1), 10**13, dtype=np.int64), np.ones((2, 2, 1), dtype=np.int64))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_equal_inputs_give_equal_times(seed: int) -> None:
    rng = random.Random(seed)
    order = find(rng.choice(["gpipe", "1f1b", "zb-h1"])).generate(shape(rng.randint(1, 5), 3, 2))
    costs = random_costs(rng, order.num_ranks, order.num_stages, 2)
    first, second = (simulate_arrays(order, costs, traced=True) for _ in range(2))
    assert np.array_equal(first.trace, second.trace)
    assert first.makespan_ns == second.makespan_ns


@settings(max_examples=100)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(0, 2**32))
def test_without_shared_parts_nothing_gets_faster_by_being_slower(name: str, seed: int) -> None:
    """A fixed order without contention and cards is a longest path: longer work and slower links never shorten it."""
    rng = np.random.default_rng(seed)
    num_ranks, num_slices = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    order = find(name).generate(shape(num_ranks, 4, num_slices))
    compute = rng.integers(0, 20, (5, num_ranks, num_slices))
    transfer = rng.integers(0, 20, (2, num_ranks, num_slices))
    slower = uncontended(
        compute + rng.integers(0, 2, compute.shape) * 5, transfer + rng.integers(0, 2, transfer.shape) * 5
    )
    ahead = int(rng.integers(1, 4))
    before = simulate_arrays(order, uncontended(compute, transfer), receive_ahead=ahead).makespan_ns
    assert before <= simulate_arrays(order, slower, receive_ahead=ahead).makespan_ns
    assert before >= simulate_arrays(order, uncontended(compute, transfer), receive_ahead=ahead + 1).makespan_ns
