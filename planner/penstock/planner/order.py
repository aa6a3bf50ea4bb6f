"""A schedule as flat integer arrays, which generators produce and the simulator reads.

`core.schedule.Schedule` holds one object per action, which suits people, proofs and files. A search over hundreds of
thousands of actions needs arrays; `Order` is the same data, and `to_schedule` and `from_schedule` convert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.schedule import Action, Kind, Part, Schedule, flatten

Integers = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""Compute kinds in the order of their codes; tables indexed by kind follow it."""

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE = range(len(KINDS))

_CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Order:
    """Compute actions of all ranks, rank after rank: those of rank r lie at [offsets[r], offsets[r + 1]).

    ``offsets`` is int64 [ranks + 1]; ``kinds`` (codes, see `KINDS`), ``stages``, ``microbatches`` and ``slices`` are
    int32 [actions]. ``parts``, int32 [actions, 2], are units [first, stop) of the stage, 0 and 0 for all of it; None if
    no action is for a part. ``joined``, bool [actions], marks the first action of every pair
    (`penstock.core.schedule.Action.is_pair`), whose second is the next; None without pairs.

    If ``num_remainder_slices`` is not 0, the last micro-batch has that many slices, at most as many as the others.
    Tables of costs per slice then have columns for them behind those of the others.
    """

    offsets: npt.NDArray[np.int64]
    kinds: Integers
    stages: Integers
    microbatches: Integers
    slices: Integers
    num_stages: int
    num_microbatches: int
    num_slices: int
    parts: Integers | None = None
    num_remainder_slices: int = 0
    joined: Flags | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.offsets) - 1

    @property
    def num_actions(self) -> int:
        """Compute actions of all ranks together."""
        return int(self.offsets[-1])

    @property
    def ranks(self) -> Integers:
        """int32 [actions]: the rank of every action."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    @property
    def stage_ranks(self) -> Integers:
        """int32 [stages]: the rank of every stage (0 for a stage without actions)."""
        owners = np.zeros(self.num_stages, dtype=np.int32)
        owners[self.stages] = self.ranks
        return owners

    @property
    def num_columns(self) -> int:
        """Columns of tables with costs per slice."""
        return self.num_slices + self.num_remainder_slices

    @property
    def columns(self) -> Integers:
        """int32 [actions]: the column of every action in such tables."""
        if not self.num_remainder_slices:
            return self.slices
        is_last = (self.microbatches == self.num_microbatches - 1).astype(np.int32)
        columns: Integers = self.slices + self.num_slices * is_last
        return columns

    @property
    def num_cells(self) -> int:
        """Number of (micro-batch, slice) cells: the forwards, and the backwards, of one stage."""
        missing = self.num_slices - self.num_remainder_slices if self.num_remainder_slices else 0
        return self.num_microbatches * self.num_slices - missing

    def with_remainder(self, num_slices: int) -> Order:
        """The order with only the first ``num_slices`` slices in its last micro-batch; 0 keeps all
        (`penstock.core.schedule.Schedule.with_remainder`).
        """
        if not num_slices:
            return replace(self, num_remainder_slices=0) if self.num_remainder_slices else self
        kept = (self.microbatches < self.num_microbatches - 1) | (self.slices < num_slices)
        return replace(self.only(kept), num_remainder_slices=num_slices)

    def only(self, kept: npt.NDArray[np.bool_]) -> Order:
        """The order without the actions that are not ``kept`` [actions]; the other action of a pair runs alone."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return replace(
            self,
            offsets=before[self.offsets],
            kinds=self.kinds[kept],
            stages=self.stages[kept],
            microbatches=self.microbatches[kept],
            slices=self.slices[kept],
            parts=None if self.parts is None else self.parts[kept],
            joined=None if self.joined is None else (self.joined & kept & np.roll(kept, -1))[kept],
        )

    def with_recomputation(self, stages: Set[int], ahead: int = 0, *, inside: bool = False) -> Order:
        """The order with an R of these stages before each of their backwards: ``ahead`` actions earlier, but after its
        forward, and before or after a pair, not within. If a stage already has an R, or if stages recompute ``inside``,
        only backwards in pairs get one: they cannot recompute inside, because the pair's forward needs that memory.

        R needs no message, so it runs while the next action waits for one. Directly before its backward it fills the
        wait for the gradient. Further ahead it also fills other waits, so less of it is exposed, but its tensors live
        longer.
        """
        has_r = set(self.stages[self.kinds == RECOMPUTE].tolist())
        lacks_r = self._is_of(frozenset() if inside else stages - has_r)
        if self.joined is not None:
            lacks_r |= (self.joined | np.roll(self.joined, 1)) & self._is_of(stages)
        backwards = np.flatnonzero(self.recomputes_inside() & lacks_r)
        if not len(backwards):
            return self
        forwards = self._forwards_of(backwards) if ahead else backwards - self.num_actions
        places = np.maximum(backwards - ahead, forwards + 1)
        if self.joined is not None:
            is_within_pair = np.roll(self.joined, 1)[places]
            places = places - is_within_pair + 2 * (is_within_pair & (forwards == places - 1))
        return self.with_recomputations_of(backwards, places)

    def with_recomputations_of(self, backwards: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> Order:
        """The order with an R of each of the ``backwards`` before the action of the same rank at its place."""
        columns: dict[str, Any] = {
            name: np.insert(getattr(self, name), places, getattr(self, name)[backwards])
            for name in ("stages", "microbatches", "slices")
        }
        return replace(
            self,
            offsets=self.offsets + np.searchsorted(np.sort(places), self.offsets, side="left"),
            kinds=np.insert(self.kinds, places, RECOMPUTE),
            parts=None if self.parts is None else np.insert(self.parts, places, 0, axis=0),
            joined=None if self.joined is None else np.insert(self.joined, places, False),
            **columns,
        )

    def _is_of(self, stages: Set[int]) -> Flags:
        """[actions]: whether its stage is one of these. `numpy.isin` takes hundreds of times as long."""
        is_of: Flags = np.array([stage in stages for stage in range(self.num_stages)], dtype=bool)[self.stages]
        return is_of

    @property
    def _cells(self) -> npt.NDArray[np.int64]:
        """[actions]: the number of its stage, micro-batch and slice."""
        cells = (self.stages.astype(np.int64) * self.num_microbatches + self.microbatches) * self.num_slices
        return cells + self.slices

    def _forwards_of(self, where: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of the forwards with the stages, micro-batches and slices of the actions ``where``."""
        cells = self._cells
        forwards = np.flatnonzero(self.kinds == FORWARD)
        by_cell = forwards[np.argsort(cells[forwards])]
        numbers: npt.NDArray[np.int64] = by_cell[np.searchsorted(cells[by_cell], cells[where])]
        return numbers

    def recomputes_inside(self) -> Flags:
        """[actions]: whether the action is a B or I of a slice without an R. If its stage recomputes anything, it does
        so inside.
        """
        backwards: Flags = (self.kinds == BACKWARD) | (self.kinds == INPUT_GRADIENT)
        is_recompute = self.kinds == RECOMPUTE
        if not is_recompute.any():
            return backwards
        cells = self._cells
        has_r = np.zeros(self.num_stages * self.num_microbatches * self.num_slices, dtype=bool)
        has_r[cells[is_recompute]] = True
        return backwards & ~has_r[cells]

    @property
    def firsts(self) -> npt.NDArray[np.int64]:
        """Numbers of the first actions of pairs."""
        return np.flatnonzero(np.zeros(0, dtype=bool) if self.joined is None else self.joined).astype(np.int64)

    def unpaired(self) -> Order:
        """The order with the two actions of every pair one after the other."""
        return self if self.joined is None else replace(self, joined=None)

    def same_as(self, other: Order) -> bool:
        """Whether both hold the same actions in the same places."""
        own_arrays, other_arrays = self._arrays, other._arrays
        return len(own_arrays) == len(other_arrays) and all(
            np.array_equal(a, b) for a, b in zip(own_arrays, other_arrays, strict=True)
        )

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        others = [array for array in (self.parts, self.joined) if array is not None]
        return (self.offsets, self.kinds, self.stages, self.microbatches, self.slices, *others)


def join_ranks(rows: Sequence[Integers], *, num_stages: int, num_microbatches: int, num_slices: int) -> Order:
    """The order whose rank r runs ``rows[r]``, an int32 [actions, 4] of (kind, stage, micro-batch, slice), or [actions,
    6] with the two columns of `Order.parts`.
    """
    table = np.concatenate(rows) if rows else np.empty((0, 4), dtype=np.int32)
    return Order(
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        kinds=np.ascontiguousarray(table[:, 0]),
        stages=np.ascontiguousarray(table[:, 1]),
        microbatches=np.ascontiguousarray(table[:, 2]),
        slices=np.ascontiguousarray(table[:, 3]),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        parts=np.ascontiguousarray(table[:, 4:]) if table[:, 4:].any() else None,
    )


@functools.lru_cache(maxsize=1 << 16)
def action_of(kind: int, stage: int, microbatch: int, slice_: int, first: int = 0, stop: int = 0) -> Action:
    """The action with these codes."""
    return Action(KINDS[kind], stage, microbatch, slice_, part=Part(first, stop) if stop else None)


def actions_of(order: Order) -> Iterator[Action]:
    """All actions, rank after rank."""
    columns = [order.kinds, order.stages, order.microbatches, order.slices]
    columns += [] if order.parts is None else [*order.parts.T]
    return map(action_of, *(column.tolist() for column in columns))


def to_schedule(order: Order) -> Schedule:
    """The order as a schedule of objects."""
    actions = tuple(actions_of(order))
    bounds = order.offsets.tolist()
    joined = None if order.joined is None else order.joined.tolist()

    def row(first: int, stop: int) -> tuple[Action, ...]:
        if joined is None:
            return actions[first:stop]
        return tuple(_with_pairs(actions[first:stop], joined[first:stop]))

    return Schedule(
        ranks=tuple(itertools.starmap(row, itertools.pairwise(bounds))),
        num_stages=order.num_stages,
        num_microbatches=order.num_microbatches,
        num_slices=order.num_slices,
        num_remainder_slices=order.num_remainder_slices,
    )


def _with_pairs(actions: Sequence[Action], joined: Sequence[bool]) -> Iterator[Action]:
    entries = iter(zip(actions, joined, strict=True))
    for action, is_first in entries:
        if is_first:
            second, _ = next(entries)
            yield Action(Kind.OVERLAP, action.stage, children=(action, second))
        else:
            yield action


def from_schedule(schedule: Schedule, *, keep_pairs: bool = False) -> Order:
    """The schedule as arrays. An overlap becomes its children, in order; with ``keep_pairs`` those of a pair are
    joined.
    """
    order = join_ranks(
        [_row(flatten(actions)) for actions in schedule.ranks],
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
    )
    order = replace(order, num_remainder_slices=schedule.num_remainder_slices)
    if not keep_pairs:
        return order
    joined = np.array([is_first for actions in schedule.ranks for is_first in _firsts(actions)], dtype=bool)
    return replace(order, joined=joined) if joined.any() else order


def _firsts(actions: Sequence[Action]) -> Iterator[bool]:
    """Whether each action, with overlaps replaced by their children, is the first of a pair."""
    for action in actions:
        if action.is_pair:
            yield from (True, False)
        else:
            yield from (False for _ in flatten((action,)))


def _row(actions: Iterator[Action]) -> Integers:
    codes = [(_CODES[a.kind], a.stage, a.microbatch, a.slice, *_part_of(a)) for a in actions]
    return np.array(codes, dtype=np.int32).reshape(-1, 6)


def _part_of(action: Action) -> tuple[int, int]:
    return (0, 0) if action.part is None else (action.part.first, action.part.stop)
