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
more than `FAR` times the peak of live bytes, every extent of a slot (`penstock.core.extents`) is also placed by itself,
first-fit in several orders.

Example: slots of 256 bytes, live ranges in instructions. Family A has [0, 4), [2, 6), [4, 8) and [6, 10). The first and
the third share a lane, and so do the second and the fourth: offsets 0 and 256. Family B has [3, 5) and [7, 9), one lane
at offset 512. The arena has 768 bytes, which is the peak of live bytes, at instruction 3. If family A had only [0, 2)
and [1, 3), and family B [3, 5) and [4, 6), the stack would take 1,024 bytes, twice the peak. Packed together, both
lanes of B take the offsets of A, since no instruction needs both families.

Complexity. Lanes by size take n log n for n slots. First-fit compares m lanes pairwise by bit sets of instructions, for
at most `MAX_LANES_TOGETHER` lanes. n extents placed one by one take n^2 steps of a compiled loop, some 10 ms for 3,000,
and in the order of their starts n steps for each that is live at once.

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

from penstock.core.layout import ALIGNMENT_BYTES, aligned
from penstock.core.program import Extent
from penstock.core.roles import SlotName
from penstock.planner.passes.arena_kernel import Ints, first_fit

NUM_PERIODS = 5
"""Number of periods that are tried for a family, from the shortest possible one."""

CLOSE = 1.01
"""An arena this close to the peak of live bytes is not improved further."""

FAR = 1.03
"""Lanes that need more than so many times the peak of live bytes are compared with extents placed one by one."""

MAX_EXTENTS = 3_000
"""More extents are placed in one order only: by start, which is fast."""

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
        arenas.append(_one_by_one(lives, [(sum(extents),) for extents in sizes]))
        if sum(map(len, sizes)) > len(sizes):
            arenas.append(_one_by_one(lives, sizes))
    return min(arenas, key=lambda arena: arena[1])


def _places_of(packing: Packing, sizes: Sequence[Sequence[int]]) -> Places:
    offsets = {
        tenant.index: offset
        for lane, offset in zip(packing.lanes, packing.offsets, strict=True)
        for tenant in lane.tenants
    }
    return [(Extent(offsets[index], sum(extents)),) for index, extents in enumerate(sizes)]


def _one_by_one(lives: Sequence[tuple[int, int]], sizes: Sequence[Sequence[int]]) -> tuple[Places, int]:
    """Every extent by itself, in the best of several orders, and the arena's bytes."""
    counts = [len(extents) for extents in sizes]
    num_bytes = np.array([size for extents in sizes for size in extents], dtype=np.int64)
    starts, stops = np.repeat(np.array(lives, dtype=np.int64).reshape(-1, 2), counts, axis=0).T.copy()
    aligned_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    orders = _orders_of_extents if max(counts) > 1 else _orders_of_slots
    arenas = []
    for order in orders(starts, stops, aligned_bytes):
        offsets = np.zeros(len(order), dtype=np.int64)
        arenas.append((first_fit(order, starts, stops, aligned_bytes, offsets), offsets.tolist()))
    arena_bytes, lows = min(arenas, key=lambda arena: arena[0])
    extents = map(Extent, lows, num_bytes.tolist())
    return [tuple(islice(extents, count)) for count in counts], arena_bytes


def _orders_of_slots(starts: Ints, stops: Ints, num_bytes: Ints) -> Iterator[Ints]:
    """By falling bytes, and by falling bytes times duration. Digests of stored plans depend on these two."""
    yield np.lexsort((starts, -num_bytes))
    yield np.lexsort((starts, -num_bytes * (stops - starts)))


def _orders_of_extents(starts: Ints, stops: Ints, num_bytes: Ints) -> Iterator[Ints]:
    """By start, by falling bytes, and by distance from the instruction with most live bytes: those that are live there
    first. Of those with equal starts or distances the one that lives longest is first.
    """
    yield np.lexsort((-num_bytes, -stops, starts))
    if len(starts) > MAX_EXTENTS:
        return
    yield np.lexsort((starts, -num_bytes))
    changes = np.zeros(int(stops.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(changes, starts, num_bytes)
    np.add.at(changes, stops, -num_bytes)
    peak = int(changes.cumsum().argmax())
    distances = np.maximum(np.maximum(starts - peak, peak - stops + 1), 0)
    yield np.lexsort((starts - stops, distances))


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
    assert best is not None, "there always is a way by size"
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
