"""The arena: no two slots that live together overlap, and it takes little more than the peak of live bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.extents import extent_bytes
from penstock.core.invariants import Proof, prove
from penstock.core.layout import ALIGNMENT_BYTES, NOTHING_REMADE, Precision, SlotKind, aligned
from penstock.core.model import Family, ModelSpec
from penstock.core.program import Program, RankProgram
from penstock.core.roles import SlotName
from penstock.core.sharding import WHOLE
from penstock.planner.lowering import lower, slot_sizes
from penstock.planner.order import Order, to_schedule
from penstock.planner.passes import arena
from penstock.planner.passes.arena import place
from penstock.planner.schedules.gpipe import gpipe
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import one_f_one_b, zb_h1

Life = tuple[int, int]


@st.composite
def slots(draw: st.DrawFn) -> tuple[list[SlotName], list[Life], list[list[int]]]:
    """Up to 40 slots of any kinds, in the order of acquisition, each in one to three extents."""
    gaps = draw(st.lists(st.integers(0, 3), max_size=40))
    starts = list(accumulate(gaps))
    names: list[SlotName] = [
        (draw(st.sampled_from([SlotKind.INPUT, SlotKind.ACTIVATIONS])), draw(st.integers(0, 1)), m // 2, m % 2)
        for m in range(len(starts))
    ]
    lives = [(start, start + draw(st.integers(1, 12))) for start in starts]
    aligned_bytes = st.sampled_from([64, 128, 1024])
    sizes = [[*draw(st.lists(aligned_bytes, max_size=2)), draw(st.sampled_from([64, 100, 1000]))] for _ in starts]
    return names, lives, sizes


def _most_live_bytes(lives: list[Life], sizes: list[list[int]]) -> int:
    return max(
        sum(aligned(sum(extents)) for (start, stop), extents in zip(lives, sizes, strict=True) if start <= at < stop)
        for at in range(1 + max((stop for _, stop in lives), default=0))
    )


@settings(max_examples=200)
@given(slots(), st.booleans())
def test_slots_that_live_together_do_not_overlap(
    drawn: tuple[list[SlotName], list[Life], list[list[int]]], is_far: bool
) -> None:
    """Also where every extent is placed by itself."""
    names, lives, sizes = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "FAR", 0.0 if is_far else arena.FAR)
        places, arena_bytes = place(names, lives, sizes)
        assert place(names, lives, sizes) == (places, arena_bytes)
    for extents, num_bytes in zip(places, sizes, strict=True):
        assert [extent.num_bytes for extent in extents] in (num_bytes, [sum(num_bytes)])
    assert _most_live_bytes(lives, sizes) <= arena_bytes
    every = [(life, extent) for life, extents in zip(lives, places, strict=True) for extent in extents]
    assert all(extent.offset % ALIGNMENT_BYTES == 0 and extent.stop <= arena_bytes for _, extent in every)
    for (one_life, one), (other_life, other) in combinations(every, 2):
        together = one_life[0] < other_life[1] and other_life[0] < one_life[1]
        assert not together or one.stop <= other.offset or other.stop <= one.offset


@settings(max_examples=100)
@given(slots())
def test_equal_slots_of_one_kind_take_no_more_than_lives_at_once(
    drawn: tuple[list[SlotName], list[Life], list[list[int]]],
) -> None:
    """Intervals of equal size are an interval graph, which needs as many colours as overlap at most."""
    _, lives, _ = drawn
    names: list[SlotName] = [(SlotKind.INPUT, 0, m, 0) for m in range(len(lives))]
    sizes = [[192] for _ in lives]
    assert place(names, lives, sizes)[1] == _most_live_bytes(lives, sizes)


def test_divided_slots_take_no_more_than_whole_ones_and_mostly_less() -> None:
    """Slots of many sizes, as with unequal slices, each of 1 to 16 lines of a cache."""
    rng = np.random.default_rng(11)
    ratios = []
    for _ in range(20):
        starts = np.sort(rng.integers(0, 60, 60))
        lives = [(int(start), int(start + rng.integers(1, 30))) for start in starts]
        names: list[SlotName] = [(SlotKind.ACTIVATIONS, m % 3, m, 0) for m in range(len(lives))]
        counts = rng.integers(1, 17, len(lives)).tolist()
        whole = place(names, lives, [[64 * count] for count in counts])[1]
        divided = place(names, lives, [[64] * count for count in counts])[1]
        assert divided <= whole
        ratios.append(divided / whole)
    assert sum(ratios) / len(ratios) < 0.97


Generator = Callable[[ScheduleInputs], Order]

PIPELINES = [
    (2, 4, (300, 270, 240, 214)),
    (4, 8, (300, 270, 240, 214)),
    (8, 16, (300, 270, 240, 214)),
    (8, 12, (512, 256, 256)),
    (8, 16, (1024,)),
    (16, 20, (600, 424)),
]
"""Ranks, micro-batches, slices."""


def _program(make: Generator, num_ranks: int, num_microbatches: int, slices: tuple[int, ...]) -> tuple[Program, Proof]:
    spec = ModelSpec(family=Family.LLAMA, layers=num_ranks, hidden=256, heads=8, vocab=4096)
    cuts = [round(i * spec.num_units / num_ranks) for i in range(num_ranks + 1)]
    sizes = slot_sizes(spec, Precision.BF16, list(pairwise(cuts)), 1)
    inputs = ScheduleInputs(num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=len(slices))
    program = lower(to_schedule(make(inputs)), sizes, slices=slices, receive_ahead=2, dp=False)
    return program, prove(program, sizes=sizes)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("make", "mean", "worst"), [(gpipe, 1.01, 1.02), (one_f_one_b, 1.055, 1.1), (zb_h1, 1.065, 1.12)]
)
def test_the_arena_is_close_to_the_peak_of_live_bytes(
    make: Generator, mean: float, worst: float, pipeline: tuple[int, int, tuple[int, ...]]
) -> None:
    _, proof = _program(make, *pipeline)
    ratios = [arena / live for arena, live in zip(proof.arena_bytes, proof.live_bytes, strict=True)]
    assert max(ratios) <= worst
    assert sum(ratios) / len(ratios) <= mean


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_slots_in_extents_are_closer(make: Generator, pipeline: tuple[int, int, tuple[int, ...]]) -> None:
    """With four layers per stage."""
    num_ranks, num_microbatches, slices = pipeline
    spec = ModelSpec(family=Family.LLAMA, layers=4 * num_ranks, hidden=256, heads=8, vocab=4096)
    cuts = [round(i * spec.num_units / num_ranks) for i in range(num_ranks + 1)]
    stages = list(pairwise(cuts))
    inputs = ScheduleInputs(num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=len(slices))
    sizes = slot_sizes(spec, Precision.BF16, stages, 1)

    def extents(kind: SlotKind, stage: int, tokens: int) -> tuple[int, ...]:
        return extent_bytes(spec, Precision.BF16, *stages[stage], kind, 1, tokens, WHOLE, NOTHING_REMADE)

    schedule = to_schedule(make(inputs))
    whole = prove(lower(schedule, sizes, slices=slices, receive_ahead=2, dp=False), sizes=sizes)
    divided = prove(lower(schedule, sizes, slices=slices, extents=extents, receive_ahead=2, dp=False), sizes=sizes)
    assert divided.live_bytes == whole.live_bytes
    assert all(one <= other for one, other in zip(divided.arena_bytes, whole.arena_bytes, strict=True))
    ratios = [arena / live for arena, live in zip(divided.arena_bytes, divided.live_bytes, strict=True)]
    assert max(ratios) <= 1.075
    assert sum(ratios) / len(ratios) <= 1.055


def test_a_longer_run_of_the_same_pipeline_uses_the_same_places() -> None:
    """Once every rank is in its rhythm more micro-batches need neither more memory nor new offsets."""
    few, many = (_program(one_f_one_b, 4, count, (600, 424))[0] for count in (12, 24))
    for one, other in zip(few.ranks, many.ranks, strict=True):
        assert one.arena_bytes == other.arena_bytes
        assert _offsets(one) == _offsets(other)


def _offsets(program: RankProgram) -> set[int]:
    return {extent.offset for slot in program.slots for extent in slot.extents}
