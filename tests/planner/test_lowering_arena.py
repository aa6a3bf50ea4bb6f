"""The arena: no two slots that live together overlap, and little more is taken than lives at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.invariants import Proof, prove
from penstock.core.layout import ALIGNMENT_BYTES, Precision, SlotKind, aligned
from penstock.core.model import Family, ModelSpec
from penstock.core.program import Program
from penstock.core.roles import SlotName
from penstock.planner.lowering import lower, slot_sizes
from penstock.planner.order import Order, to_schedule
from penstock.planner.passes.arena import place
from penstock.planner.schedules.gpipe import gpipe
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import one_f_one_b, zb_h1

Life = tuple[int, int]


@st.composite
def slots(draw: st.DrawFn) -> tuple[list[SlotName], list[Life], list[int]]:
    """Up to 40 slots of any kinds, in the order of acquisition."""
    gaps = draw(st.lists(st.integers(0, 3), max_size=40))
    starts = list(accumulate(gaps))
    names: list[SlotName] = [
        (draw(st.sampled_from([SlotKind.INPUT, SlotKind.ACTIVATIONS])), draw(st.integers(0, 1)), m // 2, m % 2)
        for m in range(len(starts))
    ]
    lives = [(start, start + draw(st.integers(1, 12))) for start in starts]
    return names, lives, [draw(st.sampled_from([64, 100, 128, 1000])) for _ in starts]


def _most_live_bytes(lives: list[Life], sizes: list[int]) -> int:
    return max(
        sum(aligned(size) for (start, stop), size in zip(lives, sizes, strict=True) if start <= at < stop)
        for at in range(1 + max((stop for _, stop in lives), default=0))
    )


@settings(max_examples=200)
@given(slots())
def test_slots_that_live_together_do_not_overlap(found: tuple[list[SlotName], list[Life], list[int]]) -> None:
    names, lives, sizes = found
    offsets, arena_bytes = place(names, lives, sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert _most_live_bytes(lives, sizes) <= arena_bytes
    assert max(ends, default=0) <= arena_bytes
    for one, other in combinations(range(len(names)), 2):
        together = lives[one][0] < lives[other][1] and lives[other][0] < lives[one][1]
        assert not together or ends[one] <= offsets[other] or ends[other] <= offsets[one]
    assert place(names, lives, sizes) == (offsets, arena_bytes)


@settings(max_examples=100)
@given(slots())
def test_equal_slots_of_one_kind_take_no_more_than_lives_at_once(
    found: tuple[list[SlotName], list[Life], list[int]],
) -> None:
    """Intervals of equal size are an interval graph, which as many lanes colour as overlap at most."""
    _, lives, _ = found
    names: list[SlotName] = [(SlotKind.INPUT, 0, m, 0) for m in range(len(lives))]
    sizes = [192] * len(lives)
    assert place(names, lives, sizes)[1] == _most_live_bytes(lives, sizes)


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
def test_the_arena_is_close_to_what_lives_at_once(
    make: Generator, mean: float, worst: float, pipeline: tuple[int, int, tuple[int, ...]]
) -> None:
    _, proof = _program(make, *pipeline)
    ratios = [arena / live for arena, live in zip(proof.arena_bytes, proof.live_bytes, strict=True)]
    assert max(ratios) <= worst
    assert sum(ratios) / len(ratios) <= mean


def test_a_longer_run_of_the_same_pipeline_uses_the_same_places() -> None:
    """Once every rank is in its rhythm more micro-batches need neither more memory nor new offsets."""
    few, many = (_program(one_f_one_b, 4, count, (600, 424))[0] for count in (12, 24))
    for one, other in zip(few.ranks, many.ranks, strict=True):
        assert one.arena_bytes == other.arena_bytes
        assert {slot.offset for slot in one.slots} == {slot.offset for slot in other.slots}
