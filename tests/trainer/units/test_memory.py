"""Views are the layout's buffers, side by side and aligned; forwards that leave nothing behind; the workspace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import RunError
from penstock.core.extents import extent_bytes
from penstock.core.layout import (
    ALIGNMENT_BYTES,
    NOTHING_REMADE,
    Precision,
    SlotKind,
    stage_slot_buffers,
    stage_slot_bytes,
)
from penstock.core.model import Family, ModelSpec
from penstock.core.sharding import Sharding
from penstock.trainer.units.views import extent_views, slot_views
from penstock.trainer.units.workspace import Workspace
from tests.support.reference_model import reference_logits, reference_loss
from tests.support.stage_pipeline import CPU, HandPipeline, evaluate

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=23, positions=12)


@given(
    spec=st.sampled_from([LLAMA, GPT2]),
    precision=st.sampled_from(Precision),
    slot=st.sampled_from(SlotKind),
    span=st.sets(st.integers(0, 6), min_size=2, max_size=2).map(sorted),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 7),
    sharding=st.builds(Sharding, st.sampled_from([1, 2, 4]), st.booleans()),
)
def test_slot_views_are_the_declared_buffers_without_overlap(
    spec: ModelSpec,
    precision: Precision,
    slot: SlotKind,
    span: list[int],
    batch: int,
    tokens: int,
    sharding: Sharding,
) -> None:
    first, stop = span
    place = (first, stop, slot, batch, tokens, sharding)
    memory = torch.zeros(stage_slot_bytes(spec, precision, *place), dtype=torch.uint8)
    views = slot_views(memory, spec, precision, *place)
    declared = stage_slot_buffers(spec, *place)
    assert sum(len(named) for named in views.values()) == len(declared)
    for index, buffer in declared:
        view = views[index][buffer.name]
        assert tuple(view.shape) == buffer.shape
        assert view.numel() * view.element_size() == buffer.num_bytes(precision)
        assert (view.data_ptr() - memory.data_ptr()) % ALIGNMENT_BYTES == 0
        assert not view.any(), "overlaps a buffer filled before"
        view.fill_(1.0)


def test_views_in_several_extents_are_those_of_one() -> None:
    place = (1, 5, SlotKind.ACTIVATIONS, 2, 7, Sharding(), NOTHING_REMADE)
    sizes = extent_bytes(LLAMA, Precision.FP32, *place)
    assert len(sizes) > 1
    extents = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in sizes]
    divided, whole = (
        extent_views(memory, LLAMA, Precision.FP32, *place)
        for memory in (extents, [torch.zeros(sum(sizes), dtype=torch.uint8)])
    )
    assert {(unit, name): view.shape for unit, views in divided.items() for name, view in views.items()} == {
        (unit, name): view.shape for unit, views in whole.items() for name, view in views.items()
    }
    for views in divided.values():
        for view in views.values():
            assert not view.any()
            view.fill_(1.0)


@pytest.mark.parametrize("change", [(-64, 64), (0, -64)])
def test_a_buffer_that_lies_in_two_extents_is_refused(change: tuple[int, int]) -> None:
    place = (1, 3, SlotKind.ACTIVATIONS, 2, 7, Sharding(), NOTHING_REMADE)
    sizes = extent_bytes(LLAMA, Precision.FP32, *place)
    extents = [torch.zeros(size + more, dtype=torch.uint8) for size, more in zip(sizes, change, strict=True)]
    with pytest.raises(RunError, match="does not lie in one extent"):
        extent_views(extents, LLAMA, Precision.FP32, *place)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_evaluation_needs_only_scratch_and_gives_the_loss(spec: ModelSpec, cuts: list[int]) -> None:
    pipeline = HandPipeline(spec, cuts, [0, 5, 6, 12], batch=2)
    ids = torch.randint(0, spec.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids == 3, -1, ids.flip(1))
    loss = torch.stack([loss for loss in evaluate(pipeline, ids, labels) if loss is not None]).sum()
    torch.testing.assert_close(loss, reference_loss(spec, pipeline.weights, ids, labels))
    assert not any(stage.parameters.gradient_flat.any() for stage in pipeline.stages)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_generation_token_by_token_after_a_prompt(spec: ModelSpec) -> None:
    pipeline = HandPipeline(spec, [0, 3, 6], [0, 4, 5, 6, 7, 8], batch=3)
    ids = torch.randint(0, spec.vocab, (3, 8), generator=torch.Generator().manual_seed(0))
    expected = reference_logits(spec, pipeline.weights, ids)
    for logits, stop in zip(evaluate(pipeline, ids, None), pipeline.bounds[1:], strict=True):
        torch.testing.assert_close(logits, expected[0, stop - 1])


def test_a_workspace_gives_disjoint_aligned_memory_and_refuses_more() -> None:
    workspace = Workspace(256, CPU)
    first = workspace.take(5, dtype=torch.float64).fill_(1.0)
    second = workspace.take(2, 3, dtype=torch.float32).fill_(2.0)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT_BYTES
    assert bool((first == 1.0).all())
    assert workspace.peak_bytes == 2 * ALIGNMENT_BYTES
    with pytest.raises(MemoryError, match="holds 256 bytes, an action needs 448"):
        workspace.take(33, dtype=torch.float64)
    workspace.reset()
    assert workspace.take(1, dtype=torch.float32).data_ptr() == first.data_ptr()
