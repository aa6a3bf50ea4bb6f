"""Sliced, staged, hand-written gradients against the unsliced model under autograd, in fp64."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.layout import Precision, SlotKind
from penstock.core.model import Family, ModelSpec
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.units.backends import PlainAttention
from penstock.trainer.units.collectives import NO_SHARDS, run_pass
from tests.support.reference_model import reference_gradients
from tests.support.stage_pipeline import CPU, HandPipeline, gradient_error

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=2, vocab=23, ffn_hidden=20, positions=12)
SPECS = [pytest.param(LLAMA, id="llama"), pytest.param(GPT2, id="gpt2")]
LENGTH = 12
SLICES = {"whole": [0, 12], "equal": [0, 4, 8, 12], "unequal": [0, 5, 6, 12], "one token long": list(range(13))}
CUTS = {"one stage": [0, 6], "two": [0, 3, 6], "half blocks": [0, 2, 5, 6], "every unit": list(range(7))}


def sample(spec: ModelSpec, num_sequences: int, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab, (num_sequences, length), generator=generator)
    labels = torch.randint(0, spec.vocab, (num_sequences, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -1
    return ids, labels


def strengthen(pipeline: HandPipeline) -> None:
    """Weights so large that every part of the model matters, and norms and biases away from 1 and 0."""
    for stage in pipeline.stages:
        for name, tensor in stage.parameters.master.items():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        stage.parameters.refresh_compute()


def check_against_reference(pipeline: HandPipeline, ids: Tensor, labels: Tensor, limit: float = 1e-10) -> None:
    scale = 1 / max(int((labels >= 0).sum()), 1)
    loss = pipeline.step(ids, labels, scale)
    weights = {name: tensor.double() for name, tensor in pipeline.weights.items()}
    expected_loss, expected = reference_gradients(pipeline.spec, weights, ids, labels, scale)
    torch.testing.assert_close(loss, expected_loss, rtol=limit, atol=limit)
    assert gradient_error(pipeline.gradients, expected) <= limit


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("head_parts", [1, 2])
@pytest.mark.parametrize("precision", [Precision.FP64, Precision.BF16])
def test_a_scale_on_the_device_has_the_effect_of_a_number(
    spec: ModelSpec, head_parts: int, precision: Precision
) -> None:
    """A power of two rounds nothing, so that gradients have the same bits wherever it is multiplied in."""
    ids, labels = sample(spec, 2)
    divided = spec.divided(head_parts)
    number, tensor = (
        HandPipeline(divided, [0, 3, divided.num_units], [0, 5, 12], batch=2, precision=precision) for _ in range(2)
    )
    scale = torch.full((), 2.0**-7, dtype=accumulate_dtype(precision))
    assert torch.equal(tensor.step(ids, labels, scale), number.step(ids, labels, 2.0**-7))
    for name, gradient in number.gradients.items():
        assert torch.equal(tensor.gradients[name], gradient), name


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("bounds", SLICES.values(), ids=SLICES)
def test_loss_and_every_gradient(spec: ModelSpec, cuts: list[int], bounds: list[int]) -> None:
    pipeline = HandPipeline(spec, cuts, bounds)
    strengthen(pipeline)
    check_against_reference(pipeline, *sample(spec, 2))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_of_three_sequences(spec: ModelSpec, recompute: bool) -> None:
    pipeline = HandPipeline(spec, [0, 3, 6], [0, 5, 6, 12], batch=3, recompute=recompute)
    strengthen(pipeline)
    check_against_reference(pipeline, *sample(spec, 6))


def test_full_multi_head_llama_and_plain_attention() -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=12, heads=3, vocab=11)
    backend = PlainAttention(CPU, torch.float64, LENGTH)
    pipeline = HandPipeline(spec, [0, 2, 4], [0, 7, 12], batch=2, backend=backend)
    strengthen(pipeline)
    check_against_reference(pipeline, *sample(spec, 2))


@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[HandPipeline, int, int]:
    """A pipeline over a random model, partition and slicing, with a number of micro-batches and a data seed."""
    family = draw(st.sampled_from(Family))
    groups = draw(st.sampled_from([1, 2]))
    spec = ModelSpec(
        family=family,
        layers=draw(st.integers(1, 3)),
        hidden=8 * groups,
        heads=2 * groups,
        kv_heads=groups if family is Family.LLAMA else 2 * groups,
        vocab=draw(st.integers(2, 17)),
        ffn_hidden=draw(st.integers(1, 9)),
    )
    length = draw(st.integers(2, 10))
    cuts = sorted({0, spec.num_units, *draw(st.lists(st.integers(1, spec.num_units - 1), max_size=4))})
    bounds = sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=5))})
    pipeline = HandPipeline(
        spec, cuts, bounds, batch=draw(st.integers(1, 3)), seed=draw(st.integers(0, 99)), recompute=draw(st.booleans())
    )
    return pipeline, draw(st.integers(1, 2)), draw(st.integers(0, 2**30))


@pytest.mark.parametrize("spec", SPECS)
def test_where_no_label_counts_there_is_no_gradient(spec: ModelSpec) -> None:
    pipeline = HandPipeline(spec, [0, 3, 6], [0, 5, 12])
    ids, labels = sample(spec, 2)
    check_against_reference(pipeline, ids, torch.full_like(labels, -1))
    assert gradient_error(pipeline.gradients, pipeline.gradients) == 0.0


@settings(max_examples=40)
@given(_pipelines())
def test_any_partition_and_slicing(case: tuple[HandPipeline, int, int]) -> None:
    pipeline, num_microbatches, seed = case
    strengthen(pipeline)
    ids, labels = sample(pipeline.spec, num_microbatches * pipeline.batch, pipeline.bounds[-1], seed)
    check_against_reference(pipeline, ids, labels)


@pytest.mark.parametrize("spec", SPECS)
def test_recompute_gives_the_same_bits(spec: ModelSpec) -> None:
    found = []
    for recompute in (False, True):
        pipeline = HandPipeline(spec, [0, 2, 6], [0, 5, 6, 12], precision=Precision.FP32, recompute=recompute)
        loss = pipeline.step(*sample(spec, 2), scale=0.1)
        found.append((loss, pipeline.gradients))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_deferred_weight_gradients_in_any_order(spec: ModelSpec, seed: int) -> None:
    at_once = HandPipeline(spec, [0, 3, 6], [0, 4, 9, 12])
    deferred = HandPipeline(spec, [0, 3, 6], [0, 4, 9, 12])
    ids, labels = sample(spec, 2)
    at_once.step(ids, labels, 0.1)
    deferred.step(ids, labels, 0.1, weight_order=lambda todo: random.Random(seed).sample(todo, len(todo)))
    assert gradient_error(deferred.gradients, at_once.gradients) <= 1e-14


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("precision", "limit"), [(Precision.FP32, 1e-5), (Precision.BF16, 0.05)])
def test_narrower_types_are_close(spec: ModelSpec, precision: Precision, limit: float) -> None:
    pipeline = HandPipeline(spec, [0, 3, 6], [0, 5, 6, 12], batch=2, precision=precision)
    ids, labels = sample(spec, 2)
    loss = pipeline.step(ids, labels, 1 / 20)
    weights = {name: tensor.double() for name, tensor in pipeline.weights.items()}
    expected_loss, expected = reference_gradients(spec, weights, ids, labels, 1 / 20)
    torch.testing.assert_close(loss, expected_loss, rtol=limit, atol=0)
    assert gradient_error(pipeline.gradients, expected) <= limit
    assert all(gradient.dtype == torch.float32 for gradient in pipeline.gradients.values())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("precision", Precision)
def test_first_loss_has_the_same_bits_on_any_number_of_stages(spec: ModelSpec, precision: Precision) -> None:
    ids, labels = sample(spec, 2)
    pipelines = [HandPipeline(spec, cuts, [0, 5, 12], precision=precision) for cuts in CUTS.values()]
    losses = [pipeline.step(ids, labels, 0.1) for pipeline in pipelines]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("precision", Precision)
def test_the_workspace_is_exactly_as_large_as_declared(spec: ModelSpec, precision: Precision) -> None:
    for cuts in CUTS.values():
        pipeline = HandPipeline(spec, cuts, [0, 5, 12], batch=2, precision=precision)
        pipeline.step(*sample(spec, 2), scale=0.1)
        for (first, stop), workspace in zip(pairwise(cuts), pipeline.workspaces, strict=True):
            assert workspace.peak_bytes == workspace.num_bytes, f"units {first} to {stop}"


def test_slices_longer_than_a_query_block_and_a_head_chunk() -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=2, kv_heads=1, vocab=5, ffn_hidden=6)
    pipeline = HandPipeline(spec, [0, 2, 4], [0, 300, 1100])
    strengthen(pipeline)
    check_against_reference(pipeline, *sample(spec, 1, length=1100))


def test_the_ends_ask_for_what_they_need() -> None:
    pipeline = HandPipeline(LLAMA, [0, 6], [0, 12])
    with pytest.raises(ValueError, match="needs token ids"):
        run_pass(pipeline.stages[0].forward({}, 0, 12), NO_SHARDS)
    last = HandPipeline(LLAMA, [0, 5, 6], [0, 12]).stages[-1]
    slot = {SlotKind.INPUT: {5: {"x": torch.zeros(12, 16)}}, SlotKind.HEAD_GRADIENT: {5: {"h": torch.zeros(12, 16)}}}
    with pytest.raises(ValueError, match="needs labels"):
        run_pass(last.forward(slot, 0, 12), NO_SHARDS)
