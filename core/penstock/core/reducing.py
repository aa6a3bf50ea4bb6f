"""The part of the proof about one rank's gradients: each is complete, then reduced in order, then used, once.

A stage's gradients are complete after its last W. They are summed over the copies of a tied matrix (tie), then over
shards if each has only an addend (tp, stage by stage), then over replicas (dp, stage by stage), and count in the norm,
after which STEP uses them. START_REDUCE and WAIT_REDUCE bracket the time in which a reduction may read and write its
gradients.

If replicas divide the optimizer state, each steps a shard of every stage's parameters, so after STEP each stage's
parameters are gathered over dp, once, between START_GATHER and WAIT_GATHER.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.core.lifetimes import ViolationError
from penstock.core.program import Reduction
from penstock.core.schedule import Action, Group

_Piece = tuple[Group, int]
"""A reduction of one stage's gradients; those of tie and norm are filed under the first of the rank's stages in it."""


class Reducing:
    """Tracks the reductions of ``rank``, whose stages have ``num_cells`` weight gradients each, and its gathers, which
    exist if ``gathers``.
    """

    def __init__(
        self,
        rank: int,
        reductions: Sequence[Reduction],
        stage_ranks: Sequence[int],
        num_cells: int,
        *,
        gathers: bool = False,
    ) -> None:
        self._stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        self._num_cells, self._gathers = num_cells, gathers
        self._num_gradients: Counter[int] = Counter()
        ties = [reduction.tied_of(stage_ranks, rank) for reduction in reductions if reduction.group is Group.TIE]
        self._tied = [stage for stages in ties for stage in stages]
        groups = [reduction.group for reduction in reductions if rank in reduction.ranks]
        self._pieces = [piece for group in groups for piece in self._pieces_of(group)]
        self._started: list[_Piece] = []
        self._over: list[_Piece] = []
        self._is_stepped = False
        self._ungathered = set(self._stages if gathers else ())
        self._gathering: set[int] = set()

    @property
    def is_stepped(self) -> bool:
        """Whether STEP has run."""
        return self._is_stepped

    def _pieces_of(self, group: Group) -> list[_Piece]:
        if group.is_of_peers:
            return [(group, stage) for stage in self._stages]
        if group is Group.TIE:
            return [(group, stage) for stage in self._tied[:1]]
        return [(group, stage) for stage in self._stages[:1]]

    def add(self, stage: int) -> None:
        """Count a W of ``stage``."""
        self._num_gradients[stage] += 1

    def has_started(self, group: Group) -> bool:
        """Whether the rank has started its reduction over ``group``."""
        return any(started is group for started, _ in self._started)

    def start(self, action: Action) -> None:
        """Run START_REDUCE; raises `ViolationError` unless the reduced gradients are complete."""
        piece = self._piece(action)
        if piece in self._started:
            raise ViolationError("starts a reduction that was started before")
        group, stage = piece
        for needed_stage in {Group.NORM: self._stages, Group.TIE: self._tied}.get(group, [stage]):
            self._require_gradients(needed_stage)
        for before in self._before(piece):
            if before not in self._over:
                raise ViolationError(f"runs before {_waits_for(before)}")
        self._started.append(piece)

    def require_started(self, action: Action) -> Group:
        """The group of a WAIT_REDUCE; raises `ViolationError` unless its reduction was started."""
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
        """Run START_GATHER; raises `ViolationError` before STEP and for parameters that are already gathered."""
        self._require_gathered_stage(action)
        if not self._is_stepped:
            raise ViolationError("gathers parameters before STEP")
        if action.stage in self._gathering or action.stage not in self._ungathered:
            raise ViolationError("starts a gather that was started before")
        self._gathering.add(action.stage)

    def finish_gather(self, action: Action) -> None:
        """Run WAIT_GATHER; raises `ViolationError` unless its gather is under way."""
        self._require_gathered_stage(action)
        if action.stage not in self._gathering:
            raise ViolationError("waits for a gather that is not under way")
        self._gathering.remove(action.stage)
        self._ungathered.remove(action.stage)

    def require_gathered(self) -> None:
        """Raise `ViolationError` unless all parameters are gathered."""
        for stage in sorted(self._ungathered):
            raise ViolationError(f"ends without {stage}WAIT_GATHER({Group.DP})")

    def _require_gathered_stage(self, action: Action) -> None:
        if action.group is not Group.DP or not self._gathers or action.stage not in self._stages:
            raise ViolationError("is no gather of its rank")

    def _piece(self, action: Action) -> _Piece:
        for piece in self._pieces:
            if piece == (action.group, action.stage):
                return piece
        raise ViolationError("is no reduction of its rank")

    def _before(self, piece: _Piece) -> list[_Piece]:
        """The reductions whose results this one sums: all others for the norm, else those of the same stage before it
        in the order of the Program's reductions.
        """
        group, stage = piece
        before = self._pieces[: self._pieces.index(piece)]
        if group is Group.NORM:
            return before
        own_stages = self._tied if stage in self._tied else [stage]
        return [other for other in before if other[1] == stage or (other[0] is Group.TIE and other[1] in own_stages)]

    def _require_gradients(self, stage: int) -> None:
        if self._num_gradients[stage] != self._num_cells:
            raise ViolationError(
                f"finds {self._num_gradients[stage]} of {self._num_cells} weight gradients of stage {stage}"
            )


def _waits_for(piece: _Piece) -> str:
    group, stage = piece
    return f"{stage}WAIT_REDUCE({group})"
