"""The end of a simulated step: reductions, where each starts and what its ranks wait for it.

A rank has one link for each group, which carries one reduction after the other in the order of their starts, while the
rank goes on. Tie and norm begin once the last of their ranks has started them, and end on all of them together. Those
over dp and tp join the rank with its peers in other pipelines, who are as far as it is. Messages and reductions do not
slow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.program import Reduction
from penstock.core.schedule import Group
from penstock.planner.simulate.costs import Costs

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduction of one rank's ``stage``: on its link from ``begin_ns`` to ``over_ns``; its rank came to the wait at
    ``reached_ns``.
    """

    group: Group
    rank: int
    stage: int
    begin_ns: int
    over_ns: int
    reached_ns: int


class Reductions:
    """Joins reductions in turn. ``clock_ns`` [ranks] is how far ranks are, first ``finish_ns``; ``reduction_ns`` what
    they waited for reductions under way.

    ``started`` holds, by stage, when the reduction of its gradients started before its rank had finished.
    """

    def __init__(
        self, finish_ns: Nanoseconds, stage_ranks: Sequence[int], costs: Costs, started: Mapping[int, int]
    ) -> None:
        self.clock_ns = finish_ns.copy()
        self.reduction_ns = np.zeros_like(finish_ns)
        self.reductions: list[Reduced] = []
        self._finish_ns, self._costs, self._started = finish_ns, costs, started
        self._own = stages_of(stage_ranks)
        self._tied: tuple[int, ...] = ()

    def reduce(self, reduction: Reduction) -> None:
        """All ranks of the reduction join it; with a barrier, none but peers goes on before the last is there."""
        if reduction.group is Group.DP:
            for rank in reduction.ranks:
                self._sum_replicas(rank)
            return
        if reduction.group is Group.TIE:
            self._tied = reduction.ranks
        starts = [self._start_ns(reduction.group, rank) for rank in reduction.ranks]
        durations = [self._duration_ns(reduction.group, rank) for rank in reduction.ranks]
        if self._costs.has_barrier and not reduction.group.is_of_peers:
            starts, durations = [max(starts)] * len(starts), [max(durations)] * len(durations)
        for rank, start, duration in zip(reduction.ranks, starts, durations, strict=True):
            self._wait(reduction.group, rank, self._stage(reduction.group, rank), start, duration)

    def _sum_replicas(self, rank: int) -> None:
        """One reduction per stage: those that started before, then the others, a tied stage's last."""
        own = self._own[rank]
        tied = self._stage(Group.TIE, rank) if rank in self._tied else None
        early = sorted((self._started[stage], stage) for stage in own if stage in self._started and stage != tied)
        late = [(int(self._finish_ns[rank]), stage) for stage in own if stage not in self._started and stage != tied]
        after_tie = [] if tied is None else [(int(self.clock_ns[rank]), tied)]
        free = 0
        for start, stage in (*early, *late, *after_tie):
            begin, duration = max(start, free), self._duration_ns(Group.DP, stage)
            free = begin + duration
            self._wait(Group.DP, rank, stage, begin, duration)

    def _start_ns(self, group: Group, rank: int) -> int:
        now = int(self.clock_ns[rank])
        return self._started.get(self._stage(group, rank), now) if group is Group.TIE else now

    def _stage(self, group: Group, rank: int) -> int:
        """The stage under which `penstock.planner.passes.reductions` files the rank's reduction."""
        own = self._own[rank]
        return own[-1] if group is Group.TIE and own[0] else own[0]

    def _duration_ns(self, group: Group, place: int) -> int:
        """Of a rank, for dp of a stage."""
        durations = self._costs.reduce_ns.get(group)
        return durations[place] if durations else 0

    def _wait(self, group: Group, rank: int, stage: int, begin: int, duration: int) -> None:
        reached, over = int(self.clock_ns[rank]), begin + duration
        self.reductions.append(Reduced(group, rank, stage, begin, over, reached))
        self.clock_ns[rank] = max(reached, over)
        self.reduction_ns[rank] += min(max(over - reached, 0), duration)


def stages_of(stage_ranks: Sequence[int]) -> dict[int, list[int]]:
    """Every rank's stages, ascending."""
    own: dict[int, list[int]] = {}
    for stage, rank in enumerate(stage_ranks):
        own.setdefault(rank, []).append(stage)
    return own


def least_end_ns(
    finish_ns: Nanoseconds, stage_ranks: Sequence[int], costs: Costs, reductions: Sequence[Reduction]
) -> int:
    """The least length of a step whose ranks have no compute left at these times, whenever reductions started.

    The stage whose W a rank runs last is reduced after that, whichever it is. A tied stage of a rank with several may
    have been reduced before.
    """
    own = stages_of(stage_ranks)
    clock = finish_ns.copy()
    for reduction in reductions:
        members = list(reduction.ranks)
        if reduction.group is Group.TIE and any(len(own[rank]) > 1 for rank in members):
            continue
        durations = np.array([_least_ns(reduction.group, rank, own.get(rank, []), costs) for rank in members])
        if costs.has_barrier and not reduction.group.is_of_peers:
            clock[members] = clock[members].max() + durations.max()
        else:
            clock[members] += durations
    return int((clock + np.array(costs.optimizer_ns or (0,) * len(clock), dtype=np.int64)).max())


def _least_ns(group: Group, rank: int, stages: Sequence[int], costs: Costs) -> int:
    durations = costs.reduce_ns.get(group)
    if not durations:
        return 0
    return min([durations[stage] for stage in stages], default=0) if group is Group.DP else durations[rank]
