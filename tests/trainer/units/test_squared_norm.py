"""The squared norm: exact sums of fixed blocks."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.replicas import BLOCK
from penstock.trainer.squared_norm import NUM_LIMBS, SquaredNorm, Stretch, limbs_of

CPU = torch.device("cpu")
POSITIVE = st.floats(2.0**-250, 2.0**260) | st.sampled_from([0.0, 1.0, 2.0**-300, 1 + 2.0**-52])


def value(limbs: Tensor) -> Fraction:
    """Return the exact value of limbs."""
    return sum((Fraction(limb) * Fraction(2) ** (24 * k - 312) for k, limb in enumerate(limbs.tolist())), Fraction(0))


@given(st.lists(POSITIVE, max_size=50), st.randoms())
def test_limbs_add_up_exactly_in_any_order(numbers: list[float], chance: object) -> None:
    sums = torch.tensor(numbers, dtype=torch.float64)
    limbs = limbs_of(sums)
    dropped = len(numbers) * Fraction(2) ** -312
    assert 0 <= sum(map(Fraction, numbers), Fraction(0)) - value(limbs) <= dropped
    assert torch.equal(limbs, limbs.floor())
    halves = sums[::2], sums[1::2]
    assert torch.equal(limbs, limbs_of(halves[1]) + limbs_of(halves[0]))


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_sum_that_is_not_a_number_stays_so(wrong: float) -> None:
    norm = SquaredNorm([], CPU)
    assert not norm.total(limbs_of(torch.tensor([1.0, wrong], dtype=torch.float64))).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_sum_of_squares(dtype: torch.dtype) -> None:
    flat = torch.randn(40 * BLOCK + 123, generator=torch.Generator().manual_seed(0), dtype=dtype)
    norm = SquaredNorm([Stretch(flat, 0, 0, len(flat))], CPU)
    exact = math.fsum(number * number for number in flat.double().tolist())
    assert float(norm.total(norm.limbs())) == pytest.approx(exact, rel=1e-14)
    flat.zero_()
    assert not norm.limbs().any()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=4),
    st.lists(st.integers(0, 8), max_size=3),
    st.integers(0, 1000),
)
def test_its_bits_do_not_depend_on_where_tensors_lie_and_are_cut(sizes: list[int], cuts: list[int], gap: int) -> None:
    """Tensors at other places, cut at bounds of their blocks, and taken in another order."""
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    together = torch.cat(tensors)
    apart = torch.zeros(len(together) + gap * (len(tensors) + 1))
    whole, parts, start, moved = [], [], 0, gap
    for tensor in tensors:
        size = len(tensor)
        apart[moved : moved + size] = tensor
        whole.append(Stretch(together, start, start, start + size))
        bounds = sorted({0, size, *(cut * BLOCK for cut in cuts if cut * BLOCK < size)})
        parts += [Stretch(apart, moved, moved + a, moved + b) for a, b in pairwise(bounds)]
        start, moved = start + size, moved + size + gap
    assert torch.equal(SquaredNorm(whole, CPU).limbs(), SquaredNorm(reversed(parts), CPU).limbs())


def test_a_part_of_a_tensor_has_parts_of_blocks() -> None:
    """Such parts come from key/value heads that another shard counts."""
    flat = torch.ones(3 * BLOCK)
    stretch = Stretch(flat, 10, 100, 2 * BLOCK + 10)
    assert list(stretch.parts()) == [(100, BLOCK + 10), (BLOCK + 10, 2 * BLOCK + 10)]
    assert list(Stretch(flat, 10, 100, 200).parts()) == [(100, 200)]
    assert list(Stretch(flat, 0, BLOCK, 2 * BLOCK + 1).parts()) == [(BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 1)]


def test_a_whole_step_fits_in_the_limbs() -> None:
    """2^29 blocks, the largest of fp32."""
    largest = 4096 * torch.finfo(torch.float32).max ** 2
    limbs = limbs_of(torch.tensor([largest], dtype=torch.float64))
    assert (limbs * 2.0**25 < 2.0**53).all()
    assert len(limbs) == NUM_LIMBS
