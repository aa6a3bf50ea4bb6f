"""Reductions and gathers of a simulated step: their starts, and their ranks' waits.

A rank has one link per group, which carries one reduction after the other in the order of their starts, while the rank
continues. With a barrier, tie and norm begin once the last of their ranks has started them, and end on all of them
together; without one each rank starts on its own. Reductions over dp and tp join the rank with its peers, in other
pipelines and among its shards, which have the same timing; a reduction over tp is waited for where it starts. Messages
and reductions do not slow each other.

A stage whose last backward is in parts is reduced in buckets (`penstock.core.buckets`), one after the other.

If replicas divide the optimizer state, reductions over dp leave each replica its part of the sums. At the start of a
step a rank gathers the weights of its stages over dp, one after the other on its link, in the order in which its
forwards need them. With a barrier all ranks begin a step at the same time. Without one a rank's gathers for the next
step begin as soon as it is done with this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.program import Reduction
from penstock.core.schedule import Group, Part
from penstock.planner.simulate.costs import Costs

Nanoseconds = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """The gradients of ``stage``, or bucket ``number`` of them."""

    stage: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduction of one rank's ``stage``, or of a ``part`` of it, or a gather of its weights: on its link from
    ``begin_ns`` to ``over_ns``. Its rank reached the wait at ``reached_ns``.
    """

    group: Group
    rank: int
    stage: int
    begin_ns: int
    over_ns: int
    reached_ns: int
    is_gather: bool = False
    part: Part | None = None


class Reductions:
    """Simulates ``reductions`` as `penstock.planner.passes.reductions` orders them: call `join` once.

    Afterwards ``clock_ns`` [ranks] is the time at which the rank has no reductions left, and ``reduction_ns`` its wait
    for reductions and gathers under way. The stages ``cut`` are reduced and gathered in buckets. ``pieces`` are the
    gradients of each stage, or of each of its buckets, and ``pauses_ns`` [pieces] is the wait of a rank whose compute
    continues, before the reduction over replicas starts.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        costs: Costs,
        reductions: Sequence[Reduction],
        cut: Collection[int] = (),
    ) -> None:
        self.reductions: list[Reduced] = []
        self.clock_ns, self.reduction_ns = (np.zeros(costs.num_ranks, dtype=np.int64) for _ in range(2))
        self._stage_ranks, self._costs, self._cut = stage_ranks, costs, cut
        self._ranks_of = {reduction.group: reduction.ranks for reduction in reductions}
        self._own = stages_of(stage_ranks)
        self.pieces = [piece for stage in range(len(stage_ranks)) for piece in self._pieces_of(stage)]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        ties = [reduction for reduction in reductions if reduction.group is Group.TIE]
        tied = {rank: tie.tied_of(stage_ranks, rank) for tie in ties for rank in tie.ranks}
        self._tied = {rank: [self._pieces_of(stage)[-1] for stage in stages] for rank, stages in tied.items()}
        self.pauses_ns = np.zeros(len(self.pieces), dtype=np.int64)
        if Group.TP in self._ranks_of:
            waited = [number for number, piece in enumerate(self.pieces) if not self._is_tied(piece)]
            self.pauses_ns[waited] = [self._duration_ns(Group.TP, self.pieces[number]) for number in waited]

    def rank_of(self, piece: Piece) -> int:
        """The rank of the piece's stage."""
        return self._stage_ranks[piece.stage]

    def num_pieces(self, stage: int) -> int:
        """Number of buckets in which the stage is reduced and gathered."""
        return len(self._costs.buckets[stage]) if stage in self._cut else 1

    def _pieces_of(self, stage: int) -> list[Piece]:
        return [Piece(stage, number) for number in range(self.num_pieces(stage))]

    def _is_tied(self, piece: Piece) -> bool:
        return piece in self._tied.get(self._stage_ranks[piece.stage], ())

    def _pause_ns(self, piece: Piece) -> int:
        return int(self.pauses_ns[self._numbers[piece]])

    def paused_ns(self, started: Iterable[Piece]) -> Nanoseconds:
        """[ranks]: the pauses of the pieces whose chains ``started`` early."""
        paused = np.zeros_like(self.clock_ns)
        for piece in started:
            paused[self._stage_ranks[piece.stage]] += self._pause_ns(piece)
        return paused

    def join(self, finish_ns: Nanoseconds, started: Mapping[Piece, int]) -> None:
        """Run all reductions, on ranks that have nothing else left at ``finish_ns`` [ranks].

        ``started`` holds, by piece, the start of the first reduction of its gradients that is not waited for where it
        starts, if that was before its rank had finished.
        """
        self.clock_ns[:] = finish_ns
        has_peers = any(group.is_of_peers for group in self._ranks_of)
        starts = [self._begin_peers(rank, started) for rank in range(self._costs.num_ranks) if has_peers]
        if Group.TIE in self._ranks_of:
            self._meet(Group.TIE, [self._tie_start(rank, finish_ns, started) for rank in self._tied])
        for rank, pieces in self._tied.items() if has_peers else ():
            for piece in pieces:
                self._sum_shards(rank, piece, int(self.clock_ns[rank]))
                starts[rank][piece] = int(self.clock_ns[rank])
        if Group.DP in self._ranks_of:
            for rank, piece_starts in enumerate(starts):
                self._sum_replicas(rank, piece_starts)
        if Group.NORM in self._ranks_of:
            self._meet(Group.NORM, [int(self.clock_ns[rank]) for rank in self._ranks_of[Group.NORM]])

    def gathered_ns(self, pieces: Iterable[Piece]) -> list[int]:
        """For pieces in the order in which their ranks gather them, the time from the begin of a rank's gathers to the
        end of the piece's.
        """
        clock = [0] * self._costs.num_ranks
        return [self._gathered_ns(clock, piece) for piece in pieces]

    def _gathered_ns(self, clock: list[int], piece: Piece) -> int:
        rank = self.rank_of(piece)
        clock[rank] += self.gather_ns(piece)
        return clock[rank]

    def gather_ns(self, piece: Piece) -> int:
        """Nanoseconds of a piece's gather."""
        if piece.stage in self._cut:
            return self._costs.buckets[piece.stage][piece.number].gather_ns
        return self._costs.gather_ns[piece.stage]

    def gather(self, piece: Piece, over_ns: int, missing_ns: int) -> None:
        """Record the gather of a piece that is over at ``over_ns``, ``missing_ns`` after its rank came to the wait."""
        rank = self.rank_of(piece)
        self.reductions.append(
            Reduced(
                Group.DP,
                rank,
                piece.stage,
                over_ns - self.gather_ns(piece),
                over_ns,
                over_ns - missing_ns,
                is_gather=True,
                part=self._part_of(piece),
            )
        )
        self.reduction_ns[rank] += missing_ns

    def _tie_start(self, rank: int, finish_ns: Nanoseconds, started: Mapping[Piece, int]) -> int:
        """The start of the rank's tie; several tied stages share one sum, which starts after all compute."""
        first, *others = self._tied[rank]
        return int(finish_ns[rank]) if others else started.get(first, int(finish_ns[rank]))

    def _begin_peers(self, rank: int, started: Mapping[Piece, int]) -> dict[Piece, int]:
        """Sum the gradients that shards share of the rank's stages, except the tied ones; return the starts of the sums
        over replicas, in order.
        """
        own = [piece for stage in self._own.get(rank, ()) for piece in self._pieces_of(stage)]
        pieces = [piece for piece in own if not self._is_tied(piece)]
        early = sorted((started[piece], piece) for piece in pieces if piece in started)
        starts = {piece: start for start, piece in early}
        for start, piece in early:
            self._sum_shards(rank, piece, start - self._pause_ns(piece))
        for piece in pieces:
            if piece not in started:
                self._sum_shards(rank, piece, int(self.clock_ns[rank]))
                starts[piece] = int(self.clock_ns[rank])
        return starts

    def _sum_shards(self, rank: int, piece: Piece, start: int) -> None:
        """Sum over shards while the rank waits; a reduction that began early is over before the rank's clock."""
        if Group.TP in self._ranks_of:
            duration = self._duration_ns(Group.TP, piece)
            part = self._part_of(piece)
            self.reductions.append(Reduced(Group.TP, rank, piece.stage, start, start + duration, start, part=part))
            self.clock_ns[rank] = max(int(self.clock_ns[rank]), start + duration)
            self.reduction_ns[rank] += duration

    def _sum_replicas(self, rank: int, starts: Mapping[Piece, int]) -> None:
        """Run one reduction per piece, in the order of their starts."""
        free_ns = 0
        for piece, start in starts.items():
            begin, duration = max(start, free_ns), self._duration_ns(Group.DP, piece)
            free_ns = begin + duration
            self._wait(Group.DP, rank, piece.stage, begin, duration, self._part_of(piece))

    def _meet(self, group: Group, starts: Sequence[int]) -> None:
        """Run a reduction of the group's ranks; with a barrier, none continues before the last has joined."""
        ranks = self._ranks_of[group]
        of_ranks = self._costs.reduce_ns.get(group) or (0,) * self._costs.num_ranks
        durations = [of_ranks[rank] for rank in ranks]
        if self._costs.has_barrier:
            starts, durations = [max(starts)] * len(starts), [max(durations)] * len(durations)
        for rank, start, duration in zip(ranks, starts, durations, strict=True):
            self._wait(group, rank, self._stage(group, rank), start, duration)

    def _stage(self, group: Group, rank: int) -> int:
        """The stage that `penstock.planner.passes.reductions` names in the rank's reduction."""
        return self._tied[rank][0].stage if group is Group.TIE else self._own[rank][0]

    def _duration_ns(self, group: Group, piece: Piece) -> int:
        """Nanoseconds of a reduction over peers."""
        if piece.stage in self._cut:
            return self._costs.buckets[piece.stage][piece.number].reduce_ns.get(group, 0)
        durations = self._costs.reduce_ns.get(group)
        return durations[piece.stage] if durations else 0

    def _part_of(self, piece: Piece) -> Part | None:
        return self._costs.buckets[piece.stage][piece.number].part if piece.stage in self._cut else None

    def _wait(self, group: Group, rank: int, stage: int, begin: int, duration: int, part: Part | None = None) -> None:
        reached, over = int(self.clock_ns[rank]), begin + duration
        self.reductions.append(Reduced(group, rank, stage, begin, over, reached, part=part))
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

    After its last W a rank still reduces a stage or a bucket; the shortest such reduction counts. A tied stage of a
    rank with several may have been reduced before. Every forward follows one of stage 0, which waits at least for the
    parameters of its first units. Without a barrier each rank gathers at least those of one of its stages' first units
    between its last action and its next one.
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
    if costs.gather_ns and costs.has_barrier:
        clock += _least_gather_ns(0, costs)
    elif costs.gather_ns:
        for rank, stages in own.items():
            clock[rank] += min(_least_gather_ns(stage, costs) for stage in stages)
    return int(clock.max())


def _least_gather_ns(stage: int, costs: Costs) -> int:
    """The least wait for parameters of a rank that has nothing to do before it begins with the stage."""
    first_bucket = [buckets[-1].gather_ns for buckets in costs.buckets[stage : stage + 1] if buckets]
    return min([costs.gather_ns[stage], *first_bucket])


def _least_ns(group: Group, rank: int, stages: Sequence[int], costs: Costs) -> int:
    durations = costs.reduce_ns.get(group)
    if not durations:
        return 0
    if not group.is_of_peers:
        return durations[rank]
    buckets = [bucket.reduce_ns.get(group, 0) for stage in stages if costs.buckets for bucket in costs.buckets[stage]]
    return min([*(durations[stage] for stage in stages), *buckets], default=0)
