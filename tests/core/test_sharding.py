"""Shards together cover every element once, or as often as it is copied, and all have the same size."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import Parameter, parameters, shared_parameters, stage_parameters, unit_parameters
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.schedule import Kind
from penstock.core.sharding import WHOLE, Block, Collective, Sharding, unit_collectives

TOKENS, SHARDS = st.integers(1, 300), st.integers(1, 9)


@given(TOKENS, SHARDS, st.booleans())
def test_tokens_are_divided_into_blocks_that_follow_each_other(tokens: int, tp: int, sequence_parallel: bool) -> None:
    sharding = Sharding(tp, sequence_parallel)
    owned = [sharding.own_tokens(tokens, shard) for shard in range(tp)]
    assert all(len(own) <= sharding.rows(tokens) for own in owned)
    if sharding.by_tokens:
        assert list(chain.from_iterable(owned)) == list(range(tokens))
        assert all(own.start == shard * sharding.rows(tokens) for shard, own in enumerate(owned) if own)
        assert tokens <= sharding.padded_rows(tokens) < tokens + tp
    else:
        assert owned == [range(tokens)] * tp
        assert sharding.padded_rows(tokens) == tokens


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_groups_are_whole_and_copied_where_they_are_fewer_than_shards(width: int, num_groups: int, tp: int) -> None:
    if num_groups % tp and tp % num_groups:
        return
    block = Block(width * num_groups, num_groups)
    parts = [block.part(tp, shard) for shard in range(tp)]
    assert all(part.start % width == 0 and len(part) == width * max(num_groups // tp, 1) for part in parts)
    held = Counter(chain.from_iterable(parts))
    assert set(held) == set(range(block.size))
    assert set(held.values()) == {block.copies(tp)}


@st.composite
def sharded_models(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A small model and a number of shards that it can be divided over."""
    tp, family = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(Family))
    heads = tp * draw(st.integers(1, 2))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, heads) if heads % n == 0])) if family is Family.LLAMA else heads
    spec = ModelSpec(
        family=family,
        layers=2,
        hidden=4 * heads,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=tp * draw(st.integers(1, 5)),
        vocab=draw(st.integers(tp, 40)),
    )
    return spec, tp if spec.can_be_sharded(tp) else 1


def owned_elements(parameter: Parameter, tp: int) -> Counter[int]:
    """How many shards own each place along the axis that is divided."""
    pieces = chain.from_iterable(parameter.pieces(tp, shard) for shard in range(tp))
    return Counter(chain.from_iterable(range(each.start, each.stop) for each in pieces if each.is_owner))


@given(sharded_models())
def test_every_element_has_one_owner(drawn: tuple[ModelSpec, int]) -> None:
    spec, tp = drawn
    for unit in spec.units:
        for parameter in parameters(spec, unit):
            assert owned_elements(parameter, tp) == Counter(range(parameter.shape[parameter.axis])), parameter.name
            shapes = [parameter.shard_shape(tp, shard) for shard in range(tp)]
            assert max(map(math.prod, shapes)) - min(map(math.prod, shapes)) <= spec.hidden  # a row of the vocabulary


@given(sharded_models())
def test_counts_are_those_of_the_largest_shard(drawn: tuple[ModelSpec, int]) -> None:
    spec, tp = drawn
    for unit in spec.units:
        of_shards = [
            sum(math.prod(parameter.shard_shape(tp, shard)) for parameter in parameters(spec, unit))
            for shard in range(tp)
        ]
        assert unit_parameters(spec, unit.kind, tp) == max(of_shards)
    held = sum(unit_parameters(spec, unit.kind, tp) for unit in spec.units)
    tied = Sharding(tp).vocab(spec) * spec.hidden if spec.tied else 0
    assert stage_parameters(spec, 0, spec.num_units, tp) == held - tied


@given(sharded_models())
def test_addends_are_what_all_shards_hold_and_copied_heads(drawn: tuple[ModelSpec, int]) -> None:
    spec, tp = drawn
    for unit in spec.units:
        by_tokens = set(shared_parameters(spec, unit, Sharding(tp)))
        whole = set(shared_parameters(spec, unit, Sharding(tp, sequence_parallel=False)))
        copied = {f"{unit.name}.qkv.weight", f"{unit.name}.qkv.bias"} if spec.kv_copies(tp) > 1 else set()
        names = {parameter.name for parameter in parameters(spec, unit)}
        assert whole == copied & names if unit.kind is UnitKind.ATTENTION else not whole
        replicated = {parameter.name for parameter in parameters(spec, unit) if not parameter.blocks}
        assert by_tokens == (whole | replicated if tp > 1 else set())


@pytest.mark.parametrize("unit", UnitKind)
@pytest.mark.parametrize("kind", [Kind.F, Kind.I, Kind.W])
def test_sums_are_replaced_by_a_scatter_and_a_gather_of_as_many_bytes(unit: UnitKind, kind: Kind) -> None:
    """Section 4.2.2 of arXiv 2205.05198. W gathers a second time; the embedding has no sum in I."""
    assert unit_collectives(unit, kind, WHOLE) == ()
    summed = unit_collectives(unit, kind, Sharding(4, sequence_parallel=False))
    divided = Counter(unit_collectives(unit, kind, Sharding(4)))
    assert divided[Collective.SCATTER] == len(summed)
    assert divided[Collective.SUM] == 0
    gathers_twice = {(UnitKind.ATTENTION, Kind.W), (UnitKind.MLP, Kind.W), (UnitKind.EMBEDDING, Kind.I)}
    first = unit is UnitKind.EMBEDDING and kind is Kind.F
    assert divided[Collective.GATHER] == len(summed) - first + ((unit, kind) in gathers_twice)
