"""What a pair of overlapped actions hides of its collectives: the two passes taken in turns, in nanoseconds.

A pass of a rank with several shards computes, asks for a collective, and goes on once it is done. A pair's driver
(`penstock.trainer.units.collectives.run_pair`) starts what one pass asks for and runs the other one meanwhile, up to
what that one asks for. So a pass is a list of *segments*: nanoseconds of compute, and then of a collective (0: the pass
only lets the other one run). Shards have one link, on which collectives follow each other in the order of their starts.

Example, two passes of two segments each, 3 of compute and 2 of a collective:

    compute   A A A B B B A A A B B B . .
    link      . . . A A B B . . A A . B B     after A's first segment its collective runs next to B's

That takes 14, of which the last collective is exposed; one after the other they take 20. What both take less, 6 here,
is what the pair hides: the simulator takes it off the sum of the two actions, so that everything else in their times
stays.

Compute is taken to be as fast next to a collective as alone. On a device NCCL's kernels occupy some multiprocessors
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
    """The segments of any action, int64 [segments, COMPUTE COLLECTIVE], by its place; made when they are asked for."""

    segments_of: Callable[[Place], Nanoseconds]
    _segments: dict[Place, Nanoseconds] = field(default_factory=dict)
    _hidden: dict[tuple[Place, Place], int] = field(default_factory=dict)

    def hidden_ns(self, first: Nanoseconds, second: Nanoseconds) -> Nanoseconds:
        """[pairs], of places [pairs, 3] of the action that begins and of the other one."""
        pairs = list(zip(map(tuple, first.tolist()), map(tuple, second.tolist()), strict=True))
        return np.array([self._of(*pair) for pair in pairs], dtype=np.int64)

    def waited_ns(self, place: Place) -> int:
        """How long the action's rank waits for its shards, if it is no part of a pair."""
        return int(self._known(place)[:, COLLECTIVE].sum())

    def _known(self, place: Place) -> Nanoseconds:
        if place not in self._segments:
            self._segments[place] = self.segments_of(place)
        return self._segments[place]

    def _of(self, first: Place, second: Place) -> int:
        if (first, second) not in self._hidden:
            passes = self._known(first), self._known(second)
            serial = sum(int(each.sum()) for each in passes)
            self._hidden[first, second] = serial - int(pair_ns(*passes))
        return self._hidden[first, second]


@compiled
def pair_ns(first: Nanoseconds, second: Nanoseconds) -> int:
    """The time of both passes in turns, ``first`` begins; int64 [segments, 2]."""
    now, link = 0, 0
    at_first, at_second = 0, 0
    first_ready, second_ready = 0, 0
    is_first = True
    while at_first < len(first) or at_second < len(second):
        is_first = at_first < len(first) and (is_first or at_second == len(second))
        if is_first:
            now = max(now, first_ready) + first[at_first, COMPUTE]
            if first[at_first, COLLECTIVE] > 0:
                link = max(link, now) + first[at_first, COLLECTIVE]
                first_ready = link
            at_first += 1
        else:
            now = max(now, second_ready) + second[at_second, COMPUTE]
            if second[at_second, COLLECTIVE] > 0:
                link = max(link, now) + second[at_second, COLLECTIVE]
                second_ready = link
            at_second += 1
        is_first = not is_first
    return max(now, link)
