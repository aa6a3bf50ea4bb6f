"""Slices of a sequence: their costs, and for each number of slices the slicing with the smallest largest slice.

Problem. Slices of one sequence pass through a pipeline like micro-batches, so more slices shorten its warm-up and
cool-down. But a causal slice attends to its whole prefix: of slices with equally many tokens the last one is the
slowest. In 1F1B every turn lasts as long as the largest slice t*, so a step with M micro-batches of S slices over K
stages takes (M S + K - 1) t*. We want the S and the slicing that minimise this.

Idea. For a fixed S only t* matters, so find the slicing into S slices with the smallest t*, for every S, and rank the
results. This does not depend on M and K, so one table serves all candidates of a search. With r quanta still to be cut,

    tail[s, r] = min over q < r of max(edge[r, q], tail[s - 1, q]),    tail[0, 0] = 0.

Example: 6 quanta, of which k after a prefix of p cost 4 k + k p + k (k + 1) / 2: matrices, attention to the prefix, and
attention within the slice. All slicings cost 45 in total. For M = 2 and K = 4:

    S   slicing            costs             t*    (M S + K - 1) t*
    1   6                  45                45    225
    2   4, 2               26, 19            26    182      (3, 3 has costs 18, 27)
    3   3, 2, 1            18, 17, 10        18    162
    4   2, 2, 1, 1         11, 15, 9, 10     15    165
    5   2, 1, 1, 1, 1      11, 7, 8, 9, 10   11    143
    6   1, 1, 1, 1, 1, 1   5, 6, 7, 8, 9, 10 10    150

The objective is not unimodal in S, so every S has to be ranked.

Complexity. The table takes S N^2 / 2 steps for N quanta and up to S slices, the slicing of one S takes another S N.

Rejected: equal slices, whose largest slice is larger (27 instead of 26 above); bisection on t* with the longest
possible slices, which needs costs that grow with the length, while measured costs need not. `slicing_flush` has the
search for schedules whose step depends on the sum of the slices, too.

A sequence has ``num_quanta`` quanta of ``quantum`` tokens. If the quantum does not divide the sequence, the last slice
takes the remaining tokens, so every slice but the last is a whole number of quanta.

States are counted from the end: state ``r`` means that ``r`` quanta are still to be cut. A slice leads from state ``r``
(before it) to state ``q < r`` (after it), and ``edge_ns[r, q]`` is its cost. With this count the first of several
equally good choices is the longest slice, which is how every tie is broken.

Costs may be measured; they need not grow with length or prefix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled

IntArray: TypeAlias = npt.NDArray[np.int64]

FORBIDDEN = 1 << 60
"""The cost of a forbidden slice; the sum of two still fits 64 bits."""


@functools.lru_cache(maxsize=16)
def _cuts(num_quanta: int) -> tuple[IntArray, IntArray]:
    """The states before and after every possible slice."""
    before, after = np.tril_indices(num_quanta + 1, -1)
    before.setflags(write=False)
    after.setflags(write=False)
    return before, after


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlicingProblem:
    """Costs of slices on the bottleneck stage, and the allowed slices.

    ``cost_ns[k, p]`` (integers, at least num_quanta + 1 square) is the time of a slice of k quanta after a prefix of p
    quanta. Entries with k + p = num_quanta end the sequence and include its remaining tokens; entries with k = 0 or k +
    p > num_quanta are not read. ``tabulate`` fills such a table.

    The lengths are in tokens; ``max_slice_length`` is how memory bounds a slice. Raises ValueError if the table and the
    numbers are inconsistent.
    """

    cost_ns: IntArray
    sequence_length: int
    quantum: int
    min_slice_length: int = 1
    max_slice_length: int | None = None
    max_slices: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.quantum <= self.sequence_length:
            raise ValueError(f"quantum {self.quantum} is not between 1 and the sequence length {self.sequence_length}")
        size = self.num_quanta + 1
        if self.cost_ns.ndim != 2 or min(self.cost_ns.shape) < size:
            raise ValueError(f"cost_ns has shape {self.cost_ns.shape}, {self.num_quanta} quanta need {(size, size)}")
        if not np.issubdtype(self.cost_ns.dtype, np.integer):
            raise ValueError(f"cost_ns holds {self.cost_ns.dtype}, not integer nanoseconds")
        if self.max_slices is not None and self.max_slices < 1:
            raise ValueError(f"max_slices {self.max_slices} is not positive")

    @property
    def num_quanta(self) -> int:
        """Whole quanta in the sequence."""
        return self.sequence_length // self.quantum

    @property
    def most_slices(self) -> int:
        """The largest allowed number of slices."""
        return min(self.max_slices or self.num_quanta, self.num_quanta)

    def edges(self) -> IntArray:
        """``edge_ns[r, q]``, FORBIDDEN if no slice leads from r to q.

        Raises ValueError for negative costs, and for costs so large that their ranked sums would exceed 64 bits.
        """
        num_quanta = self.num_quanta
        before, after = _cuts(num_quanta)
        cost_ns = self.cost_ns[before - after, num_quanta - before].astype(np.int64)
        if cost_ns.min() < 0 or int(cost_ns.max()) * (num_quanta + 1) ** 2 >= FORBIDDEN:
            raise ValueError(f"slice costs span {cost_ns.min()} to {cost_ns.max()} ns, beyond what can be summed")
        tokens = (before - after) * self.quantum + np.where(after == 0, self.sequence_length % self.quantum, 0)
        max_length = self.sequence_length if self.max_slice_length is None else self.max_slice_length
        allowed = (tokens >= self.min_slice_length) & (tokens <= max_length)
        edge_ns = np.full((num_quanta + 1, num_quanta + 1), FORBIDDEN, dtype=np.int64)
        edge_ns[before[allowed], after[allowed]] = cost_ns[allowed]
        return edge_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """Slice lengths in tokens, first to last, and the time of each on the bottleneck stage."""

    lengths: tuple[int, ...]
    slice_ns: tuple[int, ...]

    @property
    def num_slices(self) -> int:
        """How many slices a sequence has."""
        return len(self.lengths)

    @property
    def total_ns(self) -> int:
        """The time of one sequence on the bottleneck stage."""
        return sum(self.slice_ns)

    @property
    def largest_ns(self) -> int:
        """The time of the most expensive slice."""
        return max(self.slice_ns)

    def flush_ns(self, *, num_microbatches: int, num_stages: int) -> int:
        """M sum(t) + (K-1) max(t): all forward, then all backward (TeraPipe, arXiv 2102.07988, eq. 5, for M)."""
        return num_microbatches * self.total_ns + (num_stages - 1) * self.largest_ns

    def one_f_one_b_ns(self, *, num_microbatches: int, num_stages: int) -> int:
        """(M S + K - 1) max(t): a slice-level 1F1B, where every turn waits for the largest slice."""
        return (num_microbatches * self.num_slices + num_stages - 1) * self.largest_ns


def tabulate(cost_of: Callable[[IntArray, IntArray], IntArray], *, sequence_length: int, quantum: int) -> IntArray:
    """The cost table of a SlicingProblem from one call of ``cost_of``.

    ``cost_of(lengths, prefixes)`` gets two flat arrays in tokens and returns nanoseconds. The length of a slice that
    ends the sequence includes the remaining tokens.
    """
    num_quanta = sequence_length // quantum
    before, after = _cuts(num_quanta)
    lengths = (before - after) * quantum + np.where(after == 0, sequence_length % quantum, 0)
    prefixes = (num_quanta - before) * quantum
    cost_ns = np.zeros((num_quanta + 1, num_quanta + 1), dtype=np.int64)
    cost_ns[before - after, num_quanta - before] = cost_of(lengths, prefixes)
    return cost_ns


def summable_unit_ns(cost_ns: IntArray, num_turns: int = 1) -> int:
    """A unit of cost, in nanoseconds, with which costs over ``num_turns`` whole sequences can be summed and ranked in
    64 bits: 1 unless slices take hours.
    """
    num_states = len(cost_ns)
    most_units = FORBIDDEN // (num_states * max(num_states, num_turns))
    return int(cost_ns.max()) // most_units + 1


def trace(problem: SlicingProblem, edge_ns: IntArray, states: Sequence[int]) -> Slicing:
    """The slicing that visits ``states``, from num_quanta down to 0."""
    before, after = np.array(states[:-1]), np.array(states[1:])
    lengths = (before - after) * problem.quantum
    lengths[-1] += problem.sequence_length % problem.quantum
    return Slicing(lengths=tuple(lengths.tolist()), slice_ns=tuple(edge_ns[before, after].tolist()))


class BalancedSlicings(Mapping[int, Slicing]):
    """For each possible number of slices, ascending, the slicing whose largest slice is cheapest.

    Ties are broken by the lexicographically longest-first slicing. Independent of micro-batches and stages, so one
    mapping serves every call of rank_one_f_one_b. Empty if the limits allow no slicing. The table is filled and
    slicings are traced up to the largest number of slices that was asked for, since callers need a few small ones. The
    problem's costs are in units of ``unit_ns``, the slicings' in nanoseconds.
    """

    def __init__(self, problem: SlicingProblem, unit_ns: int = 1) -> None:
        self._problem, self._edge_ns, self._unit_ns = problem, problem.edges(), unit_ns
        self._tails = np.full((problem.most_slices + 1, len(self._edge_ns)), FORBIDDEN, dtype=np.int64)
        self._tails[0, 0] = 0
        self._num_filled = 1
        self._traced: dict[int, Slicing] = {}

    def __getitem__(self, num_slices: int) -> Slicing:
        if not self._is_possible(num_slices):
            raise KeyError(num_slices)
        if num_slices not in self._traced:
            states = _descent(self._edge_ns, self._tails, num_slices)
            slicing = trace(self._problem, self._edge_ns, states)
            slicing = replace(slicing, slice_ns=tuple(self._unit_ns * slice_cost for slice_cost in slicing.slice_ns))
            self._traced[num_slices] = slicing
        return self._traced[num_slices]

    def __iter__(self) -> Iterator[int]:
        return (count for count in range(1, len(self._tails)) if self._is_possible(count))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _is_possible(self, num_slices: int) -> bool:
        """Whether there is a slicing with ``num_slices`` slices; fills the table up to that number."""
        if not 0 < num_slices < len(self._tails):
            return False
        if num_slices >= self._num_filled:
            smallest_largest_ns(self._edge_ns, self._tails[: num_slices + 1], self._num_filled)
            self._num_filled = num_slices + 1
        return bool(self._tails[num_slices, -1] < FORBIDDEN)


def rank_one_f_one_b(slicings: Iterable[Slicing], *, num_microbatches: int, num_stages: int) -> tuple[Slicing, ...]:
    """Slicings by (M S + K - 1) t*(S), smallest first; among equals the fewest slices first."""

    def rank(slicing: Slicing) -> tuple[int, int]:
        objective_ns = slicing.one_f_one_b_ns(num_microbatches=num_microbatches, num_stages=num_stages)
        return objective_ns, slicing.num_slices

    return tuple(sorted(slicings, key=rank))


@compiled
def smallest_largest_ns(edge_ns: IntArray, tails: IntArray, first: int) -> None:
    """Fill ``tails[s, r]`` from row ``first`` on: the smallest possible largest slice when r quanta are cut into
    exactly s slices. On entry these rows are `FORBIDDEN`, which means that there is no such slicing; row 0 is 0 where
    nothing is left to cut.
    """
    for count in range(first, len(tails)):
        for before in range(1, len(edge_ns)):
            best = tails[count, before]
            for after in range(before):
                best = min(best, max(edge_ns[before, after], tails[count - 1, after]))
            tails[count, before] = best


def _descent(edge_ns: IntArray, tails: IntArray, num_slices: int) -> list[int]:
    """The states of the longest-first slicing that attains the optimum."""
    bound_ns, states = tails[num_slices, -1], [len(edge_ns) - 1]
    for left in range(num_slices - 1, -1, -1):
        largest_ns = np.maximum(edge_ns[states[-1]], tails[left])
        states.append(int((largest_ns <= bound_ns).argmax()))
    return states
