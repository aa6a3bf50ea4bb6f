"""Recomputation as data: what is given up is divided from what is kept, and scratch memory holds it while F runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.layout import (
    NOTHING_REMADE,
    REMADE_SLOTS,
    Buffer,
    Operation,
    Precision,
    Remade,
    SlotKind,
    aligned,
    stage_slot_buffers,
    stage_slot_bytes,
)
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.remaking import SELECTIVE, Remake, check_remakes, full_remakes, remade_of, uniform_remakes
from penstock.core.scratch import (
    ScratchBuffer,
    scratch_buffers,
    scratch_bytes,
    segment_buffers,
    segment_bytes,
    segments,
)
from penstock.core.sharding import Sharding
from tests.support.remaking import random_remakes

LLAMA = ModelSpec(family=Family.LLAMA, layers=3, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=3, hidden=16, heads=4, vocab=23, positions=12)
SPECS = st.builds(ModelSpec.divided, st.sampled_from([LLAMA, GPT2]), st.integers(1, 3))
SHARDINGS = st.builds(Sharding, st.sampled_from([1, 2]), st.booleans())


@st.composite
def _stages(draw: st.DrawFn) -> tuple[ModelSpec, tuple[int, int]]:
    spec = draw(SPECS)
    first = draw(st.integers(0, spec.num_units - 1))
    return spec, (first, draw(st.integers(first + 1, spec.num_units)))


Shape = tuple[int, int, Sharding]
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 7), SHARDINGS)


def buffers_of(
    spec: ModelSpec, stage: tuple[int, int], slot: SlotKind, shape: Shape, remade: Remade = NOTHING_REMADE
) -> tuple[tuple[int, Buffer], ...]:
    (first, stop), (batch, tokens, sharding) = stage, shape
    return stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding, remade)


@given(_stages(), SHAPES, st.sampled_from(Precision), st.integers(0, 2**30))
def test_what_is_kept_and_what_is_made_again_are_what_was_kept(
    place: tuple[ModelSpec, tuple[int, int]], shape: Shape, precision: Precision, seed: int
) -> None:
    """Each buffer in one of both slots, and so their bytes; other slots stay as they are."""
    spec, stage = place
    (remakes,) = random_remakes(spec, [stage], seed)
    remade = remade_of(spec, stage, remakes)
    for slot in set(SlotKind) - set(REMADE_SLOTS.values()):
        kept = buffers_of(spec, stage, slot, shape, remade)
        again = buffers_of(spec, stage, REMADE_SLOTS[slot], shape, remade) if slot in REMADE_SLOTS else ()
        assert sorted((*kept, *again), key=_key) == sorted(buffers_of(spec, stage, slot, shape), key=_key)
        (first, stop), (batch, tokens, sharding) = stage, shape
        slots = [slot, REMADE_SLOTS[slot]] if slot in REMADE_SLOTS else [slot]
        num_bytes = [
            stage_slot_bytes(spec, precision, first, stop, each, batch, tokens, sharding, remade) for each in slots
        ]
        assert sum(num_bytes) == stage_slot_bytes(spec, precision, first, stop, slot, batch, tokens, sharding)


def _key(item: tuple[int, Buffer]) -> tuple[int, str]:
    return item[0], item[1].name


@given(_stages(), SHAPES)
def test_full_remakes_keep_nothing_of_activations_and_linear_inputs(
    place: tuple[ModelSpec, tuple[int, int]], shape: Shape
) -> None:
    spec, stage = place
    remade = remade_of(spec, stage, full_remakes(spec, stage))
    for slot, remade_slot in REMADE_SLOTS.items():
        assert buffers_of(spec, stage, slot, shape, remade) == ()
        assert buffers_of(spec, stage, remade_slot, shape, remade) == buffers_of(spec, stage, slot, shape)


@given(_stages(), SHAPES)
def test_selective_remakes_give_up_what_takes_no_product(
    place: tuple[ModelSpec, tuple[int, int]], shape: Shape
) -> None:
    spec, stage = place
    remade = remade_of(spec, stage, uniform_remakes(spec, stage, SELECTIVE))
    names = {
        buffer.name
        for slot in REMADE_SLOTS.values()
        for index, buffer in buffers_of(spec, stage, slot, shape, remade)
        if spec.units[index].kind is not UnitKind.HEAD
    }
    assert names <= {"normed", "rstd", "mean", "activated"}


def test_units_of_a_kind_take_their_operations_in_order() -> None:
    norm, output = (Operation.NORM,), (Operation.OUTPUT,)
    remakes = (
        Remake(unit=UnitKind.MLP, count=1, operations=norm),
        Remake(unit=UnitKind.ATTENTION, count=2, operations=output),
        Remake(unit=UnitKind.MLP, count=1, operations=output),
    )
    found = remade_of(LLAMA, (1, 7), remakes)
    assert [set(each) for each in found] == [{*output}, {*norm}, {*output}, {*output}, set(), set()]


@pytest.mark.parametrize(
    ("remake", "message"),
    [
        (Remake(unit=UnitKind.MLP, count=4, operations=(Operation.NORM,)), "4 mlp units of a stage that has 3"),
        (Remake(unit=UnitKind.MLP, count=1, operations=(Operation.ATTEND,)), "mlp units do not run attend again"),
        (Remake(unit=UnitKind.HEAD, count=1, operations=(Operation.NORM,)), "head units do not run norm again"),
        (Remake(unit=UnitKind.MLP, count=1, operations=()), "names nothing"),
    ],
)
def test_what_no_unit_of_the_stage_can_run_again_is_refused(remake: Remake, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_remakes(LLAMA, (0, 8), (remake,), "recompute[0]")


@given(_stages(), SHAPES, st.sampled_from(Precision), st.integers(0, 2**30))
def test_scratch_memory_holds_what_is_given_up_where_nothing_else_is_needed(
    place: tuple[ModelSpec, tuple[int, int]], shape: Shape, precision: Precision, seed: int
) -> None:
    """A unit's buffers lie apart from each other, from its output and from its input."""
    spec, stage = place
    (remakes,) = random_remakes(spec, [stage], seed)
    remade = remade_of(spec, stage, remakes)
    (first, stop), (batch, tokens, sharding) = stage, shape
    found = list(scratch_buffers(spec, precision, first, stop, batch, tokens, sharding, remade))
    given_up = [
        (slot, index, buffer.name)
        for slot, remade_slot in REMADE_SLOTS.items()
        for index, buffer in buffers_of(spec, stage, remade_slot, shape, remade)
    ]
    assert [(each.slot, each.unit, each.buffer.name) for each in found] == given_up
    for unit in range(*stage):
        together = [each for each in found if _is_needed(spec, each, unit)]
        ranges = sorted((each.offset, each.offset + aligned(each.buffer.num_bytes(precision))) for each in together)
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    size = scratch_bytes(spec, precision, first, stop, batch, tokens, sharding, remade)
    assert size <= sum(aligned(each.buffer.num_bytes(precision)) for each in found)
    assert size <= scratch_bytes(spec, precision, first, stop, batch, tokens, sharding)


def _is_needed(spec: ModelSpec, each: ScratchBuffer, unit: int) -> bool:
    """While the unit runs; parts of a head run together."""
    if each.buffer.name == "y":
        return each.unit in (unit - 1, unit)
    return each.unit == unit or min(each.unit, unit) >= spec.first_head_unit


def test_nothing_given_up_needs_no_scratch_memory() -> None:
    assert scratch_bytes(LLAMA, Precision.FP32, 0, 8, 1, 4, remade=()) == 0


@given(_stages(), SHAPES, st.sampled_from(Precision), st.booleans(), st.integers(0, 2**30))
def test_a_backward_has_what_its_units_need_apart_from_each_other(
    place: tuple[ModelSpec, tuple[int, int]], shape: Shape, precision: Precision, is_split: bool, seed: int
) -> None:
    """To reverse a unit takes its own buffers and its input. If that is made again, so was what it is made of."""
    spec, stage = place
    (remakes,) = random_remakes(spec, [stage], seed)
    remade = remade_of(spec, stage, remakes)
    (first, stop), (batch, tokens, sharding) = stage, shape
    buffers = list(segment_buffers(spec, precision, first, stop, batch, tokens, sharding, remade, is_split=is_split))
    given_up = [
        (slot, index, buffer)
        for slot in (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS)[: 1 if is_split else 2]
        for index, buffer in buffers_of(spec, stage, REMADE_SLOTS[slot], shape, remade)
    ]
    assert [(each.slot, each.unit, each.buffer) for each in buffers] == given_up
    for unit in range(*stage):
        needed = _reversed_with(spec, unit, {each.unit for each in buffers if each.buffer.name == "y"}, stop)
        together = [each for each in buffers if each.unit in needed]
        ranges = sorted((each.offset, each.offset + aligned(each.buffer.num_bytes(precision))) for each in together)
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    size = segment_bytes(spec, precision, first, stop, batch, tokens, sharding, remade, is_split=is_split)
    sums = [
        sum(aligned(buffer.num_bytes(precision)) for _, unit, buffer in given_up if unit in segment)
        for segment in segments(spec, first, stop, remade)
    ]
    assert size == max(sums)


def _reversed_with(spec: ModelSpec, unit: int, without_outputs: set[int], stop: int) -> set[int]:
    """The units whose buffers exist when the unit is reversed."""
    needed = {unit}
    if unit >= spec.first_head_unit:
        needed |= set(range(spec.first_head_unit, stop))
    while min(needed) - 1 in without_outputs:
        needed.add(min(needed) - 1)
    return needed


def test_units_of_a_segment_are_linked_by_outputs() -> None:
    norm, output = frozenset({Operation.NORM}), frozenset({Operation.NORM, Operation.OUTPUT})
    assert segments(LLAMA, 1, 5, (output, norm, norm, norm)) == (range(1, 3), range(3, 4), range(4, 5))
    assert segments(LLAMA, 1, 5, (norm, output, output, output)) == (range(1, 2), range(2, 5))
    assert segments(LLAMA, 1, 5, NOTHING_REMADE) == (range(1, 5),)


def test_a_layer_at_a_time_needs_the_bytes_of_one_layer() -> None:
    """If the inputs of layers are kept; if nothing is, those of the whole stage."""
    layer = (frozenset(Operation), frozenset(Operation) - {Operation.OUTPUT})
    shape = (Precision.FP32, 1, 7, 1, 4, Sharding(1))
    one = segment_bytes(LLAMA, Precision.FP32, 1, 3, 1, 4, Sharding(1), layer, is_split=False)
    assert segment_bytes(LLAMA, *shape, layer * 3, is_split=False) == one
    whole = remade_of(LLAMA, (1, 7), full_remakes(LLAMA, (1, 7)))
    assert segment_bytes(LLAMA, *shape, whole, is_split=False) > 2.9 * one
