"""Lowering: where transfers stand, which slots live from where to where, and which schedules are refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ProgramError, UserError
from penstock.core.invariants import prove
from penstock.core.layout import Precision, SlotKind, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.core.program import Program, RankProgram
from penstock.core.residency import NUM_PLACES
from penstock.core.schedule import Action, Group, Kind, Part, flatten, without_overlaps
from penstock.planner.compile import program_of
from penstock.planner.lowering import lower, slot_sizes
from penstock.planner.schedules.registry import BUILT_IN
from tests.support.interpreter import expected_answer, interpret
from tests.support.small_plans import small_plan
from tests.support.small_programs import (
    SPLIT_BACKWARD,
    TWO_MICROBATCHES,
    actions,
    lowered,
    moved,
    one_line_each,
    schedule_of,
    slot_lives,
)
from tests.support.strategies import Case, cases
from tests.support.toy_model import toy_model

DESIGN_EXAMPLE_RANK_1 = """\
1POST_RECV_F0.0      +x@1:0.0 >x@1:0.0 [0->1F #0]
1POST_RECV_F0.1      +x@1:0.1 >x@1:0.1 [0->1F #1]
1WAIT_RECV_F0.0      [0->1F #0]
1F0.0                +kv@1:0 +a@1:0.0 +l@1:0.0 +h@1:0.0 <x@1:0.0 >kv@1:0 >a@1:0.0 >l@1:0.0 >h@1:0.0
1WAIT_RECV_F0.1      [0->1F #1]
1F0.1                +a@1:0.1 +l@1:0.1 +h@1:0.1 <x@1:0.1 <kv@1:0 >kv@1:0 >a@1:0.1 >l@1:0.1 >h@1:0.1
1I0.1                +dkv@1:0 +w@1:0.1 +g_out@1:0.1 \
<x@1:0.1 <a@1:0.1 <l@1:0.1 <kv@1:0 <h@1:0.1 >dkv@1:0 >w@1:0.1 >g_out@1:0.1
1FREE0.1             -x@1:0.1 -a@1:0.1 -h@1:0.1
1SEND_B0.1           <g_out@1:0.1 [1->0B #0]
1I0.0                +w@1:0.0 +g_out@1:0.0 \
<x@1:0.0 <a@1:0.0 <l@1:0.0 <kv@1:0 <dkv@1:0 <h@1:0.0 >dkv@1:0 >w@1:0.0 >g_out@1:0.0
1FREE0.0             -x@1:0.0 -a@1:0.0 -kv@1:0 -dkv@1:0 -h@1:0.0
1SEND_B0.0           <g_out@1:0.0 [1->0B #1]
1W0.1                <l@1:0.1 <w@1:0.1
1FREE0.1             -l@1:0.1 -w@1:0.1
1W0.0                <l@1:0.0 <w@1:0.0
1FREE0.0             -l@1:0.0 -w@1:0.0
1WAIT_SEND_B0.1      [1->0B #0]
1FREE0.1             -g_out@1:0.1
1WAIT_SEND_B0.0      [1->0B #1]
1FREE0.0             -g_out@1:0.0
1START_REDUCE(norm)
1WAIT_REDUCE(norm)
1STEP
"""


def test_the_example_of_two_ranks_and_two_slices() -> None:
    program = lowered(SPLIT_BACKWARD)
    assert "\n".join(program.ranks[1].lines()) + "\n" == DESIGN_EXAMPLE_RANK_1
    assert actions(program, 0) == [
        *("0POST_RECV_B0.1", "0POST_RECV_B0.0"),
        *("0F0.0", "0SEND_F0.0", "0F0.1", "0SEND_F0.1"),
        *("0WAIT_RECV_B0.1", "0I0.1", "0WAIT_RECV_B0.0", "0I0.0", "0W0.1", "0W0.0"),
        *("0WAIT_SEND_F0.0", "0WAIT_SEND_F0.1", "0START_REDUCE(norm)", "0WAIT_REDUCE(norm)", "0STEP"),
    ]


# Transfers.


@settings(max_examples=60)
@given(cases())
def test_receives_are_posted_ahead_in_the_senders_order(case: Case) -> None:
    program = replace(case, late_receives=False).lower()
    for channel in program.channels:
        sent = _on(program.ranks[channel.source], channel, "SEND_")
        for kind in ("WAIT_SEND", "POST_RECV", "WAIT_RECV"):
            rank = program.ranks[channel.source if kind == "WAIT_SEND" else channel.target]
            assert [cell for cell, _ in _on(rank, channel, kind)] == [cell for cell, _ in sent]
        posts = [at for _, at in _on(program.ranks[channel.target], channel, "POST_RECV")]
        waits = [at for _, at in _on(program.ranks[channel.target], channel, "WAIT_RECV")]
        first_work = _first(program.ranks[channel.target])
        assert all(at < first_work for at in posts[: case.receive_ahead])
        num_late = max(0, len(posts) - case.receive_ahead)
        assert posts[case.receive_ahead :] == [at + 1 for at in waits[:num_late]]


@settings(max_examples=60)
@given(cases())
def test_late_receives_are_posted_before_the_action_before_the_one_that_waits(case: Case) -> None:
    """Or, where as many as may be are posted already, directly after the WAIT_RECV that makes them fewer."""
    program = replace(case, late_receives=True).lower()
    prove(program, sizes=case.sizes, remainder_sizes=case.remainder_sizes)
    for channel in program.channels:
        rank = program.ranks[channel.target]
        sent = _on(program.ranks[channel.source], channel, "SEND_")
        posts, waits = (_on(rank, channel, kind) for kind in ("POST_RECV", "WAIT_RECV"))
        assert [cell for cell, _ in posts] == [cell for cell, _ in waits] == [cell for cell, _ in sent]
        for number, ((_, post), (_, wait)) in enumerate(zip(posts, waits, strict=True)):
            due = max(_action_after(rank, wait) - 1, 0)
            assert _action_after(rank, post) >= due
            if _action_after(rank, post) > due:
                assert post == waits[number - case.receive_ahead][1] + 1
            else:
                kinds = {i.action.kind for i in rank.instructions[_action_at(rank, due - 1) + 1 : post]}
                assert not kinds & {Kind.WAIT_RECV_F, Kind.WAIT_RECV_B} or number >= case.receive_ahead


def _action_after(rank: RankProgram, position: int) -> int:
    """The number of the first compute action after an instruction."""
    return sum(instruction.action.is_compute for instruction in rank.instructions[:position])


def _action_at(rank: RankProgram, number: int) -> int:
    """The position of a compute action by number; -1 for the one before the first."""
    return [-1, *(at for at, i in enumerate(rank.instructions) if i.action.is_compute)][number + 1]


@settings(max_examples=60)
@given(cases())
def test_late_receives_stand_no_earlier_and_hold_no_more(case: Case) -> None:
    """Of every message the slot that it is received into lives during fewer actions."""
    early, late = (replace(case, late_receives=flag, buckets=()).lower() for flag in (False, True))
    for before, after in zip(early.ranks, late.ranks, strict=True):
        posts = [_posts(rank) for rank in (before, after)]
        assert posts[0].keys() == posts[1].keys()
        assert all(posts[0][message] <= posts[1][message] for message in posts[0])
        assert max(_num_posted(after), default=0) <= max(_num_posted(before), default=0)


def _posts(rank: RankProgram) -> dict[tuple[object, int], int]:
    """The number of the action that every POST_RECV stands before."""
    posts = [(at, i) for at, i in enumerate(rank.instructions) if i.action.kind.startswith("POST_RECV")]
    return {(i.channel, i.sequence): _action_after(rank, at) for at, i in posts}


def _num_posted(rank: RankProgram) -> list[int]:
    """How many receives are posted and not waited for, by action."""
    numbers, num_posted = [], 0
    for instruction in rank.instructions:
        kind = instruction.action.kind
        num_posted += kind.startswith("POST_RECV") - kind.startswith("WAIT_RECV")
        if instruction.action.is_compute:
            numbers.append(num_posted)
    return numbers


@pytest.mark.parametrize("schedule", sorted(BUILT_IN))
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_schedules_of_every_family_have_one_late_receive_next_to_an_action(
    schedule: str, num_slices: int, dp: int, pp: int
) -> None:
    """Posted from the start of the step, a rank of a V has up to 16 of them. In a loop a rank receives both ways."""
    shape = small_plan(schedule=schedule, pp=pp, dp=dp, slices=(4,) * num_slices, num_microbatches=5, layers=6)
    early, late = (program_of(replace(shape, receive_ahead=4, late_receives=flag)) for flag in (False, True))
    more, less = prove(early).live_bytes, prove(late, num_places=NUM_PLACES).live_bytes
    assert all(a >= b for a, b in zip(more, less, strict=True))
    for before, after in zip(early.ranks, late.ranks, strict=True):
        assert max(_num_posted(after)) <= (2 if schedule == "interleaved-zb" else 1) <= max(_num_posted(before))
        assert _num_before_the_first_action(after) <= 2
    assert max(_num_posted(early.ranks[0])) >= 4
    assert _num_before_the_first_action(late.ranks[0]) == 0, "only its later actions receive anything"


def _num_before_the_first_action(rank: RankProgram) -> int:
    return sum(i.action.kind.startswith("POST_RECV") for i in rank.instructions[: _first(rank)])


def test_late_receives_of_a_warm_up() -> None:
    program = lowered(_one_forward_one_backward(2), late_receives=True)
    assert actions(program, 0) == [
        *("0F0.0", "0SEND_F0.0", "0POST_RECV_B0.0", "0F1.0", "0SEND_F1.0"),
        *("0POST_RECV_B1.0", "0WAIT_RECV_B0.0", "0B0.0", "0WAIT_RECV_B1.0", "0B1.0"),
        *("0WAIT_SEND_F0.0", "0WAIT_SEND_F1.0", "0START_REDUCE(norm)", "0WAIT_REDUCE(norm)", "0STEP"),
    ]


def _on(rank: RankProgram, channel: object, kind: str) -> list[tuple[tuple[int | None, int | None], int]]:
    """Micro-batch, slice and position of a rank's transfers of one kind on a channel."""
    return [
        ((instruction.action.microbatch, instruction.action.slice), at)
        for at, instruction in enumerate(rank.instructions)
        if instruction.channel == channel and instruction.action.kind.startswith(kind)
    ]


def _first(rank: RankProgram) -> int:
    return next(at for at, instruction in enumerate(rank.instructions) if instruction.action.is_compute)


def test_a_send_waits_for_the_one_receive_ahead_before_it() -> None:
    program = lowered(_one_forward_one_backward(6), receive_ahead=2)
    sends = [text for text in actions(program, 0) if "SEND" in text]
    assert sends == [
        *("0SEND_F0.0", "0SEND_F1.0", "0WAIT_SEND_F0.0", "0SEND_F2.0", "0WAIT_SEND_F1.0", "0SEND_F3.0"),
        *("0WAIT_SEND_F2.0", "0SEND_F4.0", "0WAIT_SEND_F3.0", "0SEND_F5.0", "0WAIT_SEND_F4.0", "0WAIT_SEND_F5.0"),
    ]


def _one_forward_one_backward(num_microbatches: int) -> str:
    """1F1B on two ranks."""
    middle = [action for m in range(1, num_microbatches) for action in (f"0F{m}", f"0B{m - 1}")]
    first = ["0F0", *middle, f"0B{num_microbatches - 1}"]
    last = [action for m in range(num_microbatches) for action in (f"1F{m}", f"1B{m}")]
    return ",".join(first) + "\n" + ",".join(last)


def test_a_rank_that_runs_ahead_of_its_neighbour_does_not_deadlock() -> None:
    """All forwards first on rank 0, alternating on rank 1: waiting for sends by number alone blocks both."""
    microbatches = range(16)
    first = [f"0{kind}{m}" for kind in "FB" for m in microbatches]
    last = [f"1{kind}{m}" for m in microbatches for kind in "FB"]
    program = lowered(",".join(first) + "\n" + ",".join(last), receive_ahead=1)
    prove(program, sizes=one_line_each)
    sends = [text for text in actions(program, 1) if "SEND" in text]
    assert sends[:5] == ["1SEND_B0.0", "1WAIT_SEND_B0.0", "1SEND_B1.0", "1SEND_B2.0", "1SEND_B3.0"]
    with pytest.raises(ProgramError, match="deadlock"):
        prove(moved(program, 1, "1WAIT_SEND_B1.0", before="1SEND_B2.0"))


def test_messages_taken_in_another_order_are_waited_for_in_the_order_of_sending() -> None:
    program = lowered("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n")
    prove(program, sizes=one_line_each)
    assert [text for text in actions(program, 1) if "WAIT_RECV" in text or "1F" in text] == [
        *("1WAIT_RECV_F0.0", "1WAIT_RECV_F1.0", "1F1.0", "1F0.0")
    ]


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    program = lowered("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert prove(program, sizes=one_line_each).num_transfers == 4
    lines = {line.split()[0]: line for line in program.ranks[1].lines()}
    assert ">x@2:0.0" in lines["1F0.0"]
    assert "<x@2:0.0" in lines["2F0.0"]
    assert ">g_in@1:0.0" in lines["2B0.0"]
    assert "<g_in@1:0.0" in lines["1B0.0"]
    kinds = {(slot.kind, slot.stage) for slot in program.ranks[1].slots}
    assert not kinds & {(SlotKind.OUTPUT, 1), (SlotKind.SENT_GRADIENT, 2)}


def test_one_channel_serves_all_stages_between_two_ranks() -> None:
    program = lowered("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    assert [str(channel) for channel in program.channels] == ["0->1B", "0->1F", "1->0B", "1->0F"]
    numbers = [i.sequence for i in program.ranks[0].instructions if i.action.kind is Kind.SEND_F]
    assert numbers == [0, 1]


# Slots.


def test_every_slot_lives_as_its_table_says() -> None:
    lives = slot_lives(lowered("0F0.0,0F0.1,0I0.1,0I0.0,0W0.1,0W0.0\n1F0.0,1F0.1,1I0.1,1I0.0,1W0.1,1W0.0\n"), 1)
    assert lives == {
        "x@1:0.0": ("1POST_RECV_F0.0", "1I0.0"),
        "x@1:0.1": ("1POST_RECV_F0.1", "1I0.1"),
        "kv@1:0": ("1F0.0", "1I0.0"),
        "a@1:0.0": ("1F0.0", "1I0.0"),
        "l@1:0.0": ("1F0.0", "1W0.0"),
        "h@1:0.0": ("1F0.0", "1I0.0"),
        "a@1:0.1": ("1F0.1", "1I0.1"),
        "l@1:0.1": ("1F0.1", "1W0.1"),
        "h@1:0.1": ("1F0.1", "1I0.1"),
        "dkv@1:0": ("1I0.1", "1I0.0"),
        "w@1:0.1": ("1I0.1", "1W0.1"),
        "g_out@1:0.1": ("1I0.1", "1WAIT_SEND_B0.1"),
        "w@1:0.0": ("1I0.0", "1W0.0"),
        "g_out@1:0.0": ("1I0.0", "1WAIT_SEND_B0.0"),
    }


def test_the_stash_of_a_full_backward_lives_only_during_it() -> None:
    assert slot_lives(lowered("0F0,0B0\n"), 0)["w@0:0.0"] == ("0B0.0", "0B0.0")


def test_slots_without_bytes_are_left_out() -> None:
    def sizes(kind: SlotKind, stage: int, tokens: int) -> int:
        has_none = kind in (SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS) and stage
        return 0 if has_none else one_line_each(kind, stage, tokens)

    schedule = schedule_of(TWO_MICROBATCHES)
    program = lower(schedule, sizes, slices=(3,), receive_ahead=1, dp=False)
    prove(program, sizes=sizes)
    assert {slot.kind.value for slot in program.ranks[1].slots} == {"x", "a", "l", "w", "g_out", "h"}
    assert {slot.kind.value for slot in program.ranks[0].slots} == {"kv", "dkv", "a", "l", "w", "y", "g_in"}


def test_sizes_follow_the_layout() -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=2, hidden=64, heads=4, kv_heads=2, vocab=128)
    stages = ((0, 2), (2, 6))
    sizes = slot_sizes(spec, Precision.BF16, stages, 3)
    program = lower(schedule_of(SPLIT_BACKWARD), sizes, slices=(16, 8), receive_ahead=2, dp=False)
    prove(program, sizes=sizes)
    for rank in program.ranks:
        for slot in rank.slots:
            tokens = 24 if slot.slice is None else (16, 8)[slot.slice]
            first, stop = stages[slot.stage]
            assert slot.num_bytes == stage_slot_bytes(spec, Precision.BF16, first, stop, slot.kind, 3, tokens)


@settings(max_examples=60)
@given(cases())
def test_a_free_stands_directly_after_the_last_use(case: Case) -> None:
    for rank in case.lower().ranks:
        for before, instruction in pairwise(rank.instructions):
            if instruction.action.kind is Kind.FREE and not before.action.kind.startswith("WAIT_SEND"):
                assert {*before.reads, *before.writes} >= set(instruction.frees)


# The end, and the whole.


DIGESTS_OF_0_1_0 = [
    "24109ebfc97f2307e3f82d44385bb01efed815f21ed4b2b06ee4467b7f32937c",
    "3359bd31b7dd5ebe3036f7fed57c347c2c2bd4686c663350ea9562a375aa0ea0",
    "5c6cd40efc48acd7b9547a85d62baa3067fb1b57cb6c48810a08edf3f322dd00",
]


def at_once(stage: int, *groups: str) -> list[str]:
    """Reductions that are waited for where they start."""
    return [f"{stage}{kind}_REDUCE({group})" for group in groups for kind in ("START", "WAIT")]


def test_with_one_stage_per_rank_reductions_have_nothing_to_run_next_to() -> None:
    program = lowered("0F0,0B0\n1F0,1B0\n2F0,2B0\n", dp=True, tie=(0, 2))
    for rank in (0, 2):
        assert actions(program, rank)[-7:] == [*at_once(rank, "tie", "dp", "norm"), f"{rank}STEP"]
    assert actions(program, 1)[-5:] == [*at_once(1, "dp", "norm"), "1STEP"]
    assert "REDUCE(tie)" not in "".join(actions(lowered("0F0,0B0\n", tie=(0,)), 0))


TWO_STAGES_EACH = "0F0,2F0,2I0,2W0,0I0,0W0\n1F0,3F0,3B0,1B0\n"


def test_the_reduction_of_a_stage_runs_next_to_the_compute_of_another() -> None:
    program = lowered(TWO_STAGES_EACH, dp=True)
    assert (
        actions(program, 0)[-11:]
        == [
            *("2I0.0", "2SEND_B0.0", "2W0.0", "2START_REDUCE(dp)", "0WAIT_RECV_B0.0", "0I0.0", "0W0.0"),
            *("0WAIT_SEND_F0.0", "2WAIT_SEND_F0.0", "2WAIT_SEND_B0.0"),
            *("0START_REDUCE(dp)", "2WAIT_REDUCE(dp)", "0WAIT_REDUCE(dp)", *at_once(0, "norm"), "0STEP"),
        ][-11:]
    )
    row = actions(program, 1)
    assert row[row.index("3B0.0") : row.index("3B0.0") + 3] == ["3B0.0", "3SEND_B0.0", "3START_REDUCE(dp)"]


def test_a_tied_stage_is_summed_over_its_copies_before_replicas() -> None:
    ends = actions(lowered(TWO_STAGES_EACH, dp=True, tie=(0, 3)), 1)
    assert ends.index("3START_REDUCE(tie)") < ends.index("1B0.0")
    assert ends[-8:] == [
        *("1START_REDUCE(dp)", "3WAIT_REDUCE(tie)", "3START_REDUCE(dp)", "1WAIT_REDUCE(dp)", "3WAIT_REDUCE(dp)"),
        *(*at_once(1, "norm"), "1STEP"),
    ]


def test_shards_are_summed_before_replicas_and_waited_for_at_once() -> None:
    """After those over a tied matrix, and else as early as replicas could be."""
    row = actions(lowered(TWO_STAGES_EACH, dp=True, tp=True), 0)
    at = row.index("2W0.0") + 1
    assert row[at : at + 4] == [*at_once(2, "tp"), "2START_REDUCE(dp)", "0WAIT_RECV_B0.0"]
    assert row[-8:] == [
        *(*at_once(0, "tp"), "0START_REDUCE(dp)", "2WAIT_REDUCE(dp)", "0WAIT_REDUCE(dp)"),
        *(*at_once(0, "norm"), "0STEP"),
    ]
    ends = actions(lowered(TWO_STAGES_EACH, dp=True, tp=True, tie=(0, 3)), 1)
    assert ends.index("3START_REDUCE(tie)") < ends.index("1B0.0")
    assert ends[-12:] == [
        *(*at_once(1, "tp"), "1START_REDUCE(dp)", "3WAIT_REDUCE(tie)", *at_once(3, "tp"), "3START_REDUCE(dp)"),
        *("1WAIT_REDUCE(dp)", "3WAIT_REDUCE(dp)", *at_once(1, "norm"), "1STEP"),
    ]
    alone = actions(lowered("0F0,0B0\n1F0,1B0\n", tp=True), 1)
    assert alone[-5:] == [*at_once(1, "tp", "norm"), "1STEP"]


def test_reductions_of_devices_with_places_start_after_all_compute() -> None:
    row = actions(lowered(TWO_STAGES_EACH, dp=True, late_receives=True), 0)
    assert row[-7:] == [
        *("0START_REDUCE(dp)", "2START_REDUCE(dp)", "0WAIT_REDUCE(dp)", "2WAIT_REDUCE(dp)"),
        *(*at_once(0, "norm"), "0STEP"),
    ]
    row = actions(lowered(TWO_STAGES_EACH, dp=True, tp=True, late_receives=True), 0)
    assert row[-11:-5] == [*at_once(0, "tp"), "0START_REDUCE(dp)", *at_once(2, "tp"), "2START_REDUCE(dp)"]


@pytest.mark.parametrize("late_receives", [False, True])
def test_parameters_that_replicas_divide_are_gathered_before_the_first_forwards(late_receives: bool) -> None:
    """All gathers of a rank start before one is waited for, by its stage or, on devices, by the rank's first action."""
    program = lowered(TWO_STAGES_EACH, dp=True, zero=1, late_receives=late_receives)
    without = lowered(TWO_STAGES_EACH, dp=True, late_receives=late_receives)
    for rank in (0, 1):
        row, own = actions(program, rank), (rank, rank + 2)
        waits = [f"{stage}WAIT_GATHER(dp)" for stage in own]
        assert row[:2] == [f"{stage}START_GATHER(dp)" for stage in own]
        if late_receives:
            assert row[2:4] == waits
        else:
            assert [row[row.index(wait) + 1] for wait in waits] == [f"{stage}F0.0" for stage in own]
        assert [action for action in row if "GATHER" not in action] == actions(without, rank)
    assert program.digest != without.digest


@settings(max_examples=60)
@given(cases())
def test_a_reduction_starts_early_exactly_where_compute_follows(case: Case) -> None:
    """Directly after the last W or B of its stage, or its part of that, and messages; else after all compute."""
    program = case.lower()
    owners, ties = case.schedule.stage_ranks, [each for each in program.reductions if each.group is Group.TIE]
    for rank in program.ranks:
        kinds = [i.action.kind for i in rank.instructions if i.action.kind is not Kind.FREE]
        work = [i.action for i in rank.instructions if i.action.kind is not Kind.FREE]
        end = max(at for at, action in enumerate(work) if action.is_compute)
        for at, action in enumerate(work):
            if action.kind is Kind.START_REDUCE and at < end:
                before = at - 1
                while kinds[before] in _AFTER_COMPUTE:
                    before -= 1
                done = [each for each in flatten((work[before],)) if each.kind in (Kind.B, Kind.W)]
                assert any(each.stage == action.stage for each in done)
                assert action.group is Group.TIE or action.part in [each.part for each in done]
                assert not case.late_receives
        started = {
            group: {(a.stage, a.part) for a in work[:end] if a.kind is Kind.START_REDUCE and a.group is group}
            for group in Group
        }
        last = {a.stage: at for at, each in enumerate(work) for a in flatten((each,)) if a.kind in (Kind.B, Kind.W)}
        cut = {action.stage for action in work if action.kind is Kind.START_REDUCE and action.part}
        tied = {stage for reduction in ties for stage in reduction.tied_of(owners, rank.rank)}
        could: set[tuple[int, Part | None]]
        could = {(stage, None) for stage, at in last.items() if at < end and stage not in tied | cut}
        could |= {
            (action.stage, action.part)
            for action in work[:end]
            if action.part and action.kind in (Kind.B, Kind.W) and (action.part.first or action.stage not in tied)
        }
        assert started[Group.DP] == (could if case.dp and not case.late_receives else set())
        assert started[Group.TP] == (could if case.tp and not case.late_receives else set())


_AFTER_COMPUTE = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.WAIT_SEND_F, Kind.WAIT_SEND_B}) | {
    Kind.START_REDUCE,
    Kind.WAIT_REDUCE,
}
"""What may stand between a stage's last W and the start of a reduction."""


def test_digests_are_those_of_plans_of_before_where_nothing_overlaps() -> None:
    """Stored plans hold digests of Programs with REDUCE in place of a start and its wait."""
    digests = [
        lowered(SPLIT_BACKWARD, slices=(5, 3)).digest,
        lowered("0F0,0B0\n1F0,1B0\n2F0,2B0\n", dp=True, tie=(0, 2)).digest,
        lowered(TWO_STAGES_EACH).digest,
    ]
    assert digests == DIGESTS_OF_0_1_0


def test_overlaps_run_serially() -> None:
    overlapped = lowered("0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n")
    assert overlapped == lowered(TWO_MICROBATCHES)


@settings(max_examples=40)
@given(cases())
def test_compute_keeps_the_order_of_the_schedule(case: Case) -> None:
    program = case.lower()
    work = Counter(str(i.action) for rank in program.ranks for i in rank.instructions if i.action.is_compute)
    assert set(work.values()) == {1}
    for rank, row in zip(program.ranks, case.schedule.ranks, strict=True):
        whole = [i.action for i in rank.instructions if i.action.is_compute and not _goes_on(i.action)]
        texts = [str(action if action.kind is Kind.R else replace(action, part=None)) for action in whole]
        assert texts == [str(action) for action in without_overlaps(row, keep_pairs=case.keep_pairs)]


def _goes_on(action: Action) -> bool:
    """Whether it is a part of a backward that another part follows."""
    return action.kind is not Kind.R and action.part is not None and action.part.first > 0


def test_every_process_makes_the_same_program() -> None:
    code = (
        "from tests.support.small_programs import *\n"
        "print(lowered(SPLIT_BACKWARD, slices=(5, 3)).digest, lowered(TWO_MICROBATCHES).digest)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = lowered(SPLIT_BACKWARD, slices=(5, 3)).digest, lowered(TWO_MICROBATCHES).digest
    assert printed == {" ".join(here) + "\n"}


# What is refused.

REFUSALS = [
    ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "0I1.0 is missing"),
    ("0F0,0B0,0W0", "0W0.0 is there 2 times"),
    ("0F0,0F0,0B0", "0F0.0 is there 2 times"),
    ("0F0.1,0F0.0,0B0.1,0B0.0", "rank 0 has 0F0.1 before 0F0.0 is done, which comes later on the same rank"),
    ("0F0.0,0F0.1,0B0.0,0B0.1", "rank 0 has 0B0.0 before 0I0.1 is done, which comes later on the same rank"),
    ("0F0,0W0,0I0", "rank 0 has 0W0.0 before 0I0.0 is done, which comes later on the same rank"),
    ("0F0,0B0,0R0", "rank 0 has 0B0.0 before 0R0.0 is done, which comes later on the same rank"),
    ("0R0,0F0,0B0", "rank 0 has 0R0.0 before 0F0.0 is done, which comes later on the same rank"),
    ("0F0,0R0,0R0,0B0", "0R0.0 is there 2 times"),
    ("0F0,0R0,0R0[0],0B0", "0R0.0 is there 2 times"),
    ("0F0,0R0[1],0B0", "0R0.0[1] is out of order: unit 0 is next"),
    ("0F0,0R0[0],0R0[2],0B0", "0R0.0[2] is out of order: unit 1 is next"),
    ("0F0,0R0[0:2],0R0[1],0B0", "0R0.0[1] is out of order: unit 2 is next"),
    ("0F0,0F1,0R0[0],0R0[1],0B0,0R1[0],0B1", "0R1.0 ends at unit 1 of 2"),
    ("0F0,0R0[0],0B0,0R0[1]", "rank 0 has 0B0.0 before 0R0.0 is done, which comes later on the same rank"),
    ("1F0,0F0,1B0,0B0", "rank 0 has 1F0.0 before 0F0.0 is done, which comes later on the same rank"),
    (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0",
        "rank 0 has 0B0.0 before 1I0.0 is done; rank 1 has 1F1.0 before 0F1.0 is done",
    ),
]


@pytest.mark.parametrize(("text", "reason"), REFUSALS)
def test_an_impossible_schedule_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        lowered(text)
    assert reason in caught.value.what
    assert caught.value.where.startswith("schedule, rank ")
    assert caught.value.remedy


def test_parts_of_another_stage_are_refused() -> None:
    text = "0F0,0R0[0:2],0B0\n"
    assert lowered(text, num_units=(2,)) == lowered(text)
    for num_units in (1, 3):
        with pytest.raises(UserError, match=f"0R0.0 ends at unit 2 of {num_units}"):
            lowered(text, num_units=(num_units,))


def test_a_deadlock_of_the_schedule_shows_the_grid() -> None:
    with pytest.raises(UserError) as caught:
        lowered("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0")
    assert caught.value.what.split("\n\n")[1] == (
        "step    1      2        3\nrank 0  0F0.0  >0B0.0<  .\nrank 1  .      1F0.0    1F1.0"
    )


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**32))
def test_a_reordered_schedule_is_refused_or_right(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    model = toy_model(case, seed)
    for _ in range(5):
        rows = [list(row) for row in case.schedule.ranks]
        row = rng.choice(rows)
        action = row.pop(rng.randrange(len(row)))
        row.insert(rng.randrange(len(row) + 1), action)
        reordered = replace(case, schedule=replace(case.schedule, ranks=tuple(map(tuple, rows))))
        program = _lowered_or_refused(reordered)
        if program is not None:
            prove(program, sizes=case.sizes, remainder_sizes=case.remainder_sizes)
            assert interpret(program, case, model, seed) == expected_answer(case, model)


def _lowered_or_refused(case: Case) -> Program | None:
    try:
        return case.lower()
    except UserError:
        return None


def test_sizes_of_the_pipeline_must_agree() -> None:
    schedule = schedule_of(SPLIT_BACKWARD)
    with pytest.raises(UserError, match="has 2 slices, but 1 lengths are given"):
        lower(schedule, one_line_each, slices=(4,), receive_ahead=2, dp=False)
    with pytest.raises(UserError, match="0 is not positive"):
        lower(schedule, one_line_each, slices=(4, 4), receive_ahead=0, dp=False)


def test_a_rank_without_work_is_refused() -> None:
    with pytest.raises(UserError, match="schedule, rank 1: has no actions"):
        lowered("0F0,0B0\n,\n1F0,1B0\n")
