"""Buckets of a stage's gradients: bounds by bytes, and the units that complete a gradient."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.buckets import (
    LEAST_BUCKET_BYTES,
    MOST_BUCKETS,
    bucket_elements,
    buckets_of,
    completed_by_units,
    stage_buckets,
)
from penstock.core.layout import Precision, declared_parameters, stage_parameters, tied_stages
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.schedule import Part

GPT2 = ModelSpec(family=Family.GPT2, layers=4, hidden=128, heads=4, vocab=512, positions=64)
LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=128, heads=4, kv_heads=2, vocab=512)


@pytest.mark.parametrize(
    ("mebibytes", "expected"),
    [
        ([1, 1, 1, 1], ["[3]", "[2]", "[1]", "[0]"]),
        ([1, 1, 1, 1, 1, 1, 1, 1], ["[6:8]", "[4:6]", "[2:4]", "[0:2]"]),
        ([6, 1, 1], ["[1:3]", "[0]"]),
        ([1, 1, 6], ["[2]", "[0:2]"]),
        ([8], []),
        ([], []),
    ],
)
def test_bounds_are_where_bytes_are(mebibytes: list[int], expected: list[str]) -> None:
    assert [str(part) for part in buckets_of([size * 2**20 for size in mebibytes])] == expected


def test_small_stages_are_reduced_as_a_whole() -> None:
    half = LEAST_BUCKET_BYTES
    assert buckets_of([half, half - 1]) == ()
    assert len(buckets_of([half, half])) == 2
    assert len(buckets_of([half] * 3)) == 3


@given(st.lists(st.integers(1, 4 * LEAST_BUCKET_BYTES), max_size=40))
def test_buckets_are_all_units_once_and_none_is_much_larger_than_its_share(num_bytes: list[int]) -> None:
    buckets = buckets_of(num_bytes)
    assert len(buckets) <= MOST_BUCKETS
    if not buckets:
        return
    assert len(buckets) > 1
    assert buckets[0].stop == len(num_bytes)
    assert buckets[-1].first == 0
    assert all(later.stop == earlier.first for earlier, later in itertools.pairwise(buckets))
    share = sum(num_bytes) / min(MOST_BUCKETS, sum(num_bytes) // LEAST_BUCKET_BYTES)
    assert all(sum(num_bytes[part.first : part.stop]) <= share + max(num_bytes) for part in buckets)


@pytest.mark.parametrize("spec", [GPT2, LLAMA, LLAMA.divided(3), GPT2.divided(3)])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_element_of_a_stage_is_completed_by_one_unit(spec: ModelSpec, tp: int) -> None:
    for first, stop in itertools.combinations(range(spec.num_units + 1), 2):
        names = [name for unit in completed_by_units(spec, first, stop) for name in unit]
        assert sorted(names) == sorted(declared_parameters(spec, first, stop))
        elements = sum(bucket_elements(spec, first, stop, tp))
        assert elements == pytest.approx(stage_parameters(spec, first, stop, tp), rel=0.01 if tp > 1 else 0)


def test_a_tied_matrix_is_completed_by_the_embedding() -> None:
    names = completed_by_units(GPT2, 0, GPT2.num_units)
    assert "embedding.weight" in names[0]
    assert "embedding.weight" not in names[-1]


def test_copies_of_a_tied_matrix_are_not_cut() -> None:
    stages = ((0, 5), (5, 10))
    assert tied_stages(GPT2, stages) == (0, 1)
    first, last = stage_buckets(GPT2, stages, Precision.FP32, 1)
    assert first
    assert not last
    assert all(stage_buckets(LLAMA, stages, Precision.FP32, 1))


@pytest.mark.parametrize("head_parts", [1, 2, 4])
def test_parts_of_a_head_on_one_stage_are_in_one_bucket(head_parts: int) -> None:
    spec = LLAMA.divided(head_parts)
    ((*buckets,),) = stage_buckets(spec, ((0, spec.num_units),), Precision.FP32, 1)
    heads = [index for index, unit in enumerate(spec.units) if unit.kind is UnitKind.HEAD]
    assert [part for part in buckets if part.first in heads or part.stop - 1 in heads] == buckets[:1]
    assert buckets[0] == Part(buckets[0].first, spec.num_units)
