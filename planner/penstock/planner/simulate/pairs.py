"""Hidden time of a pair of overlapped actions: the two passes run in turns, in nanoseconds.

A pass of a rank with several shards computes, starts a collective, and continues once it is done. A pair's driver
(`penstock.trainer.units.collectives.run_pair`) starts the collective of one pass and meanwhile runs the other pass up
to its own next collective. So a pass is a list of *segments*: nanoseconds of compute, and then of a collective (0: the
pass only yields to the other one). Shards have one link, on which collectives follow each other in the order of their
starts.

Example, two passes of two segments each, 3 of compute and 2 of a collective:

    compute   A A A B B B A A A B B B . .
    link      . . . A A . B B . A A . B B     after A's first segment its collective runs next to B's

That takes 14, of which the last collective is exposed; one after the other they take 20. The difference, 6 here, is the
hidden time: the simulator subtracts it from the sum of the two actions, so that all other parts of their times are
unchanged.

Compute is assumed to be as fast next to a collective as alone. On a device NCCL's kernels occupy some multiprocessors
meanwhile, 4 blocks of 108 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled

Nanoseconds = npt.NDArray[np.int64]

Place = tuple[int, int, int]
"""Kind, stage and column of an action."""

COMPUTE, COLLECTIVE = range(2)
"""Columns of segments."""


@dataclass(frozen=True, slots=True, eq=False)
class Collectives:
    """The segments of any action, int64 [segments, COMPUTE COLLECTIVE], by its place; computed on first access."""

    segments_of: Callable[[Place], Nanoseconds]
    _segments: dict[Place, Nanoseconds] = field(default_factory=dict)
    _hidden: dict[tuple[Place, Place], int] = field(default_factory=dict)

    def hidden_ns(self, first: Nanoseconds, second: Nanoseconds) -> Nanoseconds:
        """[pairs]: hidden nanoseconds, for places [pairs, 3] of the first action and of the second."""
        pairs = np.concatenate([first, second], axis=1, dtype=np.int64)
        limits = pairs.max(axis=0, initial=0) + 1
        _, firsts, numbers = np.unique(np.ravel_multi_index(pairs.T, limits), return_index=True, return_inverse=True)
        hidden = [self._pair_hidden_ns(tuple(pair[:3]), tuple(pair[3:])) for pair in pairs[firsts].tolist()]
        return np.array(hidden, dtype=np.int64)[numbers]

    def waited_ns(self, place: Place) -> int:
        """The action's wait for its shards, if it is not in a pair."""
        return int(self._segments_at(place)[:, COLLECTIVE].sum())

    def _segments_at(self, place: Place) -> Nanoseconds:
        if place not in self._segments:
            self._segments[place] = self.segments_of(place)
        return self._segments[place]

    def _pair_hidden_ns(self, first: Place, second: Place) -> int:
        if (first, second) not in self._hidden:
            passes = self._segments_at(first), self._segments_at(second)
            serial = sum(int(segments.sum()) for segments in passes)
            self._hidden[first, second] = serial - int(pair_ns(*passes))
        return self._hidden[first, second]


@compiled
def pair_ns(first: Nanoseconds, second: Nanoseconds) -> int:
    """The time of both passes in turns, starting with ``first``; both are int64 [segments, 2]."""
    now_ns, link_ns = 0, 0
    at_first, at_second = 0, 0
    first_ready, second_ready = 0, 0
    is_first = True
    while at_first < len(first) or at_second < len(second):
        is_first = at_first < len(first) and (is_first or at_second == len(second))
        if is_first:
            now_ns = max(now_ns, first_ready) + first[at_first, COMPUTE]
            if first[at_first, COLLECTIVE] > 0:
                link_ns = max(link_ns, now_ns) + first[at_first, COLLECTIVE]
                first_ready = link_ns
            at_first += 1
        else:
            now_ns = max(now_ns, second_ready) + second[at_second, COMPUTE]
            if second[at_second, COLLECTIVE] > 0:
                link_ns = max(link_ns, now_ns) + second[at_second, COLLECTIVE]
                second_ready = link_ns
            at_second += 1
        is_first = not is_first
    return max(now_ns, link_ns)
