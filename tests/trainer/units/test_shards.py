"""Stages split over shards, as threads, against the unsliced model under autograd, in fp64.

Rows of a part that hold no token are NaN (`tests.support.stage_pipeline`), so that a read of one shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import RunError
from penstock.core.layout import HEAD_CHUNK_TOKENS, Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, Sharding, unit_collectives
from penstock.trainer.units.collectives import NO_SHARDS, Gather, Request, Scatter, Sum
from tests.support.reference_model import reference_gradients, reference_logits, reference_loss
from tests.support.sharded_pipeline import ShardedPipeline
from tests.support.stage_pipeline import gradient_error
from tests.trainer.units.test_stage_gradients import sample

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
ONE_HEAD = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=1, vocab=24, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=22, ffn_hidden=20, positions=12)
SPECS = [
    pytest.param(LLAMA, id="llama"),
    pytest.param(ONE_HEAD, id="llama with one key head"),
    pytest.param(GPT2, id="gpt2"),
]
SHARDINGS = [
    pytest.param(Sharding(tp, by_tokens), id=f"{tp} {'by tokens' if by_tokens else 'whole'}")
    for tp in (2, 4)
    for by_tokens in (True, False)
]
SLICES = {"whole": [0, 12], "odd": [0, 5, 6, 11, 12], "one token long": list(range(13))}
CUTS = {"half blocks": [0, 2, 5, 6], "every unit": list(range(7))}


def strengthen(pipeline: ShardedPipeline) -> None:
    """Weights so large that every part of the model matters, and norms and biases away from 1 and 0."""
    weights = pipeline.weights
    for name, tensor in weights.items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    pipeline.load(weights)


def check_against_reference(pipeline: ShardedPipeline, seed: int = 0, limit: float = 1e-10) -> None:
    ids, labels = sample(pipeline.spec, 2 * pipeline.batch, pipeline.bounds[-1], seed)
    scale = 1 / max(int((labels >= 0).sum()), 1)
    weights = {name: tensor.double() for name, tensor in pipeline.weights.items()}
    expected_loss, expected = reference_gradients(pipeline.spec, weights, ids, labels, scale)
    torch.testing.assert_close(pipeline.step(ids, labels, scale), expected_loss, rtol=limit, atol=limit)
    assert gradient_error({name: g.double() for name, g in pipeline.gradients.items()}, expected) <= limit


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("bounds", SLICES.values(), ids=SLICES)
def test_loss_and_every_gradient(spec: ModelSpec, sharding: Sharding, bounds: list[int]) -> None:
    pipeline = ShardedPipeline(spec, sharding, [0, 3, 6], bounds)
    strengthen(pipeline)
    check_against_reference(pipeline)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_recompute_of_several_sequences_in_any_partition(spec: ModelSpec, sharding: Sharding, cuts: list[int]) -> None:
    """Three sequences of 5, 1 and 6 tokens: a shard's rows end and begin in the middle of sequences."""
    pipeline = ShardedPipeline(spec, sharding, cuts, [0, 5, 6, 12], batch=3, recompute=True)
    strengthen(pipeline)
    check_against_reference(pipeline)


@st.composite
def _pipelines(draw: st.DrawFn) -> ShardedPipeline:
    family = draw(st.sampled_from(Family))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads = tp * draw(st.integers(1, 2))
    kv_heads = heads
    if family is Family.LLAMA:
        divisors = [count for count in range(1, heads + 1) if not heads % count]
        kv_heads = draw(st.sampled_from([count for count in divisors if not count % tp or not tp % count]))
    spec = ModelSpec(
        family=family,
        layers=draw(st.integers(1, 2)),
        hidden=2 * heads,
        heads=heads,
        kv_heads=kv_heads,
        vocab=draw(st.integers(tp, 19)),
        ffn_hidden=tp * draw(st.integers(1, 3)),
    )
    assert spec.can_be_sharded(tp)
    length = draw(st.integers(2, 10))
    return ShardedPipeline(
        spec,
        Sharding(tp, draw(st.booleans())),
        sorted({0, spec.num_units, *draw(st.lists(st.integers(1, spec.num_units - 1), max_size=3))}),
        sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=4))}),
        batch=draw(st.integers(1, 3)),
        recompute=draw(st.booleans()),
    )


@settings(max_examples=20)
@given(_pipelines(), st.integers(0, 2**30))
def test_any_model_partition_and_slicing(pipeline: ShardedPipeline, seed: int) -> None:
    strengthen(pipeline)
    check_against_reference(pipeline, seed)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_slices_longer_than_a_head_chunk(sharding: Sharding) -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=4, kv_heads=2, vocab=7, ffn_hidden=8)
    pipeline = ShardedPipeline(spec, sharding, [0, 2, 4], [0, 300, 2 * HEAD_CHUNK_TOKENS])
    strengthen(pipeline)
    check_against_reference(pipeline)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("precision", "limit"), [(Precision.FP32, 1e-5), (Precision.BF16, 0.05)])
def test_narrower_types_are_close(spec: ModelSpec, sharding: Sharding, precision: Precision, limit: float) -> None:
    check_against_reference(ShardedPipeline(spec, sharding, [0, 3, 6], [0, 5, 12], precision=precision), limit=limit)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_evaluation_and_generation(spec: ModelSpec, sharding: Sharding) -> None:
    pipeline = ShardedPipeline(spec, sharding, [0, 3, 6], [0, 5, 6, 12], batch=2)
    ids, labels = sample(spec, 2)
    found = pipeline.evaluate(ids, labels)
    losses = torch.stack([torch.stack([loss for loss in shard if loss is not None]) for shard in found])
    assert losses.shape == (sharding.tp, 3)
    assert not losses[1:].any(), "a loss counts once"
    torch.testing.assert_close(losses.sum(), reference_loss(spec, pipeline.weights, ids, labels))
    first, *others = pipeline.evaluate(ids, None)
    expected = reference_logits(spec, pipeline.weights, ids)[0]
    for logits, stop in zip(first, pipeline.bounds[1:], strict=True):
        torch.testing.assert_close(logits, expected[stop - 1])
    assert all(logits is None for shard in others for logits in shard)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_logits_far_apart_on_different_shards(sharding: Sharding) -> None:
    """The label's probability vanishes in fp32; its loss is the difference of the logits."""
    pipeline = ShardedPipeline(LLAMA, sharding, [0, 5, 6], [0, 1], precision=Precision.FP32)
    weights = pipeline.weights
    weights["head.weight"].zero_()
    weights["head.weight"][0] = 1000.0 * weights["embedding.weight"][5].sign()
    pipeline.load(weights)
    loss = pipeline.step(torch.tensor([[5]]), torch.tensor([[LLAMA.vocab - 1]]), 1.0)
    assert float(loss) > 5000
    assert all(bool(gradient.isfinite().all()) for gradient in pipeline.gradients.values())


def _expected_collectives(spec: ModelSpec, sharding: Sharding) -> Iterator[Collective]:
    """Collectives of a step of one slice with one unit per stage: F in order, then I and W in reverse order."""
    for unit in spec.units:
        yield from unit_collectives(unit.kind, Kind.F, sharding)
    for unit in reversed(spec.units):
        for kind in (Kind.I, Kind.W):
            yield from unit_collectives(unit.kind, kind, sharding)


def _hidden_states(requests: Sequence[Request], spec: ModelSpec) -> list[Request]:
    """All but what the head's shards share of a chunk, which is as wide as the chunk has tokens."""
    return [each for each in requests if not isinstance(each, Gather) or each.all_PH.shape[1] == spec.hidden]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_passes_ask_for_the_declared_collectives(spec: ModelSpec, sharding: Sharding, batch: int) -> None:
    pipeline = ShardedPipeline(spec, sharding, range(spec.num_units + 1), [0, 11], batch=batch)
    pipeline.step(*sample(spec, batch, 11), 1.0)
    tokens = 11 * batch
    rows, padded = sharding.rows(tokens), sharding.padded_rows(tokens)
    for member in pipeline.rank.members:
        requests = _hidden_states(member.requests, spec)
        assert [request.collective for request in requests] == list(_expected_collectives(spec, sharding))
        assert len(member.requests) - len(requests) == 1, "one chunk of the head"
        for request in requests:
            if isinstance(request, Scatter):
                assert request.partial_PH.shape == (padded, spec.hidden)
                assert request.own_RH.shape == (rows, spec.hidden)
            else:
                tensor = request.tensor if isinstance(request, Sum) else request.all_PH
                assert tensor.shape == (padded, spec.hidden)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_recompute_asks_for_what_it_remakes(spec: ModelSpec, sharding: Sharding) -> None:
    """The same as F, except for the output that is never read and the head."""
    asked = {}
    for recompute in (False, True):
        pipeline = ShardedPipeline(spec, sharding, [0, 3, 6], [0, 11], recompute=recompute)
        pipeline.step(*sample(spec, 1, 11), 1.0)
        asked[recompute] = len(pipeline.rank.members[0].requests)
    remade = [spec.units[0:3], spec.units[3:5]]
    expected = sum(
        len(unit_collectives(unit.kind, Kind.F, sharding)) - (unit is units[-1]) for units in remade for unit in units
    )
    assert asked[True] - asked[False] == expected


def test_one_shard_may_ask_for_nothing() -> None:
    with pytest.raises(RunError, match="one shard asks for a gather"):
        NO_SHARDS.start(Gather(torch.zeros(2, 2)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("precision", [Precision.BF16])
def test_the_workspace_is_exactly_as_large_as_declared(
    spec: ModelSpec, sharding: Sharding, precision: Precision
) -> None:
    """The first shard has as many rows as any; of the vocabulary each takes memory for the largest part."""
    for cuts in CUTS.values():
        pipeline = ShardedPipeline(spec, sharding, cuts, [0, 5, 12], batch=2, precision=precision)
        pipeline.step(*sample(spec, 2), scale=0.1)
        first, *others = pipeline.shards
        for units, workspace in zip(pairwise(cuts), first.workspaces, strict=True):
            assert workspace.peak_bytes == workspace.num_bytes, f"units {units}"
        for other in others:
            assert all(workspace.peak_bytes <= workspace.num_bytes for workspace in other.workspaces)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tp", [2, 4])
def test_replicated_parameters_get_the_same_bits_on_all_shards(spec: ModelSpec, tp: int) -> None:
    """So weights that are not reduced over shards never diverge."""
    sharding = Sharding(tp, sequence_parallel=False)
    pipeline = ShardedPipeline(spec, sharding, [0, 3, 6], [0, 5, 12], precision=Precision.BF16)
    pipeline.step(*sample(spec, 2), 0.1)
    for index in range(2):
        first, *others = pipeline.stage(index)
        whole = [name for name, parameter in first.declared.items() if not parameter.blocks]
        assert all(torch.equal(other.gradients[name], first.gradients[name]) for other in others for name in whole)
