"""Extents of slots: whole units, in the order of the slot's buffers, and all of its bytes."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.extents import MOST_EXTENTS, extent_bytes
from penstock.core.layout import (
    HIDDEN_STATE_SLOTS,
    NOTHING_REMADE,
    Precision,
    SlotKind,
    aligned,
    stage_slot_buffers,
    stage_slot_bytes,
)
from penstock.core.model import Family, ModelSpec
from penstock.core.remaking import full_remakes, remade_of
from penstock.core.sharding import Sharding

LLAMA = ModelSpec(family=Family.LLAMA, layers=9, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=9, hidden=16, heads=4, vocab=23, positions=12)


@given(
    spec=st.sampled_from([LLAMA, GPT2]),
    precision=st.sampled_from(Precision),
    slot=st.sampled_from(SlotKind),
    stage=st.sets(st.integers(0, 20), min_size=2, max_size=2).map(lambda cuts: (min(cuts), max(cuts))),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    sharding=st.builds(Sharding, st.sampled_from([1, 2, 4]), st.booleans()),
    is_recomputed=st.booleans(),
)
def test_extents_are_whole_units(
    spec: ModelSpec,
    precision: Precision,
    slot: SlotKind,
    stage: tuple[int, int],
    shape: tuple[int, int],
    sharding: Sharding,
    is_recomputed: bool,
) -> None:
    remade = remade_of(spec, stage, full_remakes(spec, stage)) if is_recomputed else NOTHING_REMADE
    layout = (*stage, slot, *shape, sharding, remade)
    extents = extent_bytes(spec, precision, *layout)
    assert sum(extents) == stage_slot_bytes(spec, precision, *layout)
    assert len(extents) <= (1 if slot in HIDDEN_STATE_SLOTS else MOST_EXTENTS)
    assert all(num_bytes > 0 for num_bytes in extents)
    buffers = stage_slot_buffers(spec, *layout)
    ends = list(accumulate(aligned(buffer.num_bytes(precision)) for _, buffer in buffers))
    for bound in list(accumulate(extents))[:-1]:
        behind = ends.index(bound) + 1
        assert buffers[behind - 1][0] != buffers[behind][0], "a unit's buffers are in one extent"


def test_equal_units_are_dealt_evenly() -> None:
    """16 units: eight extents of two each."""
    extents = extent_bytes(LLAMA, Precision.FP32, 1, 17, SlotKind.KEYS_VALUES, 1, 16, Sharding(), NOTHING_REMADE)
    assert len(extents) == 8
    assert len(set(extents)) == 1
