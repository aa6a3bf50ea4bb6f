"""The part of the proof about one rank's gradients and parameters: gradients are complete, then reduced in order, then
used, once; parameters are gathered before they are used.

A stage's gradients are complete after its last W. They are summed over the copies of a tied matrix (tie), then over
shards if each has only an addend (tp, stage by stage), then over replicas (dp, stage by stage), and count in the norm,
after which STEP uses them. START_REDUCE and WAIT_REDUCE bracket the time in which a reduction may read and write its
gradients.

The sums over shards and replicas may be for buckets of a stage (`penstock.core.buckets`), which together are its units.
A W in parts runs from the last unit to the first. So the gradients of a bucket are complete once every W of the stage
has reached its first unit. Only the bucket with the rows of a tied matrix needs the sum over tie.

If replicas divide the optimizer state, each steps a shard of every bucket. The next step begins with shards, so it
gathers the parameters of every bucket over dp, once, between START_GATHER and WAIT_GATHER. No F may read a bucket
before that. All other actions on a stage's parameters, STEP included, follow an F of all of its units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.core.lifetimes import ViolationError
from penstock.core.program import Reduction
from penstock.core.schedule import Action, Group, Part

_Piece = tuple[Group, int, Part | None]
"""A reduction of one stage's gradients, or of a bucket of them; those of tie and norm are filed under the first of the
rank's stages in it.
"""

Buckets = Mapping[int, tuple[Part, ...]]
"""The buckets of stages by number, from the last units to the first; a stage that is missing has one."""


class Reducing:
    """Tracks the reductions of ``rank``, whose stages have ``num_cells`` weight gradients each, and its gathers, which
    exist if ``gathers``. ``buckets`` of stages are summed and gathered one by one.
    """

    def __init__(
        self,
        rank: int,
        reductions: Sequence[Reduction],
        stage_ranks: Sequence[int],
        num_cells: int,
        *,
        gathers: bool = False,
        buckets: Buckets | None = None,
    ) -> None:
        self._stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        self._num_cells = num_cells
        self._buckets = buckets or {}
        self._num_gradients: Counter[int] = Counter()
        self._reached: dict[int, dict[tuple[int, int], int]] = {}
        ties = [reduction.tied_of(stage_ranks, rank) for reduction in reductions if reduction.group is Group.TIE]
        self._tied = [stage for stages in ties for stage in stages]
        groups = [reduction.group for reduction in reductions if rank in reduction.ranks]
        self._pieces = [piece for group in groups for piece in self._pieces_of(group)]
        self._started: list[_Piece] = []
        self._over: list[_Piece] = []
        self._is_stepped = False
        of_gathers = self._pieces_of(Group.DP) if gathers else []
        self._gathers = frozenset((stage, part) for _, stage, part in of_gathers)
        self._ungathered, self._gathering = set(self._gathers), set[tuple[int, Part | None]]()

    @property
    def is_stepped(self) -> bool:
        """Whether STEP has run."""
        return self._is_stepped

    def _pieces_of(self, group: Group) -> list[_Piece]:
        if group.is_of_peers:
            return [(group, stage, part) for stage in self._stages for part in self._buckets.get(stage, (None,))]
        if group is Group.TIE:
            return [(group, stage, None) for stage in self._tied[:1]]
        return [(group, stage, None) for stage in self._stages[:1]]

    def add(self, stage: int, cell: tuple[int, int], first: int = 0) -> None:
        """Count a W of ``stage`` for a cell (micro-batch, slice) that has reached unit ``first``."""
        reached = self._reached.setdefault(stage, {})
        if first:
            reached[cell] = first
        else:
            reached.pop(cell, None)
            self._num_gradients[stage] += 1

    def has_started(self, group: Group) -> bool:
        """Whether the rank has started its reduction over ``group``."""
        return any(started is group for started, _, _ in self._started)

    def start(self, action: Action) -> None:
        """Run START_REDUCE; raises `ViolationError` if it is no reduction of the rank, was started before, or begins
        before its gradients are complete or before the end of a reduction whose result it sums.
        """
        piece = self._piece(action)
        if piece in self._started:
            raise ViolationError("starts a reduction that was started before")
        group, stage, part = piece
        for needed_stage in {Group.NORM: self._stages, Group.TIE: self._tied}.get(group, [stage]):
            self._require_gradients(needed_stage, part)
        for before in self._before(piece):
            if before not in self._over:
                raise ViolationError(f"runs before {_waits_for(before)}")
        self._started.append(piece)

    def require_started(self, action: Action) -> Group:
        """The group of a WAIT_REDUCE; raises `ViolationError` unless the rank has started this reduction."""
        piece = self._piece(action)
        if piece not in self._started:
            raise ViolationError("waits for a reduction that was not started")
        return piece[0]

    def finish(self, action: Action) -> None:
        """Run WAIT_REDUCE; raises `ViolationError` if the reduction was waited for before."""
        piece = self._piece(action)
        if piece in self._over:
            raise ViolationError("waits for a reduction that is over")
        self._over.append(piece)

    def step(self) -> None:
        """Run STEP; raises `ViolationError` unless all gradients are complete and all reductions over."""
        if self._is_stepped:
            raise ViolationError("runs twice")
        self._is_stepped = True
        for stage in self._stages:
            self._require_gradients(stage)
        for piece in self._pieces:
            if piece not in self._over:
                raise ViolationError(f"runs before {_waits_for(piece)}")

    def start_gather(self, action: Action) -> None:
        """Run START_GATHER; raises `ViolationError` if it is no gather of the rank, or was started before."""
        gathered = self._gather_of(action)
        if gathered in self._gathering or gathered not in self._ungathered:
            raise ViolationError("starts a gather that was started before")
        self._gathering.add(gathered)

    def finish_gather(self, action: Action) -> None:
        """Run WAIT_GATHER; raises `ViolationError` unless its gather is under way."""
        gathered = self._gather_of(action)
        if gathered not in self._gathering:
            raise ViolationError("waits for a gather that is not under way")
        self._gathering.remove(gathered)
        self._ungathered.remove(gathered)

    def require_gathered(self, action: Action) -> None:
        """Raise `ViolationError` unless all parameters that an F uses are gathered: those of its units and of all units
        before them, which may share a matrix.
        """
        for stage, part in self._ungathered:
            if stage == action.stage and (part is None or action.part is None or part.first < action.part.stop):
                raise ViolationError(f"runs before {stage}WAIT_GATHER({Group.DP}){part or ''}")

    def _gather_of(self, action: Action) -> tuple[int, Part | None]:
        gathered = (action.stage, action.part)
        if action.group is not Group.DP or gathered not in self._gathers:
            raise ViolationError("is no gather of its rank")
        return gathered

    def _piece(self, action: Action) -> _Piece:
        for piece in self._pieces:
            if piece == (action.group, action.stage, action.part):
                return piece
        raise ViolationError("is no reduction of its rank")

    def _before(self, piece: _Piece) -> list[_Piece]:
        """The reductions whose results this one sums: all others for the norm, else those of the same stage before it
        in the order of the Program's reductions.
        """
        group, stage, part = piece
        before = self._pieces[: self._pieces.index(piece)]
        if group is Group.NORM:
            return before
        ties = [other for other in before if other[0] is Group.TIE] if self._is_tied(stage, part) else []
        return ties + [other for other in before if other[0] is not Group.TIE and other[1:] == (stage, part)]

    def _is_tied(self, stage: int, part: Part | None) -> bool:
        """Whether the bucket has rows of a tied matrix: the embedding is the first unit of stage 0, the head is last on
        any other stage.
        """
        if stage not in self._tied or part is None:
            return stage in self._tied
        return part == self._buckets[stage][-1 if stage == 0 else 0]

    def _require_gradients(self, stage: int, part: Part | None = None) -> None:
        """Require all weight gradients of a stage, or of its units from ``part`` on."""
        first = part.first if part else 0
        num_complete = self._num_gradients[stage]
        num_complete += sum(reached <= first for reached in self._reached.get(stage, {}).values())
        if num_complete != self._num_cells:
            units = f", units {part}" if part else ""
            raise ViolationError(f"finds {num_complete} of {self._num_cells} weight gradients of stage {stage}{units}")


def _waits_for(piece: _Piece) -> str:
    group, stage, part = piece
    return f"{stage}WAIT_REDUCE({group}){part or ''}"
