"""Inputs of schedule generators: integers only, so that every rank generates the same schedule."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import UserError

StageTable = tuple[tuple[int, ...], ...]
"""Integers [stage][slice]."""

TABLES = (
    "forward_ns",
    "input_ns",
    "weight_ns",
    "send_forward_ns",
    "send_backward_ns",
    "forward_stash",
    "input_stash",
    "weight_stash",
)
"""The names of the [stage][slice] tables of `ScheduleInputs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleInputs:
    """The shape of a pipeline and, for schedules made by simulation, the costs of its actions.

    There is one stage per rank, or ``stages_per_rank``, placed by the schedule. ``forward_ns``, ``input_ns`` and
    ``weight_ns`` are the nanoseconds of F, I and W; ``send_forward_ns`` and ``send_backward_ns`` those of the message a
    stage sends to the next and to the previous one. ``forward_stash``, ``input_stash`` and ``weight_stash`` are the
    changes in a rank's stash by F, I and W, in any unit (bytes, or slices: one, none and minus one if the tables are
    empty), and ``caps`` its limit per rank in that unit; the default is 1F1B's memory, or that of the generator's order
    without caps (H1's) where it needs more. ``receive_ahead`` and ``late_receives`` are the plan's. ``variant`` selects
    one of the orders that a generator would choose from. An empty cost table means one nanosecond per pass and none per
    message.
    """

    num_ranks: int
    num_microbatches: int
    num_slices: int
    stages_per_rank: int = 1
    forward_ns: StageTable = ()
    input_ns: StageTable = ()
    weight_ns: StageTable = ()
    send_forward_ns: StageTable = ()
    send_backward_ns: StageTable = ()
    forward_stash: StageTable = ()
    input_stash: StageTable = ()
    weight_stash: StageTable = ()
    caps: tuple[int, ...] = ()
    receive_ahead: int = 2
    late_receives: bool = False
    variant: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_slices", "stages_per_rank", "receive_ahead"):
            if getattr(self, name) < 1:
                raise UserError(what=f"{getattr(self, name)} is not positive", where=name, remedy="write at least 1")
        for name in TABLES:
            self._check_table(name, getattr(self, name))
        if self.caps and len(self.caps) != self.num_ranks:
            raise UserError(what=f"{len(self.caps)} values for {self.num_ranks} ranks", where="caps")

    def _check_table(self, name: str, table: StageTable) -> None:
        if table and (len(table) != self.num_stages or set(map(len, table)) != {self.num_slices}):
            raise UserError(what=f"is not a table of {self.num_stages} stages by {self.num_slices} slices", where=name)
        if name.endswith("_ns") and min(map(min, table), default=0) < 0:
            raise UserError(what="holds a negative time", where=name, remedy="times are nanoseconds from 0")

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.stages_per_rank

    @property
    def num_units(self) -> int:
        """Number of (micro-batch, slice) units: the forwards, and the backwards, of one stage."""
        return self.num_microbatches * self.num_slices
