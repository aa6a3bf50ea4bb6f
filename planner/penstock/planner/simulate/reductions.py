"""The end of a simulated step: the starts of reductions, and their ranks' waits.

A rank has one link per group, which carries one reduction after the other in the order of their starts, while the rank
continues. Tie and norm begin once the last of their ranks has started them, and end on all of them together. Reductions
over dp and tp join the rank with its peers, in other pipelines and among its shards, which have the same timing; a
reduction over tp is waited for where it starts. Messages and reductions do not slow each other.

If replicas divide the optimizer state, reductions over dp leave each replica its part of the sums, and after its STEP a
rank gathers the weights of its stages over dp, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.program import Reduction
from penstock.core.schedule import Group
from penstock.planner.simulate.costs import Costs

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduction of one rank's ``stage``, or a gather of its weights: on its link from ``begin_ns`` to ``over_ns``.
    Its rank reached the wait at ``reached_ns``.
    """

    group: Group
    rank: int
    stage: int
    begin_ns: int
    over_ns: int
    reached_ns: int
    is_gather: bool = False


class Reductions:
    """Simulates ``reductions`` as `penstock.planner.passes.reductions` orders them: call `join` once, then `gather`.

    Afterwards ``clock_ns`` [ranks] is the time at which the rank has no reductions left, and ``reduction_ns`` its wait
    for reductions and gathers under way. ``pauses_ns`` [stages] is the wait of a rank whose compute continues, before
    the reduction over replicas of the stage starts.
    """

    def __init__(self, stage_ranks: Sequence[int], costs: Costs, reductions: Sequence[Reduction]) -> None:
        self.reductions: list[Reduced] = []
        self.clock_ns, self.reduction_ns = (np.zeros(costs.num_ranks, dtype=np.int64) for _ in range(2))
        self._stage_ranks, self._costs = stage_ranks, costs
        self._ranks_of = {reduction.group: reduction.ranks for reduction in reductions}
        self._own = stages_of(stage_ranks)
        ties = [reduction for reduction in reductions if reduction.group is Group.TIE]
        self._tied = {rank: tie.tied_of(stage_ranks, rank) for tie in ties for rank in tie.ranks}
        self.pauses_ns = np.zeros(len(stage_ranks), dtype=np.int64)
        if Group.TP in self._ranks_of:
            untied = [stage for stage, rank in enumerate(stage_ranks) if stage not in self._tied.get(rank, ())]
            self.pauses_ns[untied] = [self._duration_ns(Group.TP, stage) for stage in untied]

    def paused_ns(self, started: Iterable[int]) -> Nanoseconds:
        """[ranks]: the pauses of the stages whose chains ``started`` early."""
        paused = np.zeros_like(self.clock_ns)
        for stage in started:
            paused[self._stage_ranks[stage]] += self.pauses_ns[stage]
        return paused

    def join(self, finish_ns: Nanoseconds, started: Mapping[int, int]) -> None:
        """Run all reductions, on ranks that have nothing else left at ``finish_ns`` [ranks].

        ``started`` holds, by stage, the start of the first reduction of its gradients that is not waited for where it
        starts, if that was before its rank had finished.
        """
        self.clock_ns[:] = finish_ns
        has_peers = any(group.is_of_peers for group in self._ranks_of)
        starts = [self._begin_peers(rank, started) for rank in range(self._costs.num_ranks) if has_peers]
        if Group.TIE in self._ranks_of:
            self._meet(Group.TIE, [self._tie_start(rank, finish_ns, started) for rank in self._tied])
        for rank, stages in self._tied.items() if has_peers else ():
            for stage in stages:
                self._sum_shards(rank, stage, int(self.clock_ns[rank]))
                starts[rank][stage] = int(self.clock_ns[rank])
        if Group.DP in self._ranks_of:
            for rank, stage_starts in enumerate(starts):
                self._sum_replicas(rank, stage_starts)
        if Group.NORM in self._ranks_of:
            self._meet(Group.NORM, [int(self.clock_ns[rank]) for rank in self._ranks_of[Group.NORM]])

    def gather(self, stepped_ns: Nanoseconds) -> Nanoseconds:
        """[ranks]: the time at which ranks whose optimizer is done at ``stepped_ns`` [ranks] have all weights of their
        stages.
        """
        over_ns = stepped_ns.copy()
        for rank, stages in self._own.items() if self._costs.gather_ns else ():
            for stage in stages:
                begin, duration = int(over_ns[rank]), self._costs.gather_ns[stage]
                self.reductions.append(Reduced(Group.DP, rank, stage, begin, begin + duration, begin, is_gather=True))
                over_ns[rank] += duration
                self.reduction_ns[rank] += duration
        return over_ns

    def _tie_start(self, rank: int, finish_ns: Nanoseconds, started: Mapping[int, int]) -> int:
        """The start of the rank's tie; several tied stages share one sum, which starts after all compute."""
        first, *others = self._tied[rank]
        return int(finish_ns[rank]) if others else started.get(first, int(finish_ns[rank]))

    def _begin_peers(self, rank: int, started: Mapping[int, int]) -> dict[int, int]:
        """Sum the gradients that shards share of the rank's stages, except the tied ones; return the starts of the sums
        over replicas, in order.
        """
        stages = [stage for stage in self._own.get(rank, ()) if stage not in self._tied.get(rank, ())]
        early = sorted((started[stage], stage) for stage in stages if stage in started)
        starts = {stage: start for start, stage in early}
        for start, stage in early:
            self._sum_shards(rank, stage, start - int(self.pauses_ns[stage]))
        for stage in stages:
            if stage not in started:
                self._sum_shards(rank, stage, int(self.clock_ns[rank]))
                starts[stage] = int(self.clock_ns[rank])
        return starts

    def _sum_shards(self, rank: int, stage: int, start: int) -> None:
        """Sum over shards while the rank waits; a reduction that began early is over before the rank's clock."""
        if Group.TP in self._ranks_of:
            duration = self._duration_ns(Group.TP, stage)
            self.reductions.append(Reduced(Group.TP, rank, stage, start, start + duration, start))
            self.clock_ns[rank] = max(int(self.clock_ns[rank]), start + duration)
            self.reduction_ns[rank] += duration

    def _sum_replicas(self, rank: int, starts: Mapping[int, int]) -> None:
        """Run one reduction per stage, in the order of their starts."""
        free_ns = 0
        for stage, start in starts.items():
            begin, duration = max(start, free_ns), self._duration_ns(Group.DP, stage)
            free_ns = begin + duration
            self._wait(Group.DP, rank, stage, begin, duration)

    def _meet(self, group: Group, starts: Sequence[int]) -> None:
        """Run a reduction of the group's ranks; with a barrier, none continues before the last has joined."""
        ranks = self._ranks_of[group]
        durations = [self._duration_ns(group, rank) for rank in ranks]
        if self._costs.has_barrier:
            starts, durations = [max(starts)] * len(starts), [max(durations)] * len(durations)
        for rank, start, duration in zip(ranks, starts, durations, strict=True):
            self._wait(group, rank, self._stage(group, rank), start, duration)

    def _stage(self, group: Group, rank: int) -> int:
        """The stage that `penstock.planner.passes.reductions` names in the rank's reduction."""
        return self._tied[rank][0] if group is Group.TIE else self._own[rank][0]

    def _duration_ns(self, group: Group, place: int) -> int:
        """Nanoseconds of a rank's reduction, or for groups of peers of a stage's."""
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
    """The least length of a step whose ranks have no compute left at these times, for any starts of reductions.

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
    clock += np.array(costs.optimizer_ns or (0,) * len(clock), dtype=np.int64)
    if costs.gather_ns:
        np.add.at(clock, list(stage_ranks), costs.gather_ns)
    return int(clock.max())


def _least_ns(group: Group, rank: int, stages: Sequence[int], costs: Costs) -> int:
    durations = costs.reduce_ns.get(group)
    if not durations:
        return 0
    return min([durations[stage] for stage in stages], default=0) if group.is_of_peers else durations[rank]
