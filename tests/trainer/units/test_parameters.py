"""Flat parameters: one start for every partition, the order of the flat buffers, loading by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.buckets import completed_by_units
from penstock.core.errors import UserError
from penstock.core.layout import Precision, num_parameters, shared_parameters, stage_parameters
from penstock.core.model import Family, ModelSpec
from penstock.core.replicas import BLOCK, largest_shard
from penstock.core.schedule import Part
from penstock.core.sharding import Sharding
from penstock.trainer.parameters import StageParameters
from tests.support.sharded_pipeline import joined

CPU = torch.device("cpu")
LLAMA = ModelSpec(family=Family.LLAMA, layers=3, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=3, hidden=16, heads=4, vocab=23, positions=9)


def _make(
    spec: ModelSpec, first: int, stop: int, precision: Precision = Precision.FP32, seed: int = 0
) -> StageParameters:
    return StageParameters(spec, first, stop, precision=precision, device=CPU, seed=seed)


@given(st.sampled_from([LLAMA, GPT2]), st.sets(st.integers(1, 7)))
def test_every_partition_starts_from_the_same_weights(spec: ModelSpec, inner_cuts: set[int]) -> None:
    whole = _make(spec, 0, spec.num_units)
    seen: set[str] = set()
    for first, stop in pairwise(sorted({0, spec.num_units, *inner_cuts})):
        part = _make(spec, first, stop)
        assert part.compute_flat.numel() == stage_parameters(spec, first, stop)
        assert all(torch.equal(part.master[name], whole.master[name]) for name in part.master)
        seen |= part.master.keys()
    assert seen == whole.master.keys()


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_every_precision_starts_from_the_same_weights_and_every_seed_from_others(spec: ModelSpec) -> None:
    single = _make(spec, 0, spec.num_units)
    double = _make(spec, 0, spec.num_units, Precision.FP64)
    assert torch.equal(single.compute_flat.double(), double.compute_flat)
    other = _make(spec, 0, spec.num_units, seed=1)
    assert not torch.equal(single.master["layers.0.mlp.down.weight"], other.master["layers.0.mlp.down.weight"])
    first, second = single.master["layers.0.mlp.down.weight"], single.master["layers.1.mlp.down.weight"]
    assert not torch.equal(first, second)


def test_starting_values() -> None:
    spec = ModelSpec(family=Family.GPT2, layers=8, hidden=128, heads=2, vocab=200, positions=100)
    master = _make(spec, 0, spec.num_units).master
    expected = {
        "embedding.weight": 0.02,
        "embedding.position": 0.01,
        "layers.3.attention.qkv.weight": 0.02,
        "layers.3.attention.out.weight": 0.02 / 4,
        "layers.3.mlp.up.weight": 0.02,
        "layers.3.mlp.down.weight": 0.02 / 4,
    }
    for name, deviation in expected.items():
        assert float(master[name].std()) == pytest.approx(deviation, rel=0.05), name
        assert abs(float(master[name].mean())) < deviation / 20, name
    assert bool((master["layers.3.mlp.norm.weight"] == 1).all())
    assert all(not tensor.any() for name, tensor in master.items() if name.endswith(".bias"))


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_flat_buffers_hold_decayed_tensors_first_and_views_cover_them(spec: ModelSpec) -> None:
    stage = _make(spec, 0, spec.num_units)
    assert stage.compute_flat.numel() == num_parameters(spec)
    order = [parameter.decay for parameter in stage.declared.values()]
    assert order == sorted(order, reverse=True)
    for number, name in enumerate(stage.declared):
        stage.gradients[name].fill_(number)
    sizes = torch.tensor([parameter.num_elements for parameter in stage.declared.values()])
    assert torch.equal(stage.gradient_flat, torch.arange(len(sizes)).repeat_interleave(sizes).float())
    decayed = {name for name, parameter in stage.declared.items() if parameter.decay}
    assert stage.own_decayed == (sum(stage.declared[name].num_elements for name in decayed),)
    assert all(stage.declared[name].shape == tuple(view.shape) for name, view in stage.master.items())
    assert decayed == {name for name, view in stage.master.items() if view.dim() == 2}


def test_a_tied_matrix_is_held_once_by_a_stage_with_both_ends() -> None:
    both, head = _make(GPT2, 0, GPT2.num_units), _make(GPT2, GPT2.num_units - 1, GPT2.num_units)
    assert torch.equal(both.master["embedding.weight"], head.master["embedding.weight"])
    assert "embedding.position" not in head.master


def test_bf16_products_use_a_copy_renewed_on_request() -> None:
    stage = _make(LLAMA, 0, 3, Precision.BF16)
    name = "layers.0.mlp.down.weight"
    assert stage.master[name].dtype == stage.gradients[name].dtype == torch.float32
    assert stage.compute[name].dtype == torch.bfloat16
    stage.master[name].fill_(0.3)
    assert not bool((stage.compute[name] == torch.tensor(0.3).bfloat16()).any())
    stage.refresh_compute()
    assert bool((stage.compute[name] == torch.tensor(0.3).bfloat16()).all())


def test_fp32_products_use_the_masters_themselves() -> None:
    stage = _make(LLAMA, 0, 3)
    assert stage.compute_flat.data_ptr() == stage.masters[0].data_ptr()


# Replicas that divide the optimizer's state

WIDE_LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=48, heads=4, kv_heads=1, vocab=97, ffn_hidden=80)
WIDE_GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=48, heads=4, vocab=97, positions=61)


def _replicas(
    spec: ModelSpec, dp: int, precision: Precision, tp: int = 1, shard: int = 0, buckets: tuple[Part, ...] = ()
) -> list[StageParameters]:
    units = (0, spec.num_units)
    options: dict[str, Any] = {"sharding": Sharding(tp), "shard": shard, "precision": precision, "buckets": buckets}
    return [StageParameters(spec, *units, replica=r, dp=dp, device=CPU, seed=0, **options) for r in range(dp)]


BUCKETS = st.sets(st.integers(1, 5)).map(
    lambda cuts: tuple(Part(*bounds) for bounds in reversed(list(pairwise((0, *sorted(cuts), 6)))))
)
"""Of both models' six units, from the last one to the first."""


@given(st.sampled_from([WIDE_LLAMA, WIDE_GPT2]), st.sampled_from(list(Precision)), st.sampled_from([2, 3, 8]), BUCKETS)
def test_replicas_divide_masters_and_begin_alike(
    spec: ModelSpec, precision: Precision, dp: int, buckets: tuple[Part, ...]
) -> None:
    whole, replicas = _make(spec, 0, spec.num_units, precision), _replicas(spec, dp, precision, buckets=buckets)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in whole.master}
    for own in replicas:
        assert own.is_divided
        assert len(own.sections) == len(buckets)
        sizes = [master.numel() for master in own.masters]
        assert sizes == [gradients.numel() for gradients in own.own_gradients]
        assert sum(sizes) * dp == own.compute_flat.numel()
        assert all(torch.equal(own.compute[name], whole.compute[name]) for name in whole.compute)
        assert all(torch.equal(view, whole.master[name]) for name, view in own.master.items())
        for name, part in own.own_parts(own.masters).items():
            assert sum(map(len, parts[name])) == own.starts[name]
            parts[name].append(part)
    for name, pieces in parts.items():
        assert torch.equal(torch.cat(pieces), whole.master[name].flatten())


@given(st.sampled_from([WIDE_LLAMA, WIDE_GPT2]), st.sampled_from([2, 3, 8]), BUCKETS)
def test_a_section_has_what_the_backward_of_its_bucket_completes(
    spec: ModelSpec, dp: int, buckets: tuple[Part, ...]
) -> None:
    """No element is reduced with another bucket, and shards are no larger than the planner counts."""
    own = _replicas(spec, dp, Precision.FP32, buckets=buckets)[0]
    names = completed_by_units(spec, 0, spec.num_units)
    for number, part in enumerate(buckets):
        (section,) = own.bucket(part)
        section.fill_(number + 1.0)
        completed = [name for unit in names[part.first : part.stop] for name in unit]
        assert all(set(own.gradients[name].flatten().tolist()) == {number + 1.0} for name in completed)
        count = sum(own.gradients[name].numel() for name in completed)
        assert own.sections[number].shard_elements <= largest_shard(count, dp)
    assert bool((own.gradient_flat > 0).all())


@given(st.sampled_from([WIDE_LLAMA, WIDE_GPT2]), st.sampled_from([1, 2]), BUCKETS)
def test_replicas_count_every_gradient_once(spec: ModelSpec, tp: int, buckets: tuple[Part, ...]) -> None:
    counts: dict[str, int] = {}
    for shard in range(tp):
        for own in _replicas(spec, 3, Precision.FP32, tp, shard, buckets):
            for stretch in own.counted_stretches():
                assert any(place.start <= stretch.start < stretch.stop <= place.stop for place in own.own)
                if stretch.start in {place.start for place in own.own}:
                    assert (stretch.start - stretch.origin) % BLOCK == 0
                stretch.flat[stretch.start : stretch.stop].fill_(1.0)
            for name, gradient in own.gradients.items():
                counts[name] = counts.get(name, 0) + int(gradient.sum())
    assert counts == {name: parameter.num_elements for name, parameter in own.declared.items()}


@given(st.sampled_from([WIDE_LLAMA, WIDE_GPT2]), BUCKETS)
def test_wide_copies_of_norms_and_biases_add_up(spec: ModelSpec, buckets: tuple[Part, ...]) -> None:
    """Each replica renews what it steps; the rest is zero, so that a sum over replicas gives all of them."""
    replicas = _replicas(spec, 3, Precision.BF16, buckets=buckets)
    owners = torch.zeros(replicas[0].compute_flat.shape)
    for number, own in enumerate(replicas):
        for place, master in zip(own.own, own.masters, strict=True):
            master.fill_(number + 1.0)
            owners[place] = number + 1.0
        own.refresh_compute()
        assert all(set(own.compute_flat[place].tolist()) == {number + 1.0} for place in own.own)
    flats = [own.wide_flat for own in replicas if own.wide_flat is not None]
    flats[0].copy_(torch.stack(flats).sum(dim=0))
    names = {name for name, parameter in own.declared.items() if not parameter.decay}
    assert replicas[0].master.keys() == names
    expected = replicas[0].by_name(owners)
    assert all(torch.equal(view, expected[name]) for name, view in replicas[0].master.items())


def test_load_takes_its_own_names_from_a_larger_set() -> None:
    whole, part = _make(LLAMA, 0, LLAMA.num_units, seed=5), _make(LLAMA, 2, 5, Precision.BF16)
    part.load({name: tensor.double() for name, tensor in whole.master.items()})
    assert all(torch.equal(part.master[name], whole.master[name]) for name in part.master)
    assert all(torch.equal(part.compute[name], whole.master[name].bfloat16()) for name in part.master)


def test_load_refuses_missing_names_and_other_shapes_and_changes_nothing() -> None:
    stage = _make(LLAMA, 0, 3)
    before = stage.compute_flat.clone()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in stage.master.items()}
    short = {name: tensor for name, tensor in tensors.items() if name != "layers.0.mlp.norm.weight"}
    with pytest.raises(UserError, match=r"weights\.safetensors: layers\.0\.mlp\.norm\.weight is missing"):
        stage.load(short, where="weights.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.norm\.weight has shape \[3\], the model needs \[16\]"):
        stage.load(tensors | {"layers.0.mlp.norm.weight": torch.zeros(3)})
    assert torch.equal(stage.compute_flat, before)


SHARDED = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
TIED = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=23, positions=9)


def _shards(spec: ModelSpec, sharding: Sharding, first: int = 0, stop: int | None = None) -> list[StageParameters]:
    return [
        StageParameters(
            spec,
            first,
            spec.num_units if stop is None else stop,
            sharding=sharding,
            shard=shard,
            precision=Precision.FP32,
            device=CPU,
            seed=0,
        )
        for shard in range(sharding.tp)
    ]


@pytest.mark.parametrize("spec", [SHARDED, TIED])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_start_from_the_same_weights_and_hold_no_more_than_planned(spec: ModelSpec, tp: int) -> None:
    whole = _make(spec, 0, spec.num_units).master
    shards = _shards(spec, Sharding(tp))
    tensors = joined(shards, [shard.master for shard in shards])
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert max(shard.compute_flat.numel() for shard in shards) == stage_parameters(spec, 0, spec.num_units, tp)
    for shard in shards:
        decayed = sum(shard.master[name].numel() for name, parameter in shard.declared.items() if parameter.decay)
        assert shard.own_decayed == (decayed,)


@pytest.mark.parametrize("spec", [SHARDED, TIED])
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_load_their_parts_of_whole_tensors(spec: ModelSpec, tp: int) -> None:
    whole = _make(spec, 0, spec.num_units, seed=5).master
    shards = _shards(spec, Sharding(tp), 2, 5)
    for shard in shards:
        shard.load(whole)
    tensors = joined(shards, [shard.master for shard in shards])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.norm\.weight has shape \[3\], the model needs \[16\]"):
        shards[1].load(whole | {"layers.1.mlp.norm.weight": torch.zeros(3)})


@pytest.mark.parametrize("spec", [SHARDED, TIED])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_count_every_gradient_once(spec: ModelSpec, tp: int, sequence_parallel: bool) -> None:
    shards = _shards(spec, Sharding(tp, sequence_parallel))
    counts: dict[str, int] = {}
    for shard in shards:
        for stretch in shard.counted_stretches():
            counted = stretch.flat[stretch.start : stretch.stop]
            assert not counted.any(), "is counted twice on a shard"
            counted.fill_(1.0)
        for name, gradient in shard.gradients.items():
            counts[name] = counts.get(name, 0) + int(gradient.sum())
    assert counts == {name: parameter.num_elements for name, parameter in shards[0].declared.items()}


@pytest.mark.parametrize("spec", [SHARDED, TIED])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gradients_that_are_addends_are_those_that_core_declares(
    spec: ModelSpec, tp: int, sequence_parallel: bool
) -> None:
    sharding = Sharding(tp, sequence_parallel)
    (shard, *_) = _shards(spec, sharding)
    for view in shard.shared_gradients():
        view.fill_(1.0)
    for view in shard.copied_gradients():
        assert not view.any(), "a view of its own"
        view.fill_(2.0)
    expected = {name for unit in spec.units for name in shared_parameters(spec, unit, sharding)}
    assert {name for name, gradient in shard.gradients.items() if gradient.any()} == expected
    for name in expected:
        gradient, parameter = shard.gradients[name], shard.declared[name]
        heads = sharding.hidden(spec) if parameter.blocks else 0
        assert not gradient[:heads].any(), "query heads belong to one shard"
        assert bool((gradient[heads:] == (2.0 if parameter.blocks else 1.0)).all())
