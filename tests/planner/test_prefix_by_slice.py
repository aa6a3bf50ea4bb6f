"""Keys, values and their gradients slice by slice: live ranges, the proof's refusals, and plans of long sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.core.errors import ProgramError
from penstock.core.invariants import prove
from penstock.core.layout import KEYS_AT_ONCE, Precision, SlotKind, prefix_bytes, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.core.program import Instruction, Program
from penstock.core.roles import PREFIX_KINDS
from penstock.core.schedule import Kind
from penstock.planner.lowering import lower
from penstock.planner.order import to_schedule
from penstock.planner.schedules.registry import find
from tests.support.small_programs import SPLIT_BACKWARD, lowered, moved, one_line_each, schedule_of, slot_lives
from tests.support.step_costs import shape

MODEL = ModelSpec(family=Family.LLAMA, layers=2, hidden=64, heads=4, kv_heads=2, vocab=128)


def by_slice(text: str = SPLIT_BACKWARD) -> Program:
    return lowered(text, prefix_by_slice=True)


def edited(program: Program, change: Callable[[Instruction], Instruction]) -> Program:
    """The Program with all instructions of rank 0 changed."""
    first, *others = program.ranks
    return replace(program, ranks=(replace(first, instructions=tuple(map(change, first.instructions))), *others))


def test_a_slice_keeps_its_keys_from_its_forward_to_its_backward() -> None:
    lives = slot_lives(by_slice(), 0)
    assert {name: life for name, life in lives.items() if "kv" in name} == {
        "kv@0:0.0": ("0F0.0", "0I0.0"),
        "kv@0:0.1": ("0F0.1", "0I0.1"),
        "dkv@0:0.0": ("0I0.1", "0I0.0"),
        "dkv@0:0.1": ("0I0.1", "0I0.1"),
    }


def test_one_slice_has_the_live_ranges_of_a_whole_micro_batch() -> None:
    whole, own = (slot_lives(lowered("0F0,0B0\n1F0,1B0\n", prefix_by_slice=flag), 0) for flag in (False, True))
    assert list(whole.values()) == list(own.values())


def test_slices_hold_no_more_than_whole_micro_batches() -> None:
    """In any order of 1F1B, and with fewer bytes in the arena as soon as a second micro-batch begins."""
    for num_ranks, num_slices in ((1, 4), (2, 4), (4, 8)):
        schedule = to_schedule(find("1f1b").generate(shape(num_ranks, 4, num_slices)))
        slices = (4,) * num_slices
        whole, own = (
            lower(schedule, one_line_each, slices=slices, receive_ahead=2, dp=False, prefix_by_slice=flag)
            for flag in (False, True)
        )
        assert all(a.arena_bytes < b.arena_bytes for a, b in zip(own.ranks, whole.ranks, strict=True))
        peaks = [prove(program, sizes=one_line_each).live_bytes for program in (own, whole)]
        assert all(a < b for a, b in zip(*peaks, strict=True))


def test_forwards_come_in_the_order_of_slices() -> None:
    """Their slots alone would permit any."""
    with pytest.raises(ProgramError, match=r"0F0\.1: runs before the F of the slice before it"):
        prove(moved(by_slice(), 0, "0F0.1", before="0F0.0"))


def test_backwards_come_in_the_reverse_order() -> None:
    begun_early = edited(by_slice(), _begin_with_the_first_backward)
    with pytest.raises(ProgramError, match=r"0I0\.0: runs before the I of the slice after it"):
        prove(begun_early)


def _begin_with_the_first_backward(instruction: Instruction) -> Instruction:
    """The backwards of two slices in each other's place, each with the slots of its place."""
    action = instruction.action
    if action.kind is not Kind.I:
        return instruction
    return replace(instruction, action=replace(action, slice=1 - (action.slice or 0)))


def test_keys_are_not_freed_before_the_backward_of_their_slice() -> None:
    program = by_slice()
    slots = program.ranks[0].slots
    keys = next(at for at, slot in enumerate(slots) if str(slot) == "kv@0:0.0")
    later = next(at for at, slot in enumerate(slots) if str(slot) == "kv@0:0.1")

    def early(instruction: Instruction) -> Instruction:
        frees = tuple(index for index in instruction.frees if index != keys)
        return replace(instruction, frees=(*frees, keys) if later in frees else frees)

    with pytest.raises(ProgramError, match=r"0I0\.0: reads kv@0:0\.0, which was freed before"):
        prove(edited(program, early))


def test_a_slot_of_the_whole_micro_batch_is_refused_where_slices_have_separate_slots() -> None:
    whole = lowered(SPLIT_BACKWARD)
    with pytest.raises(ProgramError):
        prove(replace(whole, prefix_by_slice=True), sizes=one_line_each)
    with pytest.raises(ProgramError):
        prove(replace(by_slice(), prefix_by_slice=False), sizes=one_line_each)


def test_the_digests_of_both_differ() -> None:
    assert by_slice().digest != lowered(SPLIT_BACKWARD).digest


@pytest.mark.parametrize("precision", Precision)
def test_a_short_prefix_is_copied_as_a_whole(precision: Precision) -> None:
    """Keys and values of one layer, as many bytes as their slot on a stage with one layer."""
    slot = stage_slot_bytes(MODEL, precision, 1, 3, SlotKind.KEYS_VALUES, 3, 1024)
    assert prefix_bytes(MODEL, precision, 3, (512, 512)) == slot
    assert prefix_bytes(MODEL, precision, 3, (1024,)) == 0


def test_a_long_prefix_is_copied_in_parts_and_summed_in_fp32() -> None:
    """However long it is, but for the queries of the longest slice."""
    some, more = (prefix_bytes(MODEL, Precision.BF16, 1, (4096,) * count) for count in (9, 100))
    assert some == more == 2 * KEYS_AT_ONCE * 32 * 2 + 4096 * 64 * 4
    assert prefix_bytes(MODEL, Precision.BF16, 1, (4096,) * 8) == 2 * KEYS_AT_ONCE * 32 * 2


def test_prefix_slots_are_the_only_ones_that_differ() -> None:
    schedule = schedule_of(SPLIT_BACKWARD)
    own, whole = (
        lower(schedule, one_line_each, slices=(3, 2), receive_ahead=1, dp=False, prefix_by_slice=flag)
        for flag in (True, False)
    )
    for ours, theirs in zip(own.ranks, whole.ranks, strict=True):
        assert {str(slot) for slot in ours.slots if slot.kind not in PREFIX_KINDS} == {
            str(slot) for slot in theirs.slots if slot.kind not in PREFIX_KINDS
        }
        assert [i.action for i in ours.instructions if i.action.kind is not Kind.FREE] == [
            i.action for i in theirs.instructions if i.action.kind is not Kind.FREE
        ]
