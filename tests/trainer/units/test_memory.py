"""Views are the layout's buffers, side by side and aligned; forwards that leave nothing behind; the workspace."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.layout import ALIGNMENT_BYTES, Precision, SlotKind, stage_slot_buffers, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.trainer.stage import Stage
from penstock.trainer.units.views import scratch_bytes, scratch_views, slot_views
from penstock.trainer.units.workspace import Workspace
from tests.support.reference_model import reference_logits, reference_loss
from tests.support.stage_pipeline import CPU, HandPipeline

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=23, positions=12)


@given(
    spec=st.sampled_from([LLAMA, GPT2]),
    precision=st.sampled_from(Precision),
    slot=st.sampled_from(SlotKind),
    span=st.sets(st.integers(0, 6), min_size=2, max_size=2).map(sorted),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 7),
)
def test_slot_views_are_the_declared_buffers_without_overlap(
    spec: ModelSpec, precision: Precision, slot: SlotKind, span: list[int], batch: int, tokens: int
) -> None:
    first, stop = span
    num_bytes = stage_slot_bytes(spec, precision, first, stop, slot, batch, tokens)
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    views = slot_views(memory, spec, precision, first, stop, slot, batch, tokens)
    declared = stage_slot_buffers(spec, first, stop, slot, batch, tokens)
    assert sum(len(named) for named in views.values()) == len(declared)
    for index, buffer in declared:
        view = views[index][buffer.name]
        assert tuple(view.shape) == buffer.shape
        assert view.numel() * view.element_size() == buffer.num_bytes(precision)
        assert (view.data_ptr() - memory.data_ptr()) % ALIGNMENT_BYTES == 0
        assert not view.any(), "overlaps a buffer filled before"
        view.fill_(1.0)


def _prefix_views(pipeline: HandPipeline, stage: Stage, batch: int) -> dict[int, dict[str, Tensor]]:
    place = (stage.first, stage.stop, SlotKind.KEYS_VALUES, batch, pipeline.bounds[-1])
    memory = torch.full((stage_slot_bytes(pipeline.spec, pipeline.precision, *place),), 0xFF, dtype=torch.uint8)
    return slot_views(memory, pipeline.spec, pipeline.precision, *place)


def _slice_views(
    pipeline: HandPipeline, stage: Stage, kv: dict[int, dict[str, Tensor]], batch: int, tokens: int
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    """All an evaluation needs: scratch, hidden states in and out, keys and values."""
    spec, precision = pipeline.spec, pipeline.precision
    memory = torch.full((scratch_bytes(spec, precision, batch, tokens),), 0xFF, dtype=torch.uint8)
    views = scratch_views(memory, spec, precision, stage.first, stage.stop, batch, tokens)
    for slot in (SlotKind.INPUT, SlotKind.OUTPUT):
        place = (stage.first, stage.stop, slot, batch, tokens)
        hidden = torch.full((stage_slot_bytes(spec, precision, *place),), 0xFF, dtype=torch.uint8)
        views[slot] = slot_views(hidden, spec, precision, *place)
    views[SlotKind.KEYS_VALUES] = kv
    return views


def _evaluate(pipeline: HandPipeline, ids: Tensor, labels: Tensor | None) -> list[Tensor]:
    """Per slice what the last stage returns: its loss, or without labels the logits that follow sequence 0."""
    batch = ids.shape[0]
    prefixes = [_prefix_views(pipeline, stage, batch) for stage in pipeline.stages]
    found: list[Tensor] = []
    for start, stop in pairwise(pipeline.bounds):
        sent = None
        for stage, kv in zip(pipeline.stages, prefixes, strict=True):
            views = _slice_views(pipeline, stage, kv, batch, stop - start)
            if sent is not None:
                views[SlotKind.INPUT][stage.first]["x"].copy_(sent)
            some_ids = ids[:, start:stop]
            if labels is None:
                result = stage.logits_after(views, start, stop, position=stop - 1, token_ids=some_ids)
                result = None if result is None else result.clone()
            else:
                result = stage.evaluate(views, start, stop, token_ids=some_ids, labels=labels[:, start:stop])
            sent = views[SlotKind.OUTPUT][stage.stop - 1]["y"]
        assert result is not None
        found.append(result)
    return found


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_evaluation_needs_only_scratch_and_gives_the_loss(spec: ModelSpec, cuts: list[int]) -> None:
    pipeline = HandPipeline(spec, cuts, [0, 5, 6, 12], batch=2)
    ids = torch.randint(0, spec.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids == 3, -1, ids.flip(1))
    loss = torch.stack(_evaluate(pipeline, ids, labels)).sum()
    torch.testing.assert_close(loss, reference_loss(spec, pipeline.weights, ids, labels))
    assert not any(stage.parameters.gradient_flat.any() for stage in pipeline.stages)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_generation_token_by_token_after_a_prompt(spec: ModelSpec) -> None:
    pipeline = HandPipeline(spec, [0, 3, 6], [0, 4, 5, 6, 7, 8], batch=3)
    ids = torch.randint(0, spec.vocab, (3, 8), generator=torch.Generator().manual_seed(0))
    expected = reference_logits(spec, pipeline.weights, ids)
    for logits, stop in zip(_evaluate(pipeline, ids, None), pipeline.bounds[1:], strict=True):
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
