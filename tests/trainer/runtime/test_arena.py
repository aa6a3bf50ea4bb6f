"""The arena: every slot where the Program says, as the layout declares it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from penstock.core.errors import RunError
from penstock.core.layout import Precision, SlotKind
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Extent, RankProgram
from penstock.planner.compile import program_of
from penstock.planner.passes import arena as arena_pass
from penstock.trainer.arena import Arena
from tests.support.small_plans import small_plan

CPU = torch.device("cpu")


def make_arena(plan: Plan, program: RankProgram) -> Arena:
    return Arena(program, plan, CPU)


@pytest.fixture(
    params=[
        (Family.LLAMA, Precision.FP64, False, False),
        (Family.GPT2, Precision.BF16, True, False),
        (Family.LLAMA, Precision.BF16, True, True),
    ]
)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    family, precision, by_slice, split = request.param
    monkeypatch.setattr(arena_pass, "FAR", 0.0 if split else arena_pass.FAR)
    plan = small_plan(family=family, precision=precision, slices=(5, 1, 6), num_microbatches=3)
    return dataclasses.replace(plan, prefix_by_slice=by_slice, split_slots=split)


@pytest.mark.parametrize("rank", [0, 1])
def test_slots_that_live_together_share_no_byte(plan: Plan, rank: int) -> None:
    """Every live slot is filled with its number at its birth and still holds it at its end."""
    program = program_of(plan).ranks[rank]
    arena = make_arena(plan, program)

    def tensors(index: int) -> list[torch.Tensor]:
        return [tensor for unit in arena.tensors(index).values() for tensor in unit.values()]

    num_checked = 0
    for instruction in program.instructions:
        for index in instruction.acquires:
            for tensor in tensors(index):
                tensor.fill_(index % 100)
        for index in instruction.frees:
            num_checked += 1
            assert all(bool((tensor == index % 100).all()) for tensor in tensors(index))
    assert num_checked == len(program.slots)


def test_tensors_lie_at_the_offsets_of_the_program(plan: Plan) -> None:
    program = program_of(plan).ranks[1]
    arena = make_arena(plan, program)
    start = min(
        tensor.data_ptr() - min(extent.offset for extent in slot.extents)
        for index, slot in enumerate(program.slots)
        for unit in arena.tensors(index).values()
        for tensor in unit.values()
    )
    for index, slot in enumerate(program.slots):
        firsts = [tensor.data_ptr() for unit in arena.tensors(index).values() for tensor in unit.values()]
        extents = [range(start + extent.offset, start + extent.stop) for extent in slot.extents]
        assert all(any(pointer in extent for extent in extents) for pointer in firsts)
        assert {extent.start for extent in extents} <= set(firsts)
        assert all(pointer % 64 == 0 for pointer in firsts)


def test_the_message_of_a_slot_is_its_hidden_state(plan: Plan) -> None:
    program = program_of(plan).ranks[1]
    arena = make_arena(plan, program)
    lengths = {
        arena.message(index).shape[0]: slot.slice
        for index, slot in enumerate(program.slots)
        if slot.kind is SlotKind.INPUT
    }
    assert lengths == {plan.microbatch * length: part for part, length in enumerate(plan.slices)}


def apart(one: Extent, other: Extent) -> bool:
    return one.stop <= other.offset or other.stop <= one.offset


def test_poison_is_nan_in_every_type_and_leaves_others_alone(plan: Plan) -> None:
    program = program_of(plan).ranks[0]
    arena = make_arena(plan, program)
    kinds = [slot.kind for slot in program.slots]
    poisoned = kinds.index(SlotKind.ACTIVATIONS)
    arena.poison([poisoned])
    found = [tensor for unit in arena.tensors(poisoned).values() for tensor in unit.values()]
    assert found
    assert all(bool(tensor.isnan().all()) for tensor in found)
    untouched = [
        tensor
        for index, slot in enumerate(program.slots)
        if all(apart(one, other) for one in slot.extents for other in program.slots[poisoned].extents)
        for unit in arena.tensors(index).values()
        for tensor in unit.values()
    ]
    assert untouched
    assert all(bool((tensor == 0).all()) for tensor in untouched)


def test_slots_of_another_size_are_refused(plan: Plan) -> None:
    program = program_of(plan).ranks[0]
    first = program.slots[0]
    *others, last = first.extents
    smaller = dataclasses.replace(first, extents=(*others, Extent(last.offset, last.num_bytes - 64)))
    slots = (smaller, *program.slots[1:])
    with pytest.raises(RunError, match=r"the Program gives .* bytes, the model's layout needs"):
        make_arena(plan, dataclasses.replace(program, slots=slots))
