"""Counts against published figures and against independent sums; layouts against their own definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.layout import (
    Precision,
    SlotKind,
    num_parameters,
    parameters,
    stage_parameters,
    stage_slot_buffers,
    stage_slot_bytes,
    unit_buffers,
)
from penstock.core.model import (
    Family,
    ModelSpec,
    UnitKind,
    attended_pairs,
    attention_flops,
    linear_flops_per_token,
    step_flops,
)
from penstock.core.sharding import Sharding

GROUPED = ModelSpec(family=Family.LLAMA, layers=2, hidden=64, heads=16, kv_heads=4, vocab=64, ffn_hidden=192)
GPT2_SMALL = ModelSpec(family=Family.GPT2, layers=12, hidden=768, heads=12, vocab=50257)
LLAMA_7B = ModelSpec(family=Family.LLAMA, layers=32, hidden=4096, heads=32, vocab=32000, ffn_hidden=11008)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Small models of both families."""
    family = draw(st.sampled_from(Family))
    heads = draw(st.sampled_from([1, 2, 4]))
    kv_heads = heads if family is Family.GPT2 else draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    hidden = heads * draw(st.sampled_from([2, 4, 8]))
    layers = draw(st.integers(1, 4))
    return ModelSpec(
        family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=draw(st.integers(2, 40))
    )


def test_parameter_counts_are_the_published_ones() -> None:
    assert num_parameters(GPT2_SMALL) == 124_439_808
    assert num_parameters(LLAMA_7B) == 6_738_415_616


def test_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    matrices = sum(p.num_elements for u in LLAMA_7B.units for p in parameters(LLAMA_7B, u) if p.decay)
    matrices -= LLAMA_7B.vocab * LLAMA_7B.hidden  # the embedding is a lookup
    attention = 12 * LLAMA_7B.layers * LLAMA_7B.hidden * attended_pairs(2048, 0)
    assert step_flops(LLAMA_7B, 1, 2048) == 6 * matrices * 2048 + attention


@given(models())
def test_units_cover_the_model_once(spec: ModelSpec) -> None:
    assert [unit.index for unit in spec.units] == list(range(spec.num_units))
    names = [p.name for unit in spec.units for p in parameters(spec, unit)]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == ({"embedding.weight"} if spec.tied else set())


@given(models(), st.data())
def test_counts_by_formula_are_those_of_the_built_layout(spec: ModelSpec, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, spec.num_units))
    stop = data.draw(st.integers(first, spec.num_units))
    built = {p.name: p.num_elements for unit in spec.units[first:stop] for p in parameters(spec, unit)}
    assert stage_parameters(spec, first, stop) == sum(built.values())
    flops = sum(linear_flops_per_token(spec, unit.kind) for unit in spec.units)
    assert step_flops(spec, 1, 1) == 3 * (flops + spec.layers * attention_flops(spec, 1))


@given(models(), st.data())
def test_stages_add_up_to_the_model(spec: ModelSpec, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, spec.num_units - 1))
    total = stage_parameters(spec, 0, cut) + stage_parameters(spec, cut, spec.num_units)
    copy = spec.vocab * spec.hidden if spec.tied else 0
    assert total == num_parameters(spec) + copy


@given(models(), st.integers(1, 3), st.integers(1, 9), st.data())
def test_a_stage_keeps_every_output_but_the_one_it_sends(
    spec: ModelSpec, batch: int, tokens: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, spec.num_units - 1))
    kept = stage_slot_buffers(spec, 0, cut, SlotKind.ACTIVATIONS, batch, tokens)
    assert [index for index, buffer in kept if buffer.name == "y"] == list(range(cut - 1))
    (sent,) = stage_slot_buffers(spec, 0, cut, SlotKind.OUTPUT, batch, tokens)
    assert sent[0] == cut - 1
    assert sent[1].shape == (batch * tokens, spec.hidden)


@given(models(), st.sampled_from(Precision))
def test_bytes_are_the_elements_rounded_up_to_cache_lines(spec: ModelSpec, precision: Precision) -> None:
    total = stage_slot_bytes(spec, precision, 0, spec.num_units, SlotKind.LINEAR_INPUTS, 2, 5)
    exact = sum(
        math.prod(buffer.shape) * precision.compute_bytes
        for unit in spec.units
        for buffer in unit_buffers(spec, unit.kind, SlotKind.LINEAR_INPUTS, 2, 5)
    )
    assert exact <= total < exact + 64 * 2 * spec.num_units
    assert total % 64 == 0


def test_gradients_are_as_wide_as_what_they_are_gradients_of() -> None:
    for kind in (UnitKind.ATTENTION, UnitKind.MLP):
        widths = {b.name: b.shape[1] for b in unit_buffers(LLAMA_7B, kind, SlotKind.OUTPUT_GRADIENTS, 1, 3)}
        rows = sum(widths.values())
        matrices = [
            p.shape for p in parameters(LLAMA_7B, LLAMA_7B.units[1 if kind is UnitKind.ATTENTION else 2]) if p.decay
        ]
        assert rows == sum(shape[0] for shape in matrices)
        assert linear_flops_per_token(LLAMA_7B, kind) == 2 * sum(math.prod(shape) for shape in matrices)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 7}, "not divisible by heads"),
        ({"kv_heads": 3}, "not divisible by kvHeads"),
        ({"heads": 256}, "even head dimension"),
        ({"layers": 0}, "less than 1"),
        ({"family": Family.GPT2, "kv_heads": 4}, "grouped-query"),
    ],
)
def test_impossible_dimensions_are_refused(fields: dict[str, object], message: str) -> None:
    sound = {"family": Family.LLAMA, "layers": 2, "hidden": 256, "heads": 8, "vocab": 100}
    with pytest.raises(UserError, match=message):
        ModelSpec(**{**sound, **fields})  # type: ignore[arg-type]


def test_devices_share_whole_heads_equal_widths_and_equally_many_copies_of_key_value_heads() -> None:
    assert [tp for tp in range(1, 33) if GROUPED.can_be_sharded(tp)] == [1, 2, 4, 8, 16]
    assert [GROUPED.kv_copies(tp) for tp in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    six = ModelSpec(family=Family.LLAMA, layers=1, hidden=48, heads=12, kv_heads=6, vocab=64, ffn_hidden=96)
    assert [tp for tp in range(1, 13) if six.can_be_sharded(tp)] == [1, 2, 3, 6, 12]  # 4 of 6 heads would be split
    narrow = ModelSpec(family=Family.LLAMA, layers=1, hidden=64, heads=16, kv_heads=4, vocab=64, ffn_hidden=100)
    assert [tp for tp in range(1, 17) if narrow.can_be_sharded(tp)] == [1, 2, 4]


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 3), st.integers(1, 7), st.sampled_from(Precision))
def test_a_device_holds_whole_key_value_heads(tp: int, batch: int, tokens: int, precision: Precision) -> None:
    """By the shapes of one device's own attention: its queries, and the key/value heads that they need."""
    heads, kv_heads = GROUPED.heads // tp, max(GROUPED.kv_heads // tp, 1)
    compute, wide = precision.compute_bytes, precision.accumulate_bytes
    of_heads = batch * tokens * GROUPED.head_dim
    expected = {
        "q": heads * of_heads * compute,
        "lse": heads * batch * tokens * wide,
        "attended": heads * of_heads * compute,
        "dqkv": (heads + 2 * kv_heads) * of_heads * compute,
        **dict.fromkeys(("k", "v"), kv_heads * of_heads * compute),
        **dict.fromkeys(("dk", "dv"), kv_heads * of_heads * wide),
    }
    found = {
        buffer.name: buffer.num_bytes(precision)
        for slot in SlotKind
        for buffer in unit_buffers(GROUPED, UnitKind.ATTENTION, slot, batch, tokens, Sharding(tp))
        if buffer.name in expected
    }
    assert found == expected
    rows = (heads + 2 * kv_heads) * GROUPED.head_dim
    declared = {parameter.name: parameter for parameter in parameters(GROUPED, GROUPED.units[1])}
    qkv = declared["layers.0.attention.qkv.weight"]
    assert {qkv.shard_shape(tp, shard) for shard in range(tp)} == {(rows, GROUPED.hidden)}
