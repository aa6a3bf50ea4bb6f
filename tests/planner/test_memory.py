"""The planner's quick byte arithmetic equals the layout's own sums."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import AttentionKernel, GradientType, SoftwareSpec
from penstock.core.layout import Precision, SlotKind, copied_parameters, stage_parameters, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.planner.memory import StageMemory, state_bytes_per_parameter

MODELS = (
    ModelSpec(family=Family.LLAMA, layers=3, hidden=32, heads=4, kv_heads=2, vocab=101),
    ModelSpec(family=Family.GPT2, layers=2, hidden=24, heads=2, vocab=50, positions=64),
)


@given(
    st.sampled_from(MODELS),
    st.sampled_from(Precision),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.data(),
)
def test_stages_have_the_layouts_bytes(
    model: ModelSpec, precision: Precision, batch: int, tokens: list[int], data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, model.num_units - 1)))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))
    memory = StageMemory(model=model, precision=precision, stages=stages, batch=batch)
    assert memory.num_parameters.tolist() == [stage_parameters(model, *stage) for stage in stages]
    for slot in SlotKind:
        assert memory.slot_bytes(slot, tokens).tolist() == [
            [stage_slot_bytes(model, precision, *stage, slot, batch, count) for count in tokens] for stage in stages
        ]


@given(st.sampled_from(MODELS), st.sampled_from([2, 4]))
def test_tensor_parallelism_divides_what_it_splits(model: ModelSpec, tp: int) -> None:
    whole = StageMemory(model=model, precision=Precision.BF16, stages=((1, 5),), batch=1)
    shared = StageMemory(model=model, precision=Precision.BF16, stages=((1, 5),), batch=1, tp=tp)
    copies = 2 * copied_parameters(model, tp)  # of two attentions
    assert shared.num_parameters == whole.num_parameters + copies
    assert shared.state_bytes == (whole.state_bytes + 18 * copies) // tp
    assert shared.gradient_bytes == (whole.gradient_bytes + 4 * copies) // tp
    for slot in (SlotKind.KEYS_VALUES, SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS):
        alone, split = int(whole.slot_bytes(slot, [64])[0, 0]), int(shared.slot_bytes(slot, [64])[0, 0])
        assert alone // tp <= split < alone
        if slot is SlotKind.KEYS_VALUES:
            assert split == alone // min(tp, model.kv_heads)
    assert shared.slot_bytes(SlotKind.INPUT, [64]) == whole.slot_bytes(SlotKind.INPUT, [64])


def test_state_is_eighteen_bytes_in_bf16_and_sixteen_in_fp32() -> None:
    assert state_bytes_per_parameter(Precision.BF16) == 18
    assert state_bytes_per_parameter(Precision.FP32) == 16
    assert state_bytes_per_parameter(Precision.BF16, GradientType.BF16) == 16


@pytest.mark.parametrize(("hidden", "heads"), [(4096, 32), (6144, 48)])
def test_a_layer_of_megatron_keeps_what_korthikanti_counts(hidden: int, heads: int) -> None:
    """S b h (34 + 5 a s / h) bytes (arXiv 2205.05198, equation 1), norm statistics apart."""
    length, batch = 1024, 2
    model = ModelSpec(family=Family.GPT2, layers=2, hidden=hidden, heads=heads, vocab=128, positions=length)
    megatron = SoftwareSpec(attention=AttentionKernel.UNFUSED, dropout=True)
    memory = StageMemory(
        model=model,
        precision=Precision.BF16,
        stages=((1, 3),),
        batch=batch,
        software=megatron,
        sequence_length=length,
    )
    kept = memory.together_bytes(
        [SlotKind.INPUT, SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.KEYS_VALUES], [length]
    )
    expected = length * batch * hidden * (34 + 5 * heads * length / hidden)
    assert int(kept[0, 0]) == pytest.approx(expected, rel=2e-3)


def test_an_allocator_loses_its_share_of_every_slot() -> None:
    whole, slack = (
        StageMemory(
            model=MODELS[1],
            precision=Precision.BF16,
            stages=((1, 3),),
            batch=1,
            software=SoftwareSpec(allocator_slack=share),
        )
        for share in (0.0, 0.5)
    )
    for slot in SlotKind:
        alone, more = int(whole.slot_bytes(slot, [32])[0, 0]), int(slack.slot_bytes(slot, [32])[0, 0])
        assert more == pytest.approx(1.5 * alone, abs=4)
    assert slack.state_bytes == whole.state_bytes


def test_gradients_in_bf16_take_half() -> None:
    wide, narrow = (
        StageMemory(
            model=MODELS[1],
            precision=Precision.BF16,
            stages=((1, 3),),
            batch=1,
            software=SoftwareSpec(gradient_type=kind),
        )
        for kind in GradientType
    )
    assert narrow.gradient_bytes == wide.gradient_bytes // 2
