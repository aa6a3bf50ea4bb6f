"""Pass 6, arena: an offset in the rank's arena for every slot, so that slots with overlapping live ranges do not
overlap.

Problem. This is dynamic storage allocation with known live ranges, which is NP-hard. The peak of live bytes is a lower
bound. The runtime binds every operation to its tensors once, so few distinct offsets are better than many.

Idea. A step is periodic. Slots of one kind and stage form a group. Within a group, slots whose live ranges do not
overlap share a region, a range of the arena that holds one of them at a time. The regions of a group are made in
several ways, by size and by micro-batch modulo a period, and packed first-fit; the smallest result is kept. Then the
groups are stacked, and, unless that is close to the peak of live bytes, the regions of all groups are also packed
together.

A refined order repeats itself less: groups peak at different times, and there are too many regions. And a few slots of
different sizes that take most of the arena, as with unequal slices, leave gaps that nothing fits into. So if regions
need more than `FAR` times the peak of live bytes, each slot is also placed by itself, sorted by size or by size times
duration, and every extent of a slot (`penstock.core.extents`) by itself, in the order of starts.

Example: slots of 256 bytes, live ranges in instructions. Group A has [0, 4), [2, 6), [4, 8) and [6, 10). The first and
the third share a region, and so do the second and the fourth: offsets 0 and 256. Group B has [3, 5) and [7, 9), one
region at offset 512. The arena has 768 bytes, which is the peak of live bytes, at instruction 3. If group A had only
[0, 2) and [1, 3), and group B [3, 5) and [4, 6), the stack would take 1,024 bytes, twice the peak. Packed together,
both regions of B take the offsets of A, since no instruction needs both groups.

Complexity. Regions by size take n log n for n slots. First-fit compares m regions pairwise by bit sets of instructions,
for at most `MAX_REGIONS_PACKED` regions. Slots placed one by one take n^2 log n, n extents n times the number that live
at once. Every rank lays out the whole Program, so nothing here may need a compiler.

Rejected (ADR 0005): a caching allocator, whose peak depends on its history and is known only after a run; an offset for
every slot in any case, which makes thousands of distinct offsets for a few per cent of an arena.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from penstock.core.layout import aligned
from penstock.core.program import Extent
from penstock.core.roles import SlotName

NUM_PERIODS = 5
"""Number of periods that are tried for a group, from the shortest possible one."""

CLOSE = 1.01
"""An arena this close to the peak of live bytes is not improved further."""

FAR = 1.03
"""Regions that need more than the peak of live bytes times this factor are compared with slots and with extents that
are placed one by one.
"""

MAX_EXTENTS = 10_000
"""With more extents, slots are placed as a whole."""

MAX_REGIONS_PACKED = 300
"""First-fit compares regions pairwise; with more regions, groups stay stacked."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A slot to be placed: its live range [start, stop) in instructions, and aligned bytes."""

    index: int
    name: SlotName
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """Slots that use one offset in turn. Bit i of ``life`` is set if one of them is live at instruction i."""

    allocations: tuple[Allocation, ...]
    num_bytes: int
    life: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Regions with their offsets, and their total bytes."""

    regions: tuple[Region, ...]
    offsets: tuple[int, ...]
    num_bytes: int


Places = list[tuple[Extent, ...]]
"""The extents of every slot."""


def place(
    names: Sequence[SlotName], lives: Sequence[tuple[int, int]], sizes: Sequence[Sequence[int]]
) -> tuple[Places, int]:
    """Places of the slots with these names, live ranges and bytes of extents, sorted by their starts; and the arena's
    bytes. Slots are divided only if the arena is smaller for it.
    """
    allocations = [
        Allocation(index, name, *life, aligned(sum(extents)))
        for index, (name, life, extents) in enumerate(zip(names, lives, sizes, strict=True))
    ]
    groups: defaultdict[tuple[str, int], list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        groups[allocation.name[0], allocation.name[1]].append(allocation)
    peak_bytes = _peak_bytes(allocations)
    packing = _arrange([_pack_group(group) for group in groups.values()], peak_bytes)
    arenas = [(_places_of(packing, sizes), packing.num_bytes)]
    if packing.num_bytes > FAR * peak_bytes:
        arenas += [_one_by_one(allocations, order, sizes) for order in _orders(allocations)]
        if len(sizes) < sum(map(len, sizes)) <= MAX_EXTENTS:
            arenas += [_by_start(lives, sizes), _by_start([(-stop, -start) for start, stop in lives], sizes)]
    return min(arenas, key=lambda arena: arena[1])


def _places_of(packing: Packing, sizes: Sequence[Sequence[int]]) -> Places:
    offsets = {
        allocation.index: offset
        for region, offset in zip(packing.regions, packing.offsets, strict=True)
        for allocation in region.allocations
    }
    return [(Extent(offsets[index], sum(extents)),) for index, extents in enumerate(sizes)]


def _orders(allocations: Sequence[Allocation]) -> Iterator[list[int]]:
    """Two orders of placement: by falling bytes, and by falling bytes times duration."""
    yield sorted(range(len(allocations)), key=lambda i: (-allocations[i].num_bytes, allocations[i].start))
    area = [(allocation.stop - allocation.start) * allocation.num_bytes for allocation in allocations]
    yield sorted(range(len(allocations)), key=lambda i: (-area[i], allocations[i].start))


def _one_by_one(
    allocations: Sequence[Allocation], order: Sequence[int], sizes: Sequence[Sequence[int]]
) -> tuple[Places, int]:
    """The place of every slot, and the arena's bytes: in the given order, the lowest offset where it overlaps no slot
    that is live at the same time.
    """
    starts, stops, num_bytes = (
        np.array([getattr(allocations[i], name) for i in order], dtype=np.int64)
        for name in ("start", "stop", "num_bytes")
    )
    lows = np.zeros(len(order), dtype=np.int64)
    for number in range(len(order)):
        is_concurrent = (starts[:number] < stops[number]) & (stops[:number] > starts[number])
        low, size = lows[:number][is_concurrent], num_bytes[:number][is_concurrent]
        by_offset = np.argsort(low, kind="stable")
        low, high = low[by_offset], np.maximum.accumulate((low + size)[by_offset])
        below = np.concatenate([[0], high])
        gaps = np.flatnonzero(low - below[:-1] >= num_bytes[number])
        lows[number] = below[gaps[0]] if len(gaps) else below[-1]
    offsets = dict(zip(order, lows.tolist(), strict=True))
    places: Places = [(Extent(offsets[i], sum(extents)),) for i, extents in enumerate(sizes)]
    return places, int((lows + num_bytes).max(initial=0))


def _by_start(lives: Sequence[tuple[int, int]], sizes: Sequence[Sequence[int]]) -> tuple[Places, int]:
    """The places of all extents, and the arena's bytes: in the order of their starts, those that live longest first,
    the lowest offset that is free. With negated times it begins at the end of the step.
    """
    order = sorted((start, -stop, index) for index, (start, stop) in enumerate(lives))
    places: list[tuple[Extent, ...]] = [()] * len(lives)
    live: list[tuple[int, int, int]] = []
    arena_bytes = 0
    for start, minus_stop, index in order:
        live = [held for held in live if held[2] > start]
        for num_bytes in sizes[index]:
            offset, size = 0, aligned(num_bytes)
            for low, high, _ in live:
                if low - offset >= size:
                    break
                offset = high
            insort(live, (offset, offset + size, -minus_stop))
            places[index] += (Extent(offset, num_bytes),)
            arena_bytes = max(arena_bytes, offset + size)
    return places, arena_bytes


def _arrange(groups: Sequence[Packing], peak_bytes: int) -> Packing:
    stacked = _stack(groups)
    if stacked.num_bytes <= CLOSE * peak_bytes or len(stacked.regions) > MAX_REGIONS_PACKED:
        return stacked
    return min((stacked, *_packings(stacked.regions)), key=_num_bytes)


def _stack(groups: Sequence[Packing]) -> Packing:
    bases = [0, *accumulate(group.num_bytes for group in groups)]
    return Packing(
        tuple(region for group in groups for region in group.regions),
        tuple(base + offset for base, group in zip(bases, groups, strict=False) for offset in group.offsets),
        bases[-1],
    )


def _pack_group(group: Sequence[Allocation]) -> Packing:
    enough_bytes = CLOSE * _peak_bytes(group)
    best: Packing | None = None
    for regions in _region_sets(group):
        for packing in (_side_by_side(regions), *_packings(regions)):
            if best is None or packing.num_bytes < best.num_bytes:
                best = packing
            if best.num_bytes <= enough_bytes:
                return best
    assert best is not None, "regions by size always exist"
    return best


def _region_sets(group: Sequence[Allocation]) -> Iterator[tuple[Region, ...]]:
    yield _regions_by_size(group)
    num_microbatches = 1 + max(allocation.name[2] for allocation in group)
    region_sets = (_regions_by_period(group, period) for period in range(1, num_microbatches + 1))
    yield from islice(filter(None, region_sets), NUM_PERIODS)


def _regions_by_size(group: Sequence[Allocation]) -> tuple[Region, ...]:
    """Every slot takes the first free region of its size: the fewest regions for each size."""
    regions: list[list[Allocation]] = []
    free: defaultdict[int, list[int]] = defaultdict(list)
    busy: list[tuple[int, int, int]] = []
    for allocation in group:
        while busy and busy[0][0] <= allocation.start:
            _, region, num_bytes = heapq.heappop(busy)
            heapq.heappush(free[num_bytes], region)
        if free[allocation.num_bytes]:
            region = heapq.heappop(free[allocation.num_bytes])
        else:
            region = len(regions)
            regions.append([])
        regions[region].append(allocation)
        heapq.heappush(busy, (allocation.stop, region, allocation.num_bytes))
    return tuple(map(_region, regions))


def _regions_by_period(group: Sequence[Allocation], period: int) -> tuple[Region, ...]:
    """Slots of one slice and of micro-batches ``period`` apart share a region; empty if the live ranges of two of them
    overlap.
    """
    regions: defaultdict[tuple[int, int | None], list[Allocation]] = defaultdict(list)
    for allocation in group:
        region = regions[allocation.name[2] % period, allocation.name[3]]
        if region and region[-1].stop > allocation.start:
            return ()
        region.append(allocation)
    return tuple(map(_region, regions.values()))


def _region(allocations: Sequence[Allocation]) -> Region:
    life = 0
    for allocation in allocations:
        life |= ((1 << (allocation.stop - allocation.start)) - 1) << allocation.start
    return Region(tuple(allocations), max(allocation.num_bytes for allocation in allocations), life)


def _side_by_side(regions: Sequence[Region]) -> Packing:
    offsets = [0, *accumulate(region.num_bytes for region in regions)]
    return Packing(tuple(regions), tuple(offsets[:-1]), offsets[-1])


def _packings(regions: Sequence[Region]) -> Iterator[Packing]:
    """First-fit, with regions sorted by falling bytes or by falling time in use."""
    yield _first_fit(sorted(regions, key=lambda region: -region.num_bytes))
    yield _first_fit(sorted(regions, key=lambda region: -region.life.bit_count()))


def _first_fit(regions: Sequence[Region]) -> Packing:
    """Each region, in the given order, at the lowest offset at which it overlaps no earlier region that is live at the
    same time.
    """
    placed: list[tuple[int, int, int]] = []
    offsets = []
    for region in regions:
        offset = 0
        for start, stop, life in placed:
            if stop > offset and life & region.life:
                if start - offset >= region.num_bytes:
                    break
                offset = stop
        insort(placed, (offset, offset + region.num_bytes, region.life))
        offsets.append(offset)
    return Packing(tuple(regions), tuple(offsets), max((stop for _, stop, _ in placed), default=0))


def _num_bytes(packing: Packing) -> int:
    return packing.num_bytes


def _peak_bytes(allocations: Iterable[Allocation]) -> int:
    changes: defaultdict[int, int] = defaultdict(int)
    for allocation in allocations:
        changes[allocation.start] += allocation.num_bytes
        changes[allocation.stop] -= allocation.num_bytes
    return max(accumulate(changes[instant] for instant in sorted(changes)), default=0)
