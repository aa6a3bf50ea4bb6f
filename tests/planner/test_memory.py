"""The planner's quick byte arithmetic equals the layout's own sums."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import Precision, SlotKind, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.planner.memory import StageMemory, state_bytes_per_parameter

MODELS = (
    ModelSpec(family=Family.LLAMA, layers=3, hidden=32, heads=4, kv_heads=2, vocab=101),
    ModelSpec(family=Family.GPT2, layers=2, hidden=24, heads=2, vocab=50, positions=64),
)


@given(
    st.sampled_from(MODELS),
    st.sampled_from(Precision),
    st.sampled_from(SlotKind),
    st.integers(1, 3),
    st.integers(1, 40),
    st.data(),
)
def test_a_slot_has_the_layouts_bytes(
    model: ModelSpec, precision: Precision, slot: SlotKind, batch: int, tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, model.num_units - 1))
    stop = data.draw(st.integers(first + 1, model.num_units))
    memory = StageMemory(model=model, precision=precision, first=first, stop=stop, batch=batch)
    assert memory.slot_bytes(slot, tokens) == stage_slot_bytes(model, precision, first, stop, slot, batch, tokens)


@given(st.sampled_from(MODELS), st.sampled_from([2, 4]))
def test_tensor_parallelism_divides_what_it_splits(model: ModelSpec, tp: int) -> None:
    whole = StageMemory(model=model, precision=Precision.BF16, first=1, stop=5, batch=1)
    shared = StageMemory(model=model, precision=Precision.BF16, first=1, stop=5, batch=1, tp=tp)
    assert shared.state_bytes == whole.state_bytes // tp
    for slot in (SlotKind.KEYS_VALUES, SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS):
        assert whole.slot_bytes(slot, 64) // tp <= shared.slot_bytes(slot, 64) < whole.slot_bytes(slot, 64)
    assert shared.slot_bytes(SlotKind.INPUT, 64) == whole.slot_bytes(SlotKind.INPUT, 64)


def test_state_is_eighteen_bytes_in_bf16_and_sixteen_in_fp32() -> None:
    assert state_bytes_per_parameter(Precision.BF16) == 18
    assert state_bytes_per_parameter(Precision.FP32) == 16
