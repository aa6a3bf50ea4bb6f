"""Pass 6, arena: an offset in the rank's arena for every slot, so that slots with overlapping live ranges do not
overlap.

Problem. This is dynamic storage allocation with known live ranges, which is NP-hard. The peak of live bytes is a lower
bound. The runtime binds every operation to its tensors once, so few distinct offsets are better than many.

Idea. A step is periodic. Slots of one kind and stage form a family. Within a family, slots whose live ranges do not
overlap share a lane, which has one offset. A family's lanes are made in several ways, by size and by micro-batch modulo
a period, and packed first-fit; the smallest result is kept. Then the families are stacked, and, unless that is close to
the peak of live bytes, the lanes of all families are also packed together.

A refined order repeats itself less: families peak at different times, and there are too many lanes. And a few slots of
different sizes that take most of the arena, as with unequal slices, leave gaps that nothing fits into. So if lanes need
more than `FAR` times the peak of live bytes, each slot is also placed by itself, sorted by size or by size times
duration, and every extent of a slot (`penstock.core.extents`) by itself, in the order of starts.

Example: slots of 256 bytes, live ranges in instructions. Family A has [0, 4), [2, 6), [4, 8) and [6, 10). The first and
the third share a lane, and so do the second and the fourth: offsets 0 and 256. Family B has [3, 5) and [7, 9), one lane
at offset 512. The arena has 768 bytes, which is the peak of live bytes, at instruction 3. If family A had only [0, 2)
and [1, 3), and family B [3, 5) and [4, 6), the stack would take 1,024 bytes, twice the peak. Packed together, both
lanes of B take the offsets of A, since no instruction needs both families.

Complexity. Lanes by size take n log n for n slots. First-fit compares m lanes pairwise by bit sets of instructions, for
at most `MAX_LANES_TOGETHER` lanes. Slots placed one by one take n^2 log n, n extents n times the number that live at
once. Every rank lays out the whole Program, so nothing here may need a compiler.

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
"""Number of periods that are tried for a family, from the shortest possible one."""

CLOSE = 1.01
"""An arena this close to the peak of live bytes is not improved further."""

FAR = 1.03
"""Lanes that need more than the peak of live bytes times this factor are compared with slots and with extents that are
placed one by one.
"""

MAX_EXTENTS = 10_000
"""With more extents, slots are placed as a whole."""

MAX_LANES_TOGETHER = 300
"""Packing compares lanes pairwise; with more lanes, families stay stacked."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A slot to be placed: its live range [start, stop) in instructions, and aligned bytes."""

    index: int
    name: SlotName
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """Slots that use one offset in turn. Bit i of ``life`` is set if one of them is live at instruction i."""

    tenants: tuple[Tenant, ...]
    num_bytes: int
    life: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Lanes with their offsets, and their total bytes."""

    lanes: tuple[Lane, ...]
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
    tenants = [
        Tenant(index, name, *life, aligned(sum(extents)))
        for index, (name, life, extents) in enumerate(zip(names, lives, sizes, strict=True))
    ]
    families: defaultdict[tuple[str, int], list[Tenant]] = defaultdict(list)
    for tenant in tenants:
        families[tenant.name[0], tenant.name[1]].append(tenant)
    high_water = _high_water(tenants)
    packing = _arrange([_pack_family(family) for family in families.values()], high_water)
    arenas = [(_places_of(packing, sizes), packing.num_bytes)]
    if packing.num_bytes > FAR * high_water:
        arenas += [_one_by_one(tenants, order, sizes) for order in _orders(tenants)]
        if len(sizes) < sum(map(len, sizes)) <= MAX_EXTENTS:
            arenas += [_by_start(lives, sizes), _by_start([(-stop, -start) for start, stop in lives], sizes)]
    return min(arenas, key=lambda arena: arena[1])


def _places_of(packing: Packing, sizes: Sequence[Sequence[int]]) -> Places:
    offsets = {
        tenant.index: offset
        for lane, offset in zip(packing.lanes, packing.offsets, strict=True)
        for tenant in lane.tenants
    }
    return [(Extent(offsets[index], sum(extents)),) for index, extents in enumerate(sizes)]


def _orders(tenants: Sequence[Tenant]) -> Iterator[list[int]]:
    """Two orders of placement: by falling bytes, and by falling bytes times duration."""
    yield sorted(range(len(tenants)), key=lambda i: (-tenants[i].num_bytes, tenants[i].start))
    area = [(tenant.stop - tenant.start) * tenant.num_bytes for tenant in tenants]
    yield sorted(range(len(tenants)), key=lambda i: (-area[i], tenants[i].start))


def _one_by_one(tenants: Sequence[Tenant], order: Sequence[int], sizes: Sequence[Sequence[int]]) -> tuple[Places, int]:
    """The place of every slot, and the arena's bytes: in the given order, the lowest offset where it overlaps no slot
    that is live at the same time.
    """
    starts, stops, num_bytes = (
        np.array([getattr(tenants[i], name) for i in order], dtype=np.int64) for name in ("start", "stop", "num_bytes")
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


def _arrange(families: Sequence[Packing], high_water: int) -> Packing:
    stacked = _stack(families)
    if stacked.num_bytes <= CLOSE * high_water or len(stacked.lanes) > MAX_LANES_TOGETHER:
        return stacked
    return min((stacked, *_packings(stacked.lanes)), key=_num_bytes)


def _stack(families: Sequence[Packing]) -> Packing:
    bases = [0, *accumulate(family.num_bytes for family in families)]
    return Packing(
        tuple(lane for family in families for lane in family.lanes),
        tuple(base + offset for base, family in zip(bases, families, strict=False) for offset in family.offsets),
        bases[-1],
    )


def _pack_family(family: Sequence[Tenant]) -> Packing:
    enough_bytes = CLOSE * _high_water(family)
    best: Packing | None = None
    for lanes in _lane_sets(family):
        for packing in (_side_by_side(lanes), *_packings(lanes)):
            if best is None or packing.num_bytes < best.num_bytes:
                best = packing
            if best.num_bytes <= enough_bytes:
                return best
    assert best is not None, "lanes by size always exist"
    return best


def _lane_sets(family: Sequence[Tenant]) -> Iterator[tuple[Lane, ...]]:
    yield _lanes_by_size(family)
    num_microbatches = 1 + max(tenant.name[2] for tenant in family)
    lane_sets = (_lanes_by_period(family, period) for period in range(1, num_microbatches + 1))
    yield from islice(filter(None, lane_sets), NUM_PERIODS)


def _lanes_by_size(family: Sequence[Tenant]) -> tuple[Lane, ...]:
    """Every slot takes the first free lane of its size: the fewest lanes for each size."""
    lanes: list[list[Tenant]] = []
    free: defaultdict[int, list[int]] = defaultdict(list)
    busy: list[tuple[int, int, int]] = []
    for tenant in family:
        while busy and busy[0][0] <= tenant.start:
            _, lane, num_bytes = heapq.heappop(busy)
            heapq.heappush(free[num_bytes], lane)
        if free[tenant.num_bytes]:
            lane = heapq.heappop(free[tenant.num_bytes])
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(tenant)
        heapq.heappush(busy, (tenant.stop, lane, tenant.num_bytes))
    return tuple(map(_lane, lanes))


def _lanes_by_period(family: Sequence[Tenant], period: int) -> tuple[Lane, ...]:
    """Slots of one slice and of micro-batches ``period`` apart share a lane; empty if the live ranges of two of them
    overlap.
    """
    lanes: defaultdict[tuple[int, int | None], list[Tenant]] = defaultdict(list)
    for tenant in family:
        lane = lanes[tenant.name[2] % period, tenant.name[3]]
        if lane and lane[-1].stop > tenant.start:
            return ()
        lane.append(tenant)
    return tuple(map(_lane, lanes.values()))


def _lane(tenants: Sequence[Tenant]) -> Lane:
    life = 0
    for tenant in tenants:
        life |= ((1 << (tenant.stop - tenant.start)) - 1) << tenant.start
    return Lane(tuple(tenants), max(tenant.num_bytes for tenant in tenants), life)


def _side_by_side(lanes: Sequence[Lane]) -> Packing:
    offsets = [0, *accumulate(lane.num_bytes for lane in lanes)]
    return Packing(tuple(lanes), tuple(offsets[:-1]), offsets[-1])


def _packings(lanes: Sequence[Lane]) -> Iterator[Packing]:
    """First-fit, with lanes sorted by falling bytes or by falling time in use."""
    yield _first_fit(sorted(lanes, key=lambda lane: -lane.num_bytes))
    yield _first_fit(sorted(lanes, key=lambda lane: -lane.life.bit_count()))


def _first_fit(lanes: Sequence[Lane]) -> Packing:
    """Each lane, in the given order, at the lowest offset at which it overlaps no earlier lane that is live at the same
    time.
    """
    placed: list[tuple[int, int, int]] = []
    offsets = []
    for lane in lanes:
        offset = 0
        for start, stop, life in placed:
            if stop > offset and life & lane.life:
                if start - offset >= lane.num_bytes:
                    break
                offset = stop
        insort(placed, (offset, offset + lane.num_bytes, lane.life))
        offsets.append(offset)
    return Packing(tuple(lanes), tuple(offsets), max((stop for _, stop, _ in placed), default=0))


def _num_bytes(packing: Packing) -> int:
    return packing.num_bytes


def _high_water(tenants: Iterable[Tenant]) -> int:
    changes: defaultdict[int, int] = defaultdict(int)
    for tenant in tenants:
        changes[tenant.start] += tenant.num_bytes
        changes[tenant.stop] -= tenant.num_bytes
    return max(accumulate(changes[instant] for instant in sorted(changes)), default=0)
