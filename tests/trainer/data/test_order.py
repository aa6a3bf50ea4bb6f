"""The data order is a bijection of every epoch, computed from seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.data.order import mix, permute, shuffled

SEEDS = st.integers(-(2**63), 2**64 - 1)


def positions(first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(first, first + count, dtype=np.uint64)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    permuted = permute(positions(0, size), size=size, key=np.full(size, key, dtype=np.uint64))
    assert np.array_equal(np.sort(permuted), positions(0, size))


@given(size=st.integers(2**20, 2**44), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_keeps_large_domains_apart(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1000))
    permuted = permute(positions(first, 1000), size=size, key=np.full(1000, key, dtype=np.uint64))
    assert len(np.unique(permuted)) == 1000
    assert permuted.max() < size


@given(size=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 2**30))
def test_every_epoch_holds_every_window_once(size: int, seed: int, epoch: int) -> None:
    windows = shuffled(positions(epoch * size, size), size=size, seed=seed)
    assert np.array_equal(np.sort(windows), positions(0, size))


@given(size=st.integers(1, 300), seed=SEEDS, first=st.integers(0, 10**6), split=st.integers(0, 64))
def test_a_position_does_not_depend_on_the_requested_range(size: int, seed: int, first: int, split: int) -> None:
    whole = shuffled(positions(first, 64), size=size, seed=seed)
    parts = [shuffled(positions(first, split), size=size, seed=seed)]
    parts.append(shuffled(positions(first + split, 64 - split), size=size, seed=seed))
    assert np.array_equal(whole, np.concatenate(parts))


def test_seeds_and_epochs_have_different_orders() -> None:
    orders = [shuffled(positions(100 * epoch, 100), size=100, seed=seed) for seed in range(20) for epoch in range(20)]
    assert len({order.tobytes() for order in orders}) == len(orders)


@pytest.mark.parametrize("size", [2, 3, 10, 16, 17])
def test_every_window_is_as_likely_at_every_place(size: int) -> None:
    """Each count is binomial(n, 1/size); none of at most 289 strays by six standard deviations."""
    draws = 4000
    keys = np.repeat(mix(positions(0, draws)), size)
    orders = permute(np.tile(positions(0, size), draws), size=size, key=keys).reshape(draws, size)
    counts = np.stack([np.bincount(orders[:, place].astype(np.int64), minlength=size) for place in range(size)])
    deviation = np.sqrt(draws / size * (1 - 1 / size))
    assert np.abs(counts - draws / size).max() < 6 * deviation


def test_neighbours_are_separated() -> None:
    order = shuffled(positions(0, 10_000), size=10_000, seed=0).astype(np.int64)
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 20  # 2 are expected


def test_mix_is_splitmix64() -> None:
    """The generator's published first outputs from state 1234567 are mix(state + i * golden)."""
    state = (1234567 + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_order_never_changes() -> None:
    """A checkpoint is resumed by later versions: these numbers are part of the format."""
    assert shuffled(positions(0, 10), size=10, seed=0).tolist() == [9, 5, 8, 0, 2, 6, 3, 7, 4, 1]
    assert shuffled(positions(12345, 5), size=1000, seed=7).tolist() == [697, 478, 159, 448, 860]
