"""Parts of a divided head in any stages, as threads where there are shards, against the unsliced model in fp64."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import HEAD_CHUNK_TOKENS, Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.schedule import Kind
from penstock.core.scratch import scratch_bytes
from penstock.core.sharding import Sharding, unit_collectives
from penstock.trainer.units import head_parts
from penstock.trainer.units.collectives import Gather
from penstock.trainer.units.division import vocabulary_parts
from penstock.trainer.units.linear import accumulate_product
from tests.support.reference_model import reference_gradients, reference_logits, reference_loss
from tests.support.sharded_pipeline import ShardedPipeline
from tests.support.stage_pipeline import HandPipeline, gradient_error
from tests.trainer.units.test_shards import check_against_reference, strengthen
from tests.trainer.units.test_stage_gradients import sample

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=22, ffn_hidden=20, positions=12)
SPECS = [pytest.param(LLAMA, id="llama"), pytest.param(GPT2, id="gpt2")]
ALONE, BY_TOKENS, REPLICATED = Sharding(1), Sharding(2), Sharding(2, sequence_parallel=False)
SHARDINGS = [
    pytest.param(ALONE, id="alone"),
    pytest.param(BY_TOKENS, id="by tokens"),
    pytest.param(REPLICATED, id="replicated"),
]
CUTS = {
    "blocks before the first part": (2, [0, 3, 6, 7]),
    "a stage for every part": (3, [0, 5, 6, 7, 8]),
    "two parts in one stage": (3, [0, 5, 7, 8]),
    "the last two in one stage": (3, [0, 4, 6, 8]),
    "all in one stage": (2, [0, 5, 7]),
    "one stage": (2, [0, 7]),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
def test_loss_and_every_gradient(spec: ModelSpec, sharding: Sharding, recompute: bool, cuts: str) -> None:
    """Three sequences of 5 and 1 tokens: a shard's rows end and begin in the middle of sequences."""
    parts, bounds = CUTS[cuts]
    pipeline = ShardedPipeline(spec.divided(parts), sharding, bounds, [0, 5, 6], batch=3, recompute=recompute)
    strengthen(pipeline)
    check_against_reference(pipeline)


@st.composite
def _pipelines(draw: st.DrawFn) -> ShardedPipeline:
    tp = draw(st.sampled_from([1, 2, 3]))
    parts = draw(st.integers(2, 5))
    spec = ModelSpec(
        family=draw(st.sampled_from(Family)),
        layers=1,
        hidden=2 * tp,
        heads=tp,
        vocab=draw(st.integers(tp * parts, tp * parts + 9)),
        ffn_hidden=tp,
    ).divided(parts)
    assert spec.can_be_sharded(tp)
    length = draw(st.integers(2, 7))
    return ShardedPipeline(
        spec,
        Sharding(tp, draw(st.booleans())),
        sorted({0, spec.num_units, *draw(st.lists(st.integers(1, spec.num_units - 1), max_size=4))}),
        sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=3))}),
        batch=draw(st.integers(1, 3)),
        recompute=draw(st.booleans()),
    )


@settings(max_examples=30)
@given(_pipelines(), st.integers(0, 2**30))
def test_any_partition_and_slicing(pipeline: ShardedPipeline, seed: int) -> None:
    strengthen(pipeline)
    check_against_reference(pipeline, seed)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("recompute", [False, True])
def test_slices_longer_than_a_chunk(sharding: Sharding, recompute: bool) -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=4, kv_heads=2, vocab=7, ffn_hidden=8).divided(3)
    bounds = [0, 300, 2 * HEAD_CHUNK_TOKENS]
    pipeline = ShardedPipeline(spec, sharding, [0, 2, 5, 6], bounds, recompute=recompute)
    strengthen(pipeline)
    check_against_reference(pipeline)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("precision", "limit"), [(Precision.FP32, 1e-5), (Precision.BF16, 0.05)])
def test_narrower_types_are_close(spec: ModelSpec, sharding: Sharding, precision: Precision, limit: float) -> None:
    cuts = [0, 4, 6, 7, 8]
    check_against_reference(
        ShardedPipeline(spec.divided(3), sharding, cuts, [0, 5, 12], precision=precision), limit=limit
    )


def test_weight_gradients_may_come_at_any_time_after_their_input_gradients() -> None:
    pipelines = [HandPipeline(LLAMA.divided(3), [0, 4, 6, 7, 8], [0, 5, 12], batch=1) for _ in range(2)]
    ids, labels = sample(LLAMA, 2)
    for pipeline, order in zip(pipelines, (None, reversed), strict=True):
        pipeline.step(ids, labels, 0.1, order)
    at_once, late = (pipeline.gradients for pipeline in pipelines)
    for name, gradient in at_once.items():
        torch.testing.assert_close(late[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("cuts", [[0, 4, 6, 8], [0, 8]])
def test_evaluation_and_generation(spec: ModelSpec, sharding: Sharding, cuts: list[int]) -> None:
    pipeline = ShardedPipeline(spec.divided(3), sharding, cuts, [0, 5, 6, 12], batch=2)
    strengthen(pipeline)
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
@pytest.mark.parametrize("likeliest", [0, 9, 22])
@pytest.mark.parametrize("label", [0, 9, 22])
def test_logits_far_apart_in_different_parts(sharding: Sharding, likeliest: int, label: int) -> None:
    """One token has all of the probability: that of another vanishes in fp32, its loss is the difference of logits."""
    pipeline = ShardedPipeline(LLAMA.divided(3), sharding, [0, 5, 6, 7, 8], [0, 1], precision=Precision.FP32)
    weights = pipeline.weights
    weights["head.weight"].zero_()
    weights["head.weight"][likeliest] = 1000.0 * weights["embedding.weight"][5].sign()
    pipeline.load(weights)
    loss = pipeline.step(torch.tensor([[5]]), torch.tensor([[label]]), 1.0)
    assert float(loss) == 0 if label == likeliest else float(loss) > 5000
    gradients = pipeline.gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert bool(gradients["head.weight"].any()) == (label != likeliest)


def errors_far_from_zero(
    parts: int, sharding: Sharding, sign: int, precision: Precision, size: float, label: int = 9
) -> list[float]:
    """Return the errors of one token's loss and of all gradients, against fp64, for logits near ``size``."""
    spec = LLAMA.divided(parts)
    cuts = [0, 5, *range(6, spec.num_units + 1)]
    pipeline = ShardedPipeline(spec, sharding, cuts, [0, 2, 3], precision=precision)
    weights = {name: tensor.double() for name, tensor in pipeline.weights.items()}
    ids, labels = torch.tensor([[5, 5, 5]]), torch.tensor([[-1, label, -1]])
    ahead = weights["embedding.weight"][5].sign().expand_as(weights["head.weight"])
    one = float(reference_logits(spec, weights | {"head.weight": ahead}, ids).mean())
    weights["head.weight"] += sign * size / one * ahead
    pipeline.load(weights)
    weights = {name: tensor.double() for name, tensor in pipeline.weights.items()}
    logits = reference_logits(spec, weights, ids)
    assert bool((sign * logits > 0.9 * size).all())
    expected_loss, expected = reference_gradients(spec, weights, ids, labels, 1.0)
    loss = float(pipeline.step(ids, labels, 1.0).double() - expected_loss) / float(expected_loss)
    return [abs(loss), gradient_error({name: each.double() for name, each in pipeline.gradients.items()}, expected)]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("precision", "size", "limit"), [(Precision.FP32, 100, 1e-2), (Precision.FP64, 1000, 1e-9)])
def test_all_logits_far_from_zero_where_some_labels_do_not_count(
    sharding: Sharding, parts: int, sign: int, precision: Precision, size: float, limit: float
) -> None:
    """Beyond what the type has an exponential of. What the rows share cancels, which costs digits."""
    assert max(errors_far_from_zero(parts, sharding, sign, precision, size)) <= limit


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [100, 700])
def test_parts_lose_no_more_digits_to_large_logits_than_a_whole_head(sharding: Sharding, size: float) -> None:
    """The log of a sum of exponentials would be rounded by the size of the highest logit.

    Means over several labels, since one error is partly chance: which products are summed first depends on the machine.
    """
    draws = list(product((-1, 1), (1, 4, 9)))
    whole, *divided = (
        torch.tensor(
            [errors_far_from_zero(parts, sharding, sign, Precision.FP32, size, at) for sign, at in draws]
        ).mean(0)
        for parts in (1, 2, 3, 5)
    )
    for errors in divided:
        assert bool((errors <= 2 * whole).all())


def test_a_target_that_is_predicted_well_keeps_its_small_gradient_in_bf16() -> None:
    """A softmax of nearly 1 is never added to others and then taken away."""
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=32, heads=4, vocab=12, ffn_hidden=8)
    ids, _ = sample(spec, 1, 12)
    weights = {name: tensor.bfloat16().double() for name, tensor in HandPipeline(spec, [0, 4], [0, 12]).weights.items()}
    weights["head.weight"] = (400.0 * weights["head.weight"]).bfloat16().double()
    labels = reference_logits(spec, weights, ids).argmax(-1)
    found = {}
    for parts, precision in ((1, Precision.FP64), (1, Precision.BF16), (3, Precision.BF16)):
        divided = spec.divided(parts)
        pipeline = HandPipeline(divided, range(divided.num_units + 1), [0, 12], precision=precision)
        for stage in pipeline.stages:
            stage.parameters.load(weights)
        loss = pipeline.step(ids, labels, 1.0)
        found[parts, precision] = pipeline.gradients["embedding.weight"].double()
    assert 0 < float(loss) < 1.0, "all targets are predicted well"
    exact = found[1, Precision.FP64]
    errors = {parts: float((found[parts, Precision.BF16] - exact).norm() / exact.norm()) for parts in (1, 3)}
    assert errors[3] < 1.5 * errors[1]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", [BY_TOKENS, REPLICATED])
def test_passes_ask_for_the_declared_collectives(spec: ModelSpec, sharding: Sharding) -> None:
    """Collectives of a step of one slice with one part per stage, without those of a chunk."""
    divided = spec.divided(3)
    pipeline = ShardedPipeline(divided, sharding, range(divided.num_units + 1), [0, 11])
    pipeline.step(*sample(spec, 1, 11), 1.0)
    expected = [
        collective
        for units, kinds in ((divided.units, [Kind.F]), (divided.units[::-1], [Kind.I, Kind.W]))
        for unit in units
        for kind in kinds
        for collective in unit_collectives(unit.kind, kind, sharding, head_parts=3, part=unit.part)
    ]
    for member in pipeline.rank.members:
        found = [
            each for each in member.requests if not isinstance(each, Gather) or each.all_PH.shape[1] == spec.hidden
        ]
        assert [request.collective for request in found] == expected
        assert len(member.requests) - len(found) == 3, "one chunk of each part"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_workspace_is_exactly_as_large_as_declared(
    spec: ModelSpec, sharding: Sharding, precision: Precision
) -> None:
    divided = spec.divided(3)
    for cuts in (range(divided.num_units + 1), [0, 5, 7, 8], [0, 5, 6, 8]):
        pipeline = ShardedPipeline(divided, sharding, cuts, [0, 5, 12], batch=2, precision=precision)
        pipeline.step(*sample(spec, 2), scale=0.1)
        for number, (units, workspace) in enumerate(zip(pairwise(cuts), pipeline.shards[0].workspaces, strict=True)):
            assert workspace.peak_bytes == workspace.num_bytes, f"units {units}"
            assert all(other.workspaces[number].peak_bytes <= workspace.num_bytes for other in pipeline.shards)


def test_the_weight_gradient_in_bf16_widens_the_probabilities_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the product of narrow types makes wide copies of its factors."""
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=2, vocab=40, ffn_hidden=8).divided(2)
    seen: list[int] = []

    def recorded(gradient_OI: torch.Tensor, dy_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        seen.append(len(dy_TO))
        accumulate_product(gradient_OI, dy_TO, x_TI)

    monkeypatch.setattr(head_parts, "accumulate_product", recorded)
    pipeline = HandPipeline(spec, [0, 3, 5], [0, 2 * HEAD_CHUNK_TOKENS + 1], precision=Precision.BF16)
    pipeline.step(*sample(spec, 1, 2 * HEAD_CHUNK_TOKENS + 1), 1.0)
    assert sorted(seen) == [1, 1, *[HEAD_CHUNK_TOKENS] * 4]


def test_a_forward_without_kept_probabilities_has_scratch_memory_for_one_chunk() -> None:
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=2, vocab=4096, ffn_hidden=8).divided(2)
    tokens = 4 * HEAD_CHUNK_TOKENS
    needed = scratch_bytes(spec, Precision.FP32, 3, 4, 1, tokens)
    probabilities = HEAD_CHUNK_TOKENS * 2048 * 4
    assert probabilities < needed < 1.2 * probabilities


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shards_of_a_tied_embedding_find_their_rows_of_every_part(tp: int, parts: int) -> None:
    spec = ModelSpec(family=Family.GPT2, layers=1, hidden=6, heads=6, vocab=31, positions=4).divided(parts)
    pipeline = ShardedPipeline(spec, Sharding(tp), [0, 1, spec.num_units], [0, 1])
    ids = torch.arange(-1, 31)
    held = torch.zeros(len(ids), dtype=torch.int64)
    for shard, own in enumerate(pipeline.stage(0)):
        matrix, whole = own.declared["embedding.weight"], pipeline.weights["embedding.weight"]
        vocabulary = vocabulary_parts(matrix, tp)[shard]
        is_own = vocabulary.holds(ids)
        held += is_own
        rows = vocabulary.rows(ids)
        assert bool(((rows >= 0) & (rows < vocabulary.size)).all())
        assert torch.equal(own.master["embedding.weight"][rows[is_own]], whole[ids[is_own]])
        for part in range(parts):
            place = matrix.place_of(spec.part_rows(part), tp, shard)
            (of_part,) = vocabulary_parts(matrix, tp, spec.part_rows(part))[shard].ranges
            assert torch.equal(own.master["embedding.weight"][place], whole[of_part.start : of_part.stop])
    assert held.tolist() == [0] + [1] * 31
