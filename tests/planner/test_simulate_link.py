"""The compiled numbering of messages and placing of waits against the passes of lowering."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.program import Channel, Instruction, Program
from penstock.core.schedule import Action, Kind, Schedule, flatten
from penstock.planner.lowering import lower
from penstock.planner.order import Order, actions_of, from_schedule
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.schedules.registry import BUILT_IN, find
from penstock.planner.simulate import link
from penstock.planner.simulate.arrays import Linked, link_order
from penstock.planner.simulate.channels import channels_of
from tests.support.step_costs import shape
from tests.support.strategies import Case, cases, schedules

RELEASES = {Kind.WAIT_SEND_F, Kind.WAIT_SEND_B}
RECEIVES = {Kind.WAIT_RECV_F, Kind.WAIT_RECV_B}
SENDS = {Kind.SEND_F, Kind.SEND_B}


def named_channels(linked: Linked, program: Program) -> list[Channel]:
    pairs = zip(linked.channels.sources.tolist(), linked.channels.targets.tolist(), strict=True)
    assert list(pairs) == [(channel.source, channel.target) for channel in program.channels]
    return list(program.channels)


@settings(max_examples=150)
@given(st.booleans().flatmap(lambda pairing: st.tuples(st.just(pairing), schedules(pairing=pairing))))
def test_rounds_are_those_of_the_first_pass(drawn: tuple[bool, Schedule]) -> None:
    keep_pairs, schedule = drawn
    ordered = find_rounds(schedule, keep_pairs=keep_pairs)
    linked = link_order(from_schedule(schedule, keep_pairs=keep_pairs), receive_ahead=2)
    rounds = [
        [at for action, at in zip(*each, strict=True) for _ in flatten((action,))]
        for each in zip(ordered.rows, ordered.rounds, strict=True)
    ]
    assert linked.actions[:, link.ROUND].tolist() == [at for row in rounds for at in row]


def without_later_parts(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions with one for a first forward or last backward that is in the parts of its buckets."""
    begun: set[Action] = set()
    for instruction in instructions:
        whole = replace(instruction.action, part=None)
        if instruction.action.kind in (Kind.F, Kind.B, Kind.W) and instruction.action.part is not None:
            if whole in begun:
                continue
            begun.add(whole)
        yield instruction


@settings(max_examples=150)
@given(cases())
def test_messages_and_waits_stand_where_lowering_puts_them(case: Case) -> None:
    program = case.lower()
    order = case.order
    linked = link_order(order, case.receive_ahead, case.late_receives)
    channels = named_channels(linked, program)
    waits: list[tuple[Channel, int]] = []
    for rank in program.ranks:
        released: list[tuple[Channel, int]] = []
        position = int(order.offsets[rank.rank])
        needed: dict[Channel, int] = {}
        computed = range(0)
        for instruction in without_later_parts(rank.instructions):
            channel = instruction.channel
            if channel is not None and instruction.action.kind in RECEIVES:
                needed[channel] = instruction.sequence
            elif channel is not None and instruction.action.kind in SENDS:
                number = channels.index(channel)
                sender = next(at for at in computed if linked.actions[at, link.SENDS_CHANNEL] == number)
                assert linked.actions[sender, link.SENDS_NUMBER] == instruction.sequence
                assert linked.messages[linked.first_messages[number] + instruction.sequence][0] == sender
            elif channel is not None and instruction.action.kind in RELEASES:
                released.append((channel, instruction.sequence))
            elif instruction.action.is_compute:
                if position > order.offsets[rank.rank]:
                    before = linked.first_waits[rank.rank]
                    assert linked.actions[position - 1, link.STOP_WAIT] - before == len(released)
                computed = range(position, position + len(instruction.action.children or (instruction.action,)))
                for row in linked.actions[computed]:
                    if row[link.NEEDS_CHANNEL] >= 0:
                        assert row[link.NEEDS_NUMBER] <= needed[channels[row[link.NEEDS_CHANNEL]]]
                position = computed.stop
        waits += released
    counts: defaultdict[Channel, int] = defaultdict(int)
    for (channel, number), place in zip(waits, linked.messages[:, link.AWAITED].tolist(), strict=True):
        assert channels[place] == channel
        assert counts[channel] == number
        counts[channel] += 1


PUT_OFF = {("zbv", 1), ("interleaved-1f1b", 1), ("interleaved-1f1b", 2)}


@pytest.mark.parametrize(
    ("name", "receive_ahead"), [pair for pair in product(BUILT_IN, (1, 2, 4)) if pair not in PUT_OFF]
)
def test_generated_orders_wait_directly_before_their_next_send(name: str, receive_ahead: int) -> None:
    """Lowering may postpone a wait that could block forever. In generated schedules no wait could, except with several
    stages per rank and few messages in flight.
    """
    order = find(name).generate(shape(4, 5, 3, name))
    linked = link_order(order, receive_ahead)
    channels, stops = linked.actions[:, link.SENDS_CHANNEL], linked.actions[:, link.STOP_WAIT]
    for rank in range(order.num_ranks):
        first = linked.first_waits[rank]
        for index in range(order.offsets[rank], order.offsets[rank + 1]):
            sent = channels[order.offsets[rank] : index + 1]
            awaited = linked.messages[first : stops[index], link.AWAITED]
            for channel in np.flatnonzero(linked.channels.sources == rank):
                in_flight = int((sent == channel).sum()) - int((awaited == channel).sum())
                assert in_flight <= receive_ahead


def test_channels_of_a_straight_pipeline() -> None:
    found = channels_of([0, 1, 2])
    pairs = list(zip(found.sources.tolist(), found.targets.tolist(), strict=True))
    assert pairs == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert found.sends.tolist() == [[0, 2, -1], [-1, 1, 3]]
    assert found.receives.tolist() == [[-1, 0, 2], [1, 3, -1]]


def test_stages_on_one_rank_hand_over_without_a_channel() -> None:
    """A V of four stages on two ranks: stages 1 and 2 are neighbours on rank 1, and both legs share their channels."""
    found = channels_of([0, 1, 1, 0])
    pairs = list(zip(found.sources.tolist(), found.targets.tolist(), strict=True))
    assert pairs == [(0, 1), (0, 1), (1, 0), (1, 0)]
    assert (found.sends[0, 1], found.receives[0, 2]) == (-1, -1)


def test_one_rank_needs_no_channel() -> None:
    assert channels_of([0]).sources.size == 0
    linked = link_order(find("zb-h1").generate(shape(1, 2, 2)), receive_ahead=2)
    assert len(linked.messages) == 0
    assert linked.actions[:, link.ROUND].tolist() == list(range(1, 13))


@settings(max_examples=80)
@given(schedules(), st.data())
def test_an_order_that_lacks_a_producer_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    """Dropping the F or the gradient of a stage whose neighbour needs it."""
    order = from_schedule(schedule)
    needed = [i for i, action in enumerate(actions_of(order)) if _is_needed(action, schedule)]
    if not needed:
        return
    dropped = data.draw(st.sampled_from(needed))
    with pytest.raises(UserError, match="never gets what it needs"):
        link_order(_without(order, dropped), receive_ahead=2)


def _is_needed(action: Action, schedule: Schedule) -> bool:
    if action.kind is Kind.F:
        return action.stage + 1 < schedule.num_stages
    return action.kind in (Kind.B, Kind.I) and action.stage > 0


def _without(order: Order, index: int) -> Order:
    keep = np.arange(order.num_actions) != index
    offsets = order.offsets - (order.offsets > index)
    return Order(
        offsets=offsets,
        kinds=order.kinds[keep],
        stages=order.stages[keep],
        microbatches=order.microbatches[keep],
        slices=order.slices[keep],
        num_stages=order.num_stages,
        num_microbatches=order.num_microbatches,
        num_slices=order.num_slices,
    )


def test_lowering_refuses_the_same_orders() -> None:
    backwards_first = Schedule(
        ranks=((Action(Kind.B, 0, 0, 0), Action(Kind.F, 0, 0, 0)), (Action(Kind.F, 1, 0, 0), Action(Kind.B, 1, 0, 0))),
        num_stages=2,
        num_microbatches=1,
        num_slices=1,
    )
    with pytest.raises(UserError):
        lower(backwards_first, lambda kind, stage, tokens: 64, slices=(1,), receive_ahead=2, dp=False)
    with pytest.raises(UserError, match=r"rank 0: 0B0\.0 never gets"):
        link_order(from_schedule(backwards_first), receive_ahead=2)
