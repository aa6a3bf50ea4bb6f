"""The planner's quick byte arithmetic equals the layout's own sums."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import AttentionKernel, GradientType, SoftwareSpec
from penstock.core.layout import (
    REMADE_SLOTS,
    Operation,
    Precision,
    SlotKind,
    parameters,
    stage_parameters,
    stage_slot_bytes,
)
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.moments import MomentType
from penstock.core.remaking import Recompute, Remake, Remakes, full_remakes, remade_of, uniform_remakes
from penstock.core.sharding import Sharding
from penstock.planner.memory import StageMemory, state_bytes_per_parameter
from penstock.planner.stagecost import Stages
from tests.support.remaking import random_remakes

MODELS = (
    ModelSpec(family=Family.LLAMA, layers=3, hidden=32, heads=4, kv_heads=2, vocab=101),
    ModelSpec(family=Family.GPT2, layers=2, hidden=24, heads=4, vocab=50, positions=64),
)
DIVIDED = (*MODELS, *(model.divided(parts) for model in MODELS for parts in (2, 3)))
SHARDINGS = [Sharding(tp, by_tokens) for tp in (1, 2, 4) for by_tokens in (True, False)]


@given(
    st.sampled_from(DIVIDED),
    st.sampled_from(Precision),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(SHARDINGS),
    st.data(),
)
def test_stages_have_the_layouts_bytes(
    model: ModelSpec, precision: Precision, batch: int, tokens: list[int], sharding: Sharding, data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, model.num_units - 1)))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))
    memory = StageMemory(model=model, precision=precision, stages=stages, batch=batch, sharding=sharding)
    assert memory.num_parameters.tolist() == [stage_parameters(model, *stage, sharding.tp) for stage in stages]
    for slot in SlotKind:
        assert memory.slot_bytes(slot, tokens).tolist() == [
            [stage_slot_bytes(model, precision, *stage, slot, batch, count, sharding) for count in tokens]
            for stage in stages
        ]


@given(
    st.sampled_from(DIVIDED),
    st.sampled_from(Precision),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(SHARDINGS),
    st.integers(0, 2**32),
    st.data(),
)
def test_recomputed_slots_have_the_bytes_of_the_layout(
    model: ModelSpec,
    precision: Precision,
    batch: int,
    tokens: list[int],
    sharding: Sharding,
    seed: int,
    data: st.DataObject,
) -> None:
    """For any operations of any units and head parts: the kept and the recomputed slot have the bytes of one slot."""
    cuts = data.draw(st.sets(st.integers(1, model.num_units - 1)))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))
    recompute = data.draw(st.sampled_from([random_remakes(model, stages, seed), *fixed_remakes(model, stages)]))
    kept = StageMemory(model=model, precision=precision, stages=stages, batch=batch, sharding=sharding)
    memory = dataclasses.replace(kept, recompute=recompute)
    remade = [remade_of(model, *each) for each in zip(stages, recompute, strict=True)]
    for slot in SlotKind:
        assert memory.slot_bytes(slot, tokens).tolist() == [
            [stage_slot_bytes(model, precision, *stage, slot, batch, count, sharding, units) for count in tokens]
            for stage, units in zip(stages, remade, strict=True)
        ]
    for slot, recomputed in REMADE_SLOTS.items():
        assert (memory.total_slot_bytes((slot, recomputed), tokens) == kept.slot_bytes(slot, tokens)).all()
    assert (memory.state_bytes == kept.state_bytes).all()


def fixed_remakes(model: ModelSpec, stages: Stages) -> list[tuple[Remakes, ...]]:
    """Return the policies that jobs can pin."""
    return [tuple(uniform_remakes(model, stage, pin.operations) for stage in stages) for pin in Recompute]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_recomputed_operations_release_the_buffers_that_megatron_keeps(tp: int) -> None:
    """With full recomputation a layer keeps only keys and values; with that of attention alone it keeps no scores."""
    length = 256
    model = ModelSpec(family=Family.GPT2, layers=1, hidden=256, heads=8, vocab=128, positions=length)
    kept = StageMemory(
        model=model,
        precision=Precision.BF16,
        stages=((0, 1), (1, 3), (3, 4)),
        batch=1,
        sharding=Sharding(tp),
        software=SoftwareSpec(attention=AttentionKernel.UNFUSED, dropout=True),
        sequence_length=length,
    )
    slots = (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS)
    full = dataclasses.replace(kept, recompute=tuple(full_remakes(model, stage) for stage in kept.stages))
    assert int(full.total_slot_bytes(slots, [length])[1, 0]) == 0
    attend = (Remake(unit=UnitKind.ATTENTION, count=1, operations=(Operation.ATTEND,)),)
    lean = dataclasses.replace(kept, recompute=((), attend, ()))
    spared = int((kept.total_slot_bytes(slots, [length]) - lean.total_slot_bytes(slots, [length]))[1, 0])
    attended, lse = 2 * length * model.hidden // tp, 4 * length * model.heads // tp
    assert spared == 5 * length**2 * model.heads // tp + attended + lse


def remade_bytes(layers: int, *, on_demand: bool) -> tuple[int, int]:
    """Return the bytes kept from F to backward, and the recomputed bytes, of a stage with full recomputation."""
    model = ModelSpec(family=Family.GPT2, layers=layers, hidden=256, heads=8, vocab=128, positions=256)
    stages = ((0, 1), (1, model.num_units - 1), (model.num_units - 1, model.num_units))
    memory = StageMemory(
        model=model,
        precision=Precision.BF16,
        stages=stages,
        batch=2,
        software=SoftwareSpec(attention=AttentionKernel.UNFUSED, dropout=True, recomputes_on_demand=on_demand),
        sequence_length=256,
        recompute=tuple(full_remakes(model, stage) for stage in stages),
    )
    kept, recomputed = (memory.total_slot_bytes(tuple(slots), [256]) for slots in (REMADE_SLOTS, REMADE_SLOTS.values()))
    return int(kept[1, 0]), int(recomputed[1, 0])


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_on_demand_one_layer_comes_back_at_a_time(layers: int) -> None:
    """The output of a stage's last layer lies elsewhere, so a layer is what two have more than one."""
    layer = remade_bytes(2, on_demand=False)[1] - remade_bytes(1, on_demand=False)[1]
    assert remade_bytes(1, on_demand=True) == remade_bytes(1, on_demand=False)
    assert remade_bytes(layers, on_demand=True)[1] == layer
    assert remade_bytes(layers, on_demand=True)[0] == remade_bytes(layers, on_demand=False)[0]
    assert remade_bytes(layers, on_demand=False)[1] > (layers - 1) * layer


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallelism_divides_what_it_splits(model: ModelSpec, tp: int) -> None:
    """Keys and values by their heads, of which more shards than that hold copies; hidden states only by tokens."""
    whole, by_tokens, replicated = (
        StageMemory(model=model, precision=Precision.BF16, stages=((1, 5),), batch=1, sharding=sharding)
        for sharding in (Sharding(), Sharding(tp), Sharding(tp, sequence_parallel=False))
    )
    for shared in (by_tokens, replicated):
        assert whole.num_parameters < tp * shared.num_parameters < tp * whole.num_parameters
        assert shared.state_bytes == 18 * shared.num_parameters
        assert shared.gradient_bytes == 4 * shared.num_parameters
        kv = [int(each.slot_bytes(SlotKind.KEYS_VALUES, [64])[0, 0]) for each in (shared, whole)]
        assert kv[0] == kv[1] // min(tp, model.kv_heads)
    alone = int(whole.slot_bytes(SlotKind.INPUT, [64])[0, 0])
    assert by_tokens.slot_bytes(SlotKind.INPUT, [64]) == alone // tp
    assert by_tokens.slot_bytes(SlotKind.INPUT, [63]) == alone // tp
    assert replicated.slot_bytes(SlotKind.INPUT, [64]) == alone


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("model", DIVIDED)
def test_shards_sum_gradients_of_the_parameters_that_several_hold(model: ModelSpec, sharding: Sharding) -> None:
    """Element by element: of a parameter that is not divided every shard holds all, and has only its tokens' gradient
    where hidden states are divided by tokens; of what is divided some hold the same rows.
    """
    stages = tuple((index, index + 1) for index in range(model.num_units))
    memory = StageMemory(model=model, precision=Precision.FP32, stages=stages, batch=1, sharding=sharding)
    shared, copied = [], []
    for unit in model.units:
        whole = rows = 0
        for parameter in parameters(model, unit):
            held = [
                {row for piece in parameter.pieces(sharding.tp, shard) for row in range(piece.start, piece.stop)}
                for shard in range(sharding.tp)
            ]
            if not parameter.blocks:
                whole += parameter.num_elements * sharding.by_tokens
            elif sharding.tp > 1:
                of_row = parameter.num_elements // parameter.shape[parameter.axis]
                rows += of_row * len(held[0] & set().union(*held[1:]))
        shared.append(4 * whole)
        copied.append(4 * rows)
    assert memory.shared_gradient_bytes.tolist() == shared
    assert memory.copied_gradient_bytes.tolist() == copied


def test_state_is_eighteen_bytes_in_bf16_and_sixteen_in_fp32() -> None:
    assert state_bytes_per_parameter(Precision.BF16) == 18
    assert state_bytes_per_parameter(Precision.FP32) == 16
    assert state_bytes_per_parameter(Precision.BF16, MomentType.BF16) == 14


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("hidden", "heads"), [(4096, 32), (6144, 48)])
def test_a_layer_of_megatron_keeps_what_korthikanti_counts(hidden: int, heads: int, tp: int) -> None:
    """S b h (34 + 5 a s / h) bytes, norm statistics apart, of which shards divide all with sequence parallelism and all
    but 10 without (arXiv 2205.05198, equations 1, 2 and 4).
    """
    length, batch = 1024, 2
    model = ModelSpec(family=Family.GPT2, layers=2, hidden=hidden, heads=heads, vocab=128, positions=length)
    megatron = SoftwareSpec(attention=AttentionKernel.UNFUSED, dropout=True)
    for by_tokens, replicated in ((True, 0), (False, 10)):
        memory = StageMemory(
            model=model,
            precision=Precision.BF16,
            stages=((1, 3),),
            batch=batch,
            sharding=Sharding(tp, by_tokens),
            software=megatron,
            sequence_length=length,
        )
        kept = memory.total_slot_bytes(
            [SlotKind.INPUT, SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.KEYS_VALUES], [length]
        )
        divided = 34 - replicated + 5 * heads * length / hidden
        expected = length * batch * hidden * (replicated + divided / tp)
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
