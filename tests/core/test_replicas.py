"""How replicas divide a stage's flat parameters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.replicas import BLOCK, Section, largest_shard, replica_layout

SIZES = st.lists(st.integers(1, 5 * BLOCK) | st.sampled_from([1, BLOCK, 3 * BLOCK]), min_size=1, max_size=12)


@given(SIZES, st.integers(2, 9))
def test_shards_are_equal_and_cut_no_block(sizes: list[int], dp: int) -> None:
    layout = replica_layout(sizes, dp)
    assert layout.shard_elements % BLOCK == 0
    assert layout.total == dp * layout.shard_elements
    reached = 0
    for offset, size in zip(layout.offsets, sizes, strict=True):
        assert 0 <= offset - reached < BLOCK
        reached = offset + size
        bounds = range(layout.shard_elements, layout.total, layout.shard_elements)
        assert all((bound - offset) % BLOCK == 0 for bound in bounds if offset < bound < reached)
    assert reached <= layout.total
    assert sum(offset > 0 for offset in _gaps(layout.offsets, sizes)) < dp


@given(SIZES, st.integers(1, 9))
def test_a_shard_is_no_larger_than_the_formula_says(sizes: list[int], dp: int) -> None:
    layout = replica_layout(sizes, dp)
    assert sum(sizes) <= layout.total
    assert layout.shard_elements <= largest_shard(sum(sizes), dp)


@given(SIZES)
def test_one_replica_has_everything_without_gaps(sizes: list[int]) -> None:
    layout = replica_layout(sizes, 1)
    assert layout.shard_elements == layout.total == sum(sizes)
    assert not any(_gaps(layout.offsets, sizes))


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 10))
def test_the_shards_of_a_section_are_all_of_it_in_order(start: int, dp: int, blocks: int) -> None:
    section = Section(start, dp * blocks * BLOCK, 1, blocks * BLOCK)
    shards = [section.shard(replica) for replica in range(dp)]
    assert [shard.start for shard in shards] == [start, *(shard.stop for shard in shards[:-1])]
    assert slice(shards[0].start, shards[-1].stop) == section.place


def test_the_shards_of_a_large_stage_are_its_parts() -> None:
    """Gaps and rounding are at most two blocks."""
    assert largest_shard(10**9, 8) - 10**9 / 8 <= 2 * BLOCK


def _gaps(offsets: tuple[int, ...], sizes: list[int]) -> list[int]:
    stops = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    return [offset - stop for offset, stop in zip(offsets, stops[:-1], strict=True)]
