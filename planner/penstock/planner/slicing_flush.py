"""The slicing that minimises M sum(t) + (K-1) max(t): all forwards, then all backwards.

TeraPipe (arXiv 2102.07988, eq. 6-8) tries every slice time as a ceiling t_max and finds, for each, the cheapest slicing
below it. Here most ceilings are ruled out without being tried:

- a slicing whose largest slice is this one costs in total at least the cheapest way through this one;
- a lower ceiling never makes the total smaller, so one solved ceiling bounds all those below it;
- the slicing found under a ceiling is the answer for every ceiling down to its own largest slice.

A few ceilings are solved at once, spread over those still open, until the bound of each exceeds the best. The result is
optimal for any costs; with a tolerance a ceiling that can gain no more than that is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.slicing import FORBIDDEN, IntArray, Slicing, SlicingProblem, trace

CEILINGS_AT_ONCE = 8
"""Chosen to balance the time per round (about 0.4 ms at 256 quanta) and the number of rounds."""


def best_flush_slicing(
    problem: SlicingProblem, *, num_microbatches: int, num_stages: int, eps_ns: int = 0
) -> Slicing | None:
    """The slicing with the smallest flush_ns; None if the limits allow none.

    Ties are broken by the fewest slices, then by the lexicographically longest first. Ceilings less than ``eps_ns``
    apart may be skipped: the result is within (num_stages - 1) * eps_ns of the optimum. Raises ValueError for counts
    below 1 and for costs that overflow.
    """
    if num_microbatches < 1 or num_stages < 1 or eps_ns < 0:
        raise ValueError(f"{num_microbatches=}, {num_stages=} and {eps_ns=} must be positive, eps_ns may be 0")
    flow = _Flow(problem)
    if (num_microbatches * problem.num_quanta + num_stages) * flow.most_ns >= FORBIDDEN:
        raise ValueError(f"{num_microbatches} micro-batches of slices up to {flow.most_ns} ns are beyond 64 bits")
    ceilings = _Ceilings.of(flow, only_the_largest=num_stages == 1)

    def rank(slicing: Slicing) -> tuple[int, int, tuple[int, ...]]:
        objective_ns = slicing.flush_ns(num_microbatches=num_microbatches, num_stages=num_stages)
        return objective_ns, slicing.num_slices, tuple(-length for length in slicing.lengths)

    best: Slicing | None = None
    live = np.arange(len(ceilings.ceiling_ns))
    while live.size:
        tried = live[np.unique(np.linspace(0, live.size - 1, CEILINGS_AT_ONCE).astype(np.intp))]
        for index, slicing in zip(tried.tolist(), flow.cheapest_under(ceilings.ceiling_ns[tried]), strict=True):
            ceilings.close(index, slicing)
            if slicing is not None:
                best = slicing if best is None else min(best, slicing, key=rank)
        target_ns = FORBIDDEN if best is None else rank(best)[0] - (num_stages - 1) * eps_ns
        bound_ns = num_microbatches * ceilings.total_ns + (num_stages - 1) * ceilings.ceiling_ns
        live = np.flatnonzero(ceilings.open & (bound_ns <= target_ns))
    return best


def least_total_ns(problem: SlicingProblem) -> int:
    """The time of one sequence on one stage with its cheapest slicing, of any number of slices; there is one."""
    flow = _Flow(problem)
    (tail_n,), _ = flow.tails(np.array([FORBIDDEN - 1]))
    return int(tail_n[-1]) // (problem.num_quanta + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ceilings:
    """All possible times of a largest slice, ascending; ``total_ns`` bounds the slicings with that largest slice."""

    ceiling_ns: IntArray
    total_ns: IntArray
    open: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, flow: _Flow, *, only_the_largest: bool) -> _Ceilings:
        """All ceilings; if the largest slice costs nothing extra, only the one that forbids nothing."""
        through_ns = flow.through_ns()
        before, after = np.nonzero(through_ns < FORBIDDEN)
        ceiling_ns, total_ns = flow.edge_ns[before, after], through_ns[before, after]
        order = np.lexsort((total_ns, ceiling_ns))
        first = order[np.flatnonzero(np.diff(ceiling_ns[order], prepend=-1))]
        first = first[-1:] if only_the_largest else first
        return cls(ceiling_ns=ceiling_ns[first], total_ns=total_ns[first], open=np.ones(len(first), dtype=np.bool_))

    def close(self, index: int, slicing: Slicing | None) -> None:
        """Record the slicing that was found under ceiling ``index``, and close the ceilings that it decides."""
        if slicing is None:
            self.open[: index + 1] = False
            return
        np.maximum(self.total_ns[:index], slicing.total_ns, out=self.total_ns[:index])
        self.open[np.searchsorted(self.ceiling_ns, slicing.largest_ns) : index + 1] = False


class _Flow:
    """Cheapest paths from state num_quanta to state 0 (see slicing.py) over slices under a ceiling.

    A path's rank is total_ns * radix + number of slices: one integer, smallest for the cheapest path and among those
    for the one with the fewest slices. Shape letters: n states, c ceilings solved together, s slices left.
    """

    def __init__(self, problem: SlicingProblem) -> None:
        self._problem = problem
        self._radix = problem.num_quanta + 1
        self.edge_ns = problem.edges()
        self._rank_nn = np.where(self.edge_ns < FORBIDDEN, self.edge_ns * self._radix + 1, FORBIDDEN)

    @property
    def most_ns(self) -> int:
        """The most expensive allowed slice, 0 if there is none."""
        return int(self.edge_ns.max(where=self.edge_ns < FORBIDDEN, initial=0))

    def through_ns(self) -> IntArray:
        """[r, q]: the cheapest whole slicing with the slice from r to q, FORBIDDEN if there is none."""
        tail_c1n, _ = self.tails(np.array([FORBIDDEN - 1]))
        tail_ns = np.where(tail_c1n[0] < FORBIDDEN, tail_c1n[0] // self._radix, FORBIDDEN)
        head_ns = np.zeros_like(tail_ns)
        for state in reversed(range(self._problem.num_quanta)):
            head_ns[state] = min(FORBIDDEN, (head_ns[state + 1 :] + self.edge_ns[state + 1 :, state]).min())
        return np.minimum(head_ns[:, None] + self.edge_ns + tail_ns, FORBIDDEN)

    def cheapest_under(self, ceiling_ns: IntArray) -> Iterator[Slicing | None]:
        """For each ceiling the best slicing with no slice above it, or None."""
        ceiling_rank = ceiling_ns * self._radix + 1
        tail_cn, next_cn = self.tails(ceiling_rank)
        for ceiling, tail_n, next_n in zip(ceiling_rank, tail_cn, next_cn, strict=True):
            if tail_n[-1] == FORBIDDEN:
                yield None
            elif tail_n[-1] % self._radix <= self._problem.most_slices:
                yield self._follow(next_n)
            else:
                yield self._few_slices_under(int(ceiling))

    def tails(self, ceiling_rank: IntArray) -> tuple[IntArray, IntArray]:
        """For every ceiling and state: the best rank from there to the end, and the state after the next slice."""
        tail_cn = np.zeros((len(ceiling_rank), self._radix), dtype=np.int64)
        next_cn = np.zeros_like(tail_cn)
        _fill_tails(self._rank_nn, ceiling_rank, tail_cn, next_cn)
        return tail_cn, next_cn

    def _few_slices_under(self, ceiling_rank: int) -> Slicing | None:
        """The best slicing under one ceiling if the cheapest has more slices than allowed; slower, rarely needed."""
        rank_nn = np.where(self._rank_nn <= ceiling_rank, self._rank_nn, FORBIDDEN)
        tail_sn = np.full((self._problem.most_slices + 1, self._radix), FORBIDDEN, dtype=np.int64)
        tail_sn[0, 0] = 0
        _fill_counted_tails(rank_nn, tail_sn)
        count = int(tail_sn[:, -1].argmin())
        if tail_sn[count, -1] == FORBIDDEN:
            return None
        states = [self._problem.num_quanta]
        for left in reversed(range(count)):
            states.append(int((rank_nn[states[-1]] + tail_sn[left]).argmin()))
        return trace(self._problem, self.edge_ns, states)

    def _follow(self, next_n: IntArray) -> Slicing:
        states = [self._problem.num_quanta]
        while states[-1]:
            states.append(int(next_n[states[-1]]))
        return trace(self._problem, self.edge_ns, states)


@numba.njit(cache=True, nogil=True)
def _fill_tails(rank_nn: IntArray, ceiling_rank: IntArray, tail_cn: IntArray, next_cn: IntArray) -> None:
    """Fill ``tail_cn`` and ``next_cn`` for `_Flow.tails`; of equally good slices the longest is taken."""
    for ceiling in range(len(ceiling_rank)):
        for state in range(1, len(rank_nn)):
            best = FORBIDDEN
            for after in range(state):
                rank = rank_nn[state, after]
                if rank <= ceiling_rank[ceiling] and rank + tail_cn[ceiling, after] < best:
                    best = rank + tail_cn[ceiling, after]
                    next_cn[ceiling, state] = after
            tail_cn[ceiling, state] = best


@numba.njit(cache=True, nogil=True)
def _fill_counted_tails(rank_nn: IntArray, tail_sn: IntArray) -> None:
    """``tail_sn[s, n]``: the best rank from state n to the end in exactly s slices; row 0 is filled on entry.

    Under a low ceiling every slice is short, so states before the first reachable one are skipped.
    """
    first_n = np.zeros(len(rank_nn), dtype=np.int64)
    for state in range(len(rank_nn)):
        while first_n[state] < state and rank_nn[state, first_n[state]] == FORBIDDEN:
            first_n[state] += 1
    for count in range(1, len(tail_sn)):
        for state in range(1, len(rank_nn)):
            best = FORBIDDEN
            for after in range(first_n[state], state):
                best = min(best, rank_nn[state, after] + tail_sn[count - 1, after])
            tail_sn[count, state] = best
