"""The proof: accepts what is right, refuses what is wrong with the place and the reason, and knows the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import MemoryLimitError, ProgramError
from penstock.core.invariants import prove
from penstock.core.layout import SlotKind
from penstock.core.program import Channel, Extent, Instruction, Program, RankProgram, Reduction, Slot
from penstock.core.residency import NUM_PLACES
from penstock.core.schedule import Action, Group, Kind, Part, parse_action
from penstock.planner.lowering import lower
from tests.support.corruption import corrupt
from tests.support.interpreter import expected_answer, interpret
from tests.support.small_programs import (
    SPLIT_BACKWARD,
    TWO_MICROBATCHES,
    lowered,
    moved,
    one_line_each,
    one_line_of_both,
    one_line_remade,
    replaced,
    schedule_of,
    without,
)
from tests.support.strategies import Case, cases
from tests.support.toy_model import toy_model

SEEDS = st.integers(0, 2**32)


@settings(max_examples=150)
@given(cases(), SEEDS)
def test_every_legal_schedule_is_proved_and_gives_the_right_result(case: Case, seed: int) -> None:
    program = case.lower()
    prove(program, sizes=case.sizes, remainder_sizes=case.remainder_sizes, num_units=case.num_units)
    model = toy_model(case, seed)
    expected = expected_answer(case, model)
    for interleaving in range(2):
        assert interpret(program, case, model, seed + interleaving) == expected


@settings(max_examples=60)
@given(cases(), SEEDS)
def test_a_corrupt_program_is_refused_or_harmless(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    program = case.lower()
    model = toy_model(case, seed)
    for _ in range(20):
        broken = corrupt(rng, program)
        try:
            prove(
                broken,
                sizes=case.sizes,
                remainder_sizes=case.remainder_sizes,
                num_units=case.num_units,
                num_trained=case.num_trained,
            )
        except ProgramError:
            continue
        for interleaving in range(4):
            assert interpret(broken, case, model, seed + interleaving) == expected_answer(case, model)


@settings(max_examples=50)
@given(cases())
def test_live_bytes_are_the_most_that_live_at_one_instruction(case: Case) -> None:
    program = case.lower()
    proof = prove(program, sizes=case.sizes, remainder_sizes=case.remainder_sizes)
    assert proof.live_bytes == tuple(_most_live_bytes(rank) for rank in program.ranks)
    assert proof.arena_bytes == tuple(rank.arena_bytes for rank in program.ranks)
    assert all(live <= arena for live, arena in zip(proof.live_bytes, proof.arena_bytes, strict=True))


def _most_live_bytes(rank: RankProgram) -> int:
    live: set[int] = set()
    most = 0
    for instruction in rank.instructions:
        live |= set(instruction.acquires)
        most = max(most, sum(rank.slots[index].num_bytes for index in live))
        live -= set(instruction.frees)
    return most


def test_the_proof_counts_instructions_transfers_and_steps() -> None:
    proof = prove(lowered(SPLIT_BACKWARD))
    assert proof.num_instructions == 46
    assert proof.num_transfers == 4
    assert proof.num_steps == 8  # 6 actions of rank 0 and its wait of two for the first gradient to come back


def test_transient_bytes_count_beside_the_slots_of_their_moment() -> None:
    plain = prove(lowered(SPLIT_BACKWARD))
    program = lowered(SPLIT_BACKWARD, transients={(Kind.I, 0, 1): 1000, (Kind.W, 1, 0): 10})
    proof = prove(program)
    assert proof.transient_bytes == (1000, 10)
    assert proof.arena_bytes == plain.arena_bytes
    assert proof.live_bytes[0] > 1000
    assert proof.live_bytes[1] == plain.live_bytes[1]  # rank 1 holds much more than its last W needs before that
    assert proof.peak_bytes == (plain.arena_bytes[0] + 1000, plain.arena_bytes[1] + 10)


def test_a_program_beyond_its_memory_is_refused() -> None:
    program = lowered(SPLIT_BACKWARD, transients={(Kind.I, 1, 1): 1000})
    peaks = prove(program).peak_bytes
    assert prove(program, memory_limit_bytes=peaks).peak_bytes == peaks
    with pytest.raises(MemoryLimitError, match=r"^rank 1, .*1000 transient bytes exceed the limit"):
        prove(program, memory_limit_bytes=(peaks[0], peaks[1] - 1))


def test_a_deadlock_names_who_waits_for_whom_and_marks_the_cell() -> None:
    program = moved(lowered(TWO_MICROBATCHES), 0, "0WAIT_RECV_B0.0", before="0SEND_F0.0")
    with pytest.raises(ProgramError) as caught:
        prove(program)
    assert str(caught.value) == (
        "rank 0, 0WAIT_RECV_B0.0: deadlock: "
        "rank 0 waits in 0WAIT_RECV_B0.0 for rank 1 to send message 0 of 1->0B; "
        "rank 1 waits in 1WAIT_RECV_F0.0 for rank 0 to send message 0 of 0->1F\n"
        "\n"
        "step    1                2\n"
        "rank 0  0F0.0            >0WAIT_RECV_B0.0<\n"
        "rank 1  1WAIT_RECV_F0.0  ."
    )


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    program = lowered("0F0,0B0\n1F0,1B0\n")
    for text in ("1START_REDUCE(norm)", "1WAIT_REDUCE(norm)"):
        program = without(program, 1, text)
    with pytest.raises(ProgramError, match=r"1STEP: runs before 1WAIT_REDUCE\(norm\)"):
        prove(program)
    program = replaced(program, 1, "1STEP", lambda step: replace(step, action=Action(Kind.FREE, 1, 0, 0)))
    with pytest.raises(ProgramError, match=r"for rank 1 to reach START_REDUCE\(norm\); rank 1 has ended"):
        prove(program)


def _with_slots(program: Program, kind: SlotKind, change: Callable[[int], int]) -> Program:
    """Every slot of a kind on rank 0 with another number of bytes."""
    rank = program.ranks[0]
    slots = tuple(_resized(slot, change(slot.num_bytes)) if slot.kind is kind else slot for slot in rank.slots)
    return replace(program, ranks=(replace(rank, slots=slots), *program.ranks[1:]))


def _resized(slot: Slot, num_bytes: int) -> Slot:
    (extent,) = slot.extents
    return replace(slot, extents=(replace(extent, num_bytes=num_bytes),))


def _freed_by(instruction: Instruction) -> Instruction:
    return replace(instruction, frees=instruction.reads)


def _again(kind: Kind) -> Callable[[Instruction], Instruction]:
    """The reduction over all ranks of stage 0, started or waited for."""
    return lambda _: Instruction(Action(kind, 0, group=Group.NORM))


def _sequence(number: int) -> Callable[[Instruction], Instruction]:
    return lambda instruction: replace(instruction, sequence=number)


def _channel(source: int, target: int, direction: str) -> Callable[[Instruction], Instruction]:
    return lambda instruction: replace(instruction, channel=Channel(source, target, direction))


REFUSALS: list[tuple[str, Callable[[Program], Program]]] = [
    (
        r"rank 0, 0SEND_F0.0: reads y@0:0.0, which was never acquired",
        lambda p: without(p, 0, "0F0.0"),
    ),
    (
        r"rank 1, 1I0.0: reads dkv@1:0, which was never acquired",
        lambda p: moved(p, 1, "1I0.0", before="1I0.1"),
    ),
    (
        r"rank 1, 1F0.1: reads kv@1:0, which was never acquired",
        lambda p: moved(moved(p, 1, "1F0.1", before="1F0.0"), 1, "1WAIT_RECV_F0.1", before="1F0.1"),
    ),
    (
        r"rank 1, 1F0.0: reads x@1:0.0, which is under transfer",
        lambda p: moved(p, 1, "1F0.0", before="1WAIT_RECV_F0.0"),
    ),
    (
        r"rank 1, 1WAIT_RECV_F0.1: waits for message 1 of 0->1F, which is not being received",
        lambda p: without(p, 1, "1POST_RECV_F0.1"),
    ),
    (
        r"rank 0, 0SEND_F0.1: is number 1 of 0->1F, where 0 is next",
        lambda p: moved(p, 0, "0SEND_F0.0", before="0WAIT_RECV_B0.1"),
    ),
    (
        r"rank 0, 0SEND_F0.0: is number 1 of 0->1F, where 0 is next",
        lambda p: replaced(p, 0, "0SEND_F0.0", _sequence(1)),
    ),
    (
        r"rank 0, 0SEND_F0.0: uses channel 1->0B instead of 0->1F",
        lambda p: replaced(p, 0, "0SEND_F0.0", _channel(1, 0, "B")),
    ),
    (
        r"rank 0, 0FREE0.0: frees y@0:0.0, which is under transfer",
        lambda p: moved(p, 0, "0WAIT_SEND_F0.0", before="0START_REDUCE(norm)"),
    ),
    (
        r"rank 0, 0W0.1: frees slots, which only FREE may",
        lambda p: replaced(p, 0, "0W0.1", _freed_by),
    ),
    (
        r"rank 0, 0STEP: runs before 0WAIT_REDUCE\(norm\)",
        lambda p: moved(p, 0, "0STEP", before="0WAIT_REDUCE(norm)"),
    ),
    (
        r"rank 0, 0START_REDUCE\(norm\): finds 1 of 2 weight gradients of stage 0",
        lambda p: moved(p, 0, "0START_REDUCE(norm)", before="0W0.0"),
    ),
    (
        r"rank 0, 0WAIT_REDUCE\(norm\): waits for a reduction that was not started",
        lambda p: moved(p, 0, "0WAIT_REDUCE(norm)", before="0START_REDUCE(norm)"),
    ),
    (
        r"rank 0, 0WAIT_REDUCE\(dp\): is no reduction of its rank",
        lambda p: replaced(
            p, 0, "0WAIT_REDUCE(norm)", lambda found: replace(found, action=replace(found.action, group=Group.DP))
        ),
    ),
    (
        r"rank 0, 0START_REDUCE\(norm\): starts a reduction that was started before",
        lambda p: replaced(p, 0, "0WAIT_REDUCE(norm)", _again(Kind.START_REDUCE)),
    ),
    (
        r"rank 0, 0WAIT_REDUCE\(norm\): waits for a reduction that is over",
        lambda p: replaced(p, 0, "0STEP", _again(Kind.WAIT_REDUCE)),
    ),
    (
        r"rank 0, end of the Program: ends without STEP",
        lambda p: without(p, 0, "0STEP"),
    ),
    (
        r"rank 0, 0F0.0: acquires a@0:0.0 of 128 bytes, where 64 are needed",
        lambda p: _with_slots(p, SlotKind.ACTIVATIONS, lambda num_bytes: 2 * num_bytes),
    ),
    (
        r"the reductions are none; they have to be",
        lambda p: replace(p, reductions=()),
    ),
    (
        r"the reduction over norm must not join the ranks",
        lambda p: replace(p, reductions=(Reduction(Group.NORM, (0,)),)),
    ),
    (
        r"has work for stages \[0, 1\], not for all of 3",
        lambda p: replace(p, num_stages=3),
    ),
    (
        r"the ranks are not numbered from 0",
        lambda p: replace(p, ranks=p.ranks[::-1]),
    ),
]


@pytest.mark.parametrize(("reason", "corruption"), REFUSALS, ids=[reason for reason, _ in REFUSALS])
def test_a_refusal_says_where_and_why(reason: str, corruption: Callable[[Program], Program]) -> None:
    with pytest.raises(ProgramError, match=reason):
        prove(corruption(lowered(SPLIT_BACKWARD)), sizes=one_line_each)


NO_SLOTS_REFUSALS = [
    ("0F0,0B0", "0B0.0", "0F0.0", "0B0.0: runs before the F of its slice"),
    ("0F0,0R0,0B0", "0B0.0", "0R0.0", "0B0.0: runs before the R of its slice"),
    ("0F0,0I0,0W0", "0W0.0", "0I0.0", "0W0.0: runs before the I of its slice"),
]


@pytest.mark.parametrize(("text", "action", "before", "reason"), NO_SLOTS_REFUSALS)
def test_order_is_held_even_where_no_slot_shows_it(text: str, action: str, before: str, reason: str) -> None:
    program = lower(schedule_of(text), lambda *_: 0, slices=(1,), receive_ahead=1, dp=False)
    assert prove(program).arena_bytes == (0,)
    with pytest.raises(ProgramError, match=reason):
        prove(moved(program, 0, action, before=before))
    with pytest.raises(ProgramError, match="does work that was done before"):
        prove(
            replaced(program, 0, action, lambda found: replace(found, action=program.ranks[0].instructions[0].action))
        )


def test_a_tie_joins_the_first_and_the_last_rank_before_dp_and_norm() -> None:
    text = "0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    assert prove(lowered(text, dp=True, tie=(0, 2))).num_transfers == 4
    with pytest.raises(ProgramError, match=r"the reduction over tie must not join the ranks \(0, 1\)"):
        prove(lowered(text, tie=(0, 1)))
    late = moved(lowered(text, dp=True, tie=(0, 2)), 2, "2WAIT_REDUCE(tie)", before="2START_REDUCE(norm)")
    with pytest.raises(ProgramError, match=r"rank 2, 2START_REDUCE\(dp\): runs before 2WAIT_REDUCE\(tie\)"):
        prove(late)


def test_a_tie_joins_the_first_stage_and_all_with_parts_of_the_head() -> None:
    text = "0F0,0B0\n1F0,3F0,3B0,1B0\n2F0,2B0\n"
    program = lowered(text, dp=True, tie=(0, 1, 2, 3))
    assert program.reductions[0].ranks == (0, 1, 2)
    prove(program)
    early = moved(program, 1, "1START_REDUCE(tie)", before="1B0.0")
    with pytest.raises(ProgramError, match=r"1START_REDUCE\(tie\): finds 0 of 1 weight gradients of stage 1"):
        prove(early)
    unsummed = moved(program, 1, "3START_REDUCE(dp)", before="1WAIT_REDUCE(tie)")
    with pytest.raises(ProgramError, match=r"3START_REDUCE\(dp\): runs before 1WAIT_REDUCE\(tie\)"):
        prove(unsummed)
    for stages in ((0, 1, 3), (1, 2, 3), (0, 2), (0, 0, 1, 2, 3), (0, 3, 4), (0,)):
        joined = replace(program, reductions=(Reduction(Group.TIE, (0, 1, 2), stages), *program.reductions[1:]))
        with pytest.raises(ProgramError, match="the reduction over tie must not join the ranks"):
            prove(joined)


def test_shards_are_summed_between_tie_and_dp() -> None:
    text = "0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    program = lowered(text, dp=True, tp=True, tie=(0, 2))
    assert [reduction.group for reduction in program.reductions] == [Group.TIE, Group.TP, Group.DP, Group.NORM]
    prove(program)
    early = moved(program, 2, "2START_REDUCE(tp)", before="2WAIT_REDUCE(tie)")
    with pytest.raises(ProgramError, match=r"rank 2, 2START_REDUCE\(tp\): runs before 2WAIT_REDUCE\(tie\)"):
        prove(early)
    early = moved(program, 1, "1START_REDUCE(dp)", before="1WAIT_REDUCE(tp)")
    with pytest.raises(ProgramError, match=r"rank 1, 1START_REDUCE\(dp\): runs before 1WAIT_REDUCE\(tp\)"):
        prove(early)
    late = moved(lowered(text, tp=True), 1, "1WAIT_REDUCE(tp)", before="1STEP")
    with pytest.raises(ProgramError, match=r"rank 1, 1START_REDUCE\(norm\): runs before 1WAIT_REDUCE\(tp\)"):
        prove(late)
    missing = without(without(lowered(text, tp=True), 1, "1START_REDUCE(tp)"), 1, "1WAIT_REDUCE(tp)")
    with pytest.raises(ProgramError, match=r"rank 1, 1START_REDUCE\(norm\): runs before 1WAIT_REDUCE\(tp\)"):
        prove(missing)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 0, 1, 2), (0, 1)])
def test_reductions_are_in_one_order(order: tuple[int, ...]) -> None:
    """Of tp, dp and norm."""
    program = lowered("0F0,0B0\n1F0,1B0\n", dp=True, tp=True)
    with pytest.raises(ProgramError, match=r"the reductions are .*; they have to be tie, tp, dp, norm"):
        prove(replace(program, reductions=tuple(program.reductions[at] for at in order)))


def test_a_reduction_over_shards_starts_once_its_stage_is_complete() -> None:
    program = lowered(TWO_STAGES_EACH, tp=True)
    prove(program, sizes=one_line_each)
    with pytest.raises(ProgramError, match=r"2START_REDUCE\(tp\): finds 0 of 1 weight gradients of stage 2"):
        prove(moved(program, 0, "2START_REDUCE(tp)", before="2W0.0"))
    partly = replace(program, reductions=(Reduction(Group.TP, (0,)), program.reductions[-1]))
    with pytest.raises(ProgramError, match=r"the reduction over tp must not join the ranks \(0,\)"):
        prove(partly)


REMADE = "0F0,0R0,0I0,0W0\n"

REMADE_REFUSALS = [
    (lambda p: moved(p, 0, "0I0.0", before="0R0.0"), r"0I0.0: reads ra@0:0.0, which was never acquired"),
    (lambda p: moved(p, 0, "0W0.0", before="0R0.0"), r"0W0.0: reads rl@0:0.0, which was never acquired"),
    (lambda p: without(p, 0, "0R0.0"), r"0I0.0: reads ra@0:0.0, which was never acquired"),
    (lambda p: _not_touching(p, "0I0.0", SlotKind.REMADE_ACTIVATIONS), r"0I0.0: has to read .*ra@0:0.0, .*, not"),
    (lambda p: _not_touching(p, "0W0.0", SlotKind.REMADE_LINEAR_INPUTS), r"0W0.0: has to read .*rl@0:0.0, .*, not"),
    (lambda p: _not_touching(p, "0R0.0", SlotKind.ACTIVATIONS), r"0R0.0: has to read a@0:0.0, .*, not"),
    (lambda p: _not_touching(p, "0R0.0", SlotKind.REMADE_ACTIVATIONS), r"0R0.0: has to write ra@0:0.0, .*, not"),
]


def _not_touching(program: Program, text: str, kind: SlotKind) -> Program:
    """The Program in which an instruction names no slot of a kind."""
    slots = program.ranks[0].slots

    def change(found: Instruction) -> Instruction:
        reads, writes = (
            tuple(i for i in indices if slots[i].kind is not kind) for indices in (found.reads, found.writes)
        )
        return replace(found, reads=reads, writes=writes)

    return replaced(program, 0, text, change)


@pytest.mark.parametrize(("corruption", "reason"), REMADE_REFUSALS, ids=range(len(REMADE_REFUSALS)))
def test_what_is_made_again_is_not_read_before_and_made_by_nobody_else(
    corruption: Callable[[Program], Program], reason: str
) -> None:
    program = lowered(REMADE, sizes=one_line_of_both)
    prove(program, sizes=one_line_of_both)
    with pytest.raises(ProgramError, match=reason):
        prove(corruption(program))


def test_a_slot_that_is_made_again_begins_its_life_with_the_recomputation() -> None:
    """Of two slices one has an R: the other is made again inside its backward, in no slot."""
    program = lowered("0F0.0,0F0.1,0B0.1,0R0.0,0B0.0\n", sizes=one_line_of_both)
    rank = program.ranks[0]
    names = {str(slot): index for index, slot in enumerate(rank.slots)}
    acquired = {str(i.action): i.acquires for i in rank.instructions}
    assert {names["ra@0:0.0"], names["rl@0:0.0"]} <= set(acquired["0R0.0"])
    assert not {"ra@0:0.1", "rl@0:0.1"} & names.keys()


IN_PARTS = "0F0,0R0[0],0R0[1:3],0I0,0W0\n"

PART_REFUSALS = [
    (lambda p: moved(p, 0, "0R0.0[1:3]", before="0R0.0[0]"), r"0R0.0\[1:3\]: makes unit 1 again where unit 0 is next"),
    (lambda p: moved(p, 0, "0I0.0", before="0R0.0[1:3]"), r"0I0.0: runs before the R of its slice"),
    (lambda p: _part(p, "0R0.0[1:3]", Part(1, 2)), r"0I0.0: runs before the R of its slice"),
    (lambda p: _part(p, "0R0.0[1:3]", Part(1, 4)), r"0R0.0\[1:4\]: makes units up to 4 again of a stage that keeps 3"),
    (lambda p: _part(p, "0R0.0[1:3]", None), r"0R0.0: does work that was done before"),
    (lambda p: _part(p, "0R0.0[0]", None), r"0R0.0\[1:3\]: does work that was done before"),
    (
        lambda p: _part(p, "0I0.0", Part(0, 3)),
        r"0I0.0\[0:3\]: is for a part of its stage, which only F, R, B and W may be",
    ),
]


def _part(program: Program, text: str, part: Part | None) -> Program:
    return replaced(program, 0, text, lambda found: replace(found, action=replace(found.action, part=part)))


@pytest.mark.parametrize(("corruption", "reason"), PART_REFUSALS, ids=[reason for _, reason in PART_REFUSALS])
def test_parts_cover_what_a_stage_keeps_once_before_the_backward(
    corruption: Callable[[Program], Program], reason: str
) -> None:
    """Without slots, so that only the parts themselves can be wrong."""
    program = lower(schedule_of(IN_PARTS), lambda *_: 0, slices=(1,), receive_ahead=1, dp=False)
    prove(program, num_units=(3,))
    prove(lowered(IN_PARTS), sizes=one_line_remade, num_units=(3,))
    with pytest.raises(ProgramError, match=reason):
        prove(corruption(program), num_units=(3,))


TWO_STAGES_EACH = "0F0,2F0,2I0,2W0,0I0,0W0\n1F0,3F0,3B0,1B0\n"


def test_a_reduction_may_start_as_soon_as_its_stage_is_complete_and_has_to_be_over_before_the_norm() -> None:
    program = lowered(TWO_STAGES_EACH, dp=True)
    prove(program, sizes=one_line_each)
    with pytest.raises(ProgramError, match=r"2START_REDUCE\(dp\): finds 0 of 1 weight gradients of stage 2"):
        prove(moved(program, 0, "2START_REDUCE(dp)", before="2W0.0"))
    with pytest.raises(ProgramError, match=r"0START_REDUCE\(norm\): runs before 2WAIT_REDUCE\(dp\)"):
        prove(moved(program, 0, "2WAIT_REDUCE(dp)", before="0STEP"))
    with pytest.raises(ProgramError, match=r"0START_REDUCE\(norm\): runs before 0WAIT_REDUCE\(dp\)"):
        prove(without(program, 0, "0WAIT_REDUCE(dp)"))


GATHER_REFUSALS: list[tuple[str, Callable[[Program], Program]]] = [
    (
        r"rank 0, 2F0\.0: runs before 2WAIT_GATHER\(dp\)",
        lambda p: moved(p, 0, "2F0.0", before="2WAIT_GATHER(dp)"),
    ),
    (
        r"rank 0, 2START_GATHER\(dp\): starts a gather that was started before",
        lambda p: replaced(p, 0, "0STEP", lambda i: replace(i, action=parse_action("2START_GATHER(dp)"))),
    ),
    (
        r"rank 0, 0WAIT_GATHER\(dp\): waits for a gather that is not under way",
        lambda p: moved(p, 0, "0WAIT_GATHER(dp)", before="0START_GATHER(dp)"),
    ),
    (
        r"rank 1, 3F0\.0: runs before 3WAIT_GATHER\(dp\)",
        lambda p: without(without(p, 1, "3START_GATHER(dp)"), 1, "3WAIT_GATHER(dp)"),
    ),
    (
        r"rank 1, 3F0\.0: runs before 3WAIT_GATHER\(dp\)",
        lambda p: without(p, 1, "3WAIT_GATHER(dp)"),
    ),
    (
        r"rank 0, 0START_GATHER\(dp\): starts a gather that was started before",
        lambda p: replaced(p, 0, "2START_GATHER(dp)", lambda i: replace(i, action=replace(i.action, stage=0))),
    ),
    (
        r"rank 0, 1START_GATHER\(dp\): is no gather of its rank",
        lambda p: replaced(p, 0, "0START_GATHER(dp)", lambda i: replace(i, action=replace(i.action, stage=1))),
    ),
    (
        r"rank 0, 0START_GATHER\(norm\): is no gather of its rank",
        lambda p: replaced(p, 0, "0START_GATHER(dp)", lambda i: replace(i, action=replace(i.action, group=Group.NORM))),
    ),
    (r"rank 0, 0START_GATHER\(dp\): is no gather of its rank", lambda p: replace(p, zero=0)),
    (
        r"zero 1 divides the optimizer's state between replicas",
        lambda p: replace(p, reductions=tuple(each for each in p.reductions if each.group is not Group.DP)),
    ),
]


@pytest.mark.parametrize(("reason", "corruption"), GATHER_REFUSALS, ids=[reason for reason, _ in GATHER_REFUSALS])
def test_parameters_of_every_stage_are_gathered_once_before_its_forwards(
    reason: str, corruption: Callable[[Program], Program]
) -> None:
    program = lowered(TWO_STAGES_EACH, dp=True, zero=1)
    prove(program, sizes=one_line_each, num_places=NUM_PLACES)
    with pytest.raises(ProgramError, match=reason):
        prove(corruption(program), sizes=one_line_each)


def test_a_reduction_over_the_pipeline_waits_for_the_last_to_start_it() -> None:
    program = lowered("0F0,0B0\n1F0,1B0\n2F0,2B0\n", tie=(0, 2))
    program = replaced(
        program, 2, "2START_REDUCE(tie)", lambda found: replace(found, action=Action(Kind.FREE, 2, 0, 0))
    )
    with pytest.raises(ProgramError, match=r"2WAIT_REDUCE\(tie\): waits for a reduction that was not started"):
        prove(program)


def test_slots_at_their_word_must_not_differ_between_microbatches() -> None:
    program = lowered(TWO_MICROBATCHES)
    slots = program.ranks[0].slots
    odd = tuple(
        _resized(slot, 128) if (slot.kind, slot.microbatch) == (SlotKind.LINEAR_INPUTS, 1) else slot for slot in slots
    )
    prove(program)
    with pytest.raises(ProgramError, match=r"acquires l@0:1.0 of 128 bytes, where 64 are needed"):
        prove(replace(program, ranks=(replace(program.ranks[0], slots=odd), program.ranks[1])))


def _divided(program: Program, kind: SlotKind, *cuts: tuple[int, int]) -> Program:
    """Every slot of a kind on rank 0 in extents of these bytes, each so far behind the arena's end."""
    rank = program.ranks[0]
    extents = tuple(Extent(rank.arena_bytes + offset, num_bytes) for offset, num_bytes in cuts)
    slots = tuple(replace(slot, extents=extents) if slot.kind is kind else slot for slot in rank.slots)
    grown = replace(rank, slots=slots, arena_bytes=rank.arena_bytes + 256)
    return replace(program, ranks=(grown, *program.ranks[1:]))


def test_a_slot_may_lie_in_several_extents() -> None:
    program = lowered("0F0,0B0\n1F0,1B0\n", sizes=lambda *_: 128)
    proof = prove(_divided(program, SlotKind.ACTIVATIONS, (128, 64), (0, 64)), sizes=lambda *_: 128)
    assert proof.live_bytes == prove(program, sizes=lambda *_: 128).live_bytes


@pytest.mark.parametrize(
    ("kind", "cuts", "reason"),
    [
        (SlotKind.ACTIVATIONS, ((0, 64), (0, 64)), "overlaps a@0:0.0"),
        (SlotKind.ACTIVATIONS, ((0, 64), (-64, 64)), "overlaps"),
        (SlotKind.ACTIVATIONS, ((0, 64), (256, 64)), "ends past the arena's"),
        (SlotKind.ACTIVATIONS, ((0, 128), (128, 0)), "0 bytes at offset"),
        (SlotKind.ACTIVATIONS, ((0, 64), (96, 64)), "no aligned place"),
        (SlotKind.ACTIVATIONS, ((0, 64),), "64 bytes, where 128 are needed"),
        (SlotKind.OUTPUT, ((0, 64), (64, 64)), "transfers y@0:0.0, which is not one range of memory"),
    ],
)
def test_every_extent_has_a_place_of_its_own(kind: SlotKind, cuts: tuple[tuple[int, int], ...], reason: str) -> None:
    program = lowered("0F0,0B0\n1F0,1B0\n", sizes=lambda *_: 128)
    with pytest.raises(ProgramError, match=reason):
        prove(_divided(program, kind, *cuts), sizes=lambda *_: 128)


def test_messages_of_unequal_size_are_refused_even_at_their_word() -> None:
    program = _with_slots(lowered("0F0,0B0\n1F0,1B0\n"), SlotKind.OUTPUT, lambda num_bytes: num_bytes // 2)
    with pytest.raises(ProgramError, match=r"1WAIT_RECV_F0.0: receives 32 bytes into 64 bytes of x@1:0.0"):
        prove(program)


def test_overlapping_lives_are_refused_with_both_names() -> None:
    program = lowered("0F0,0B0\n")
    slots = tuple(replace(slot, extents=(replace(slot.extents[0], offset=0),)) for slot in program.ranks[0].slots)
    with pytest.raises(ProgramError, match=r"0F0.0: acquires a@0:0.0, which overlaps kv@0:0 in the arena"):
        prove(replace(program, ranks=(replace(program.ranks[0], slots=slots),)))


def test_the_grid_shows_a_window_around_the_bad_cell() -> None:
    num_ranks, num_microbatches = 20, 12
    rows = [[f"{rank}{kind}{m}" for kind in "FB" for m in range(num_microbatches)] for rank in range(num_ranks)]
    program = lowered("\n".join(",".join(row) for row in rows))
    with pytest.raises(ProgramError) as caught:
        prove(without(program, 10, "10F11.0"))
    lines = caught.value.grid.splitlines()
    assert lines[0].split() == ["step", *(str(step) for step in range(17, 25))]
    assert [line.split()[1] for line in lines[1:]] == [str(rank) for rank in range(4, 17)]
    marked = [cell for line in lines for cell in line.split() if cell.startswith(">")]
    assert marked == [">10SEND_F11.0<"]
