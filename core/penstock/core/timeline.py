"""Events of all ranks over time: the result of simulating, running and rehearsing a Program."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.bubble import Lost, bubble
from penstock.core.errors import UserError
from penstock.core.manifest import Manifest


class Activity(enum.StrEnum):
    """Use of a span of time."""

    COMPUTE = "compute"
    WAIT = "wait"
    TRANSFER = "transfer"
    REDUCE = "reduce"
    STEP = "step"


class Source(enum.StrEnum):
    """The interpreter that made a timeline."""

    SIMULATED = "simulated"
    MEASURED = "measured"
    REHEARSED = "rehearsed"


@dataclass(frozen=True, slots=True)
class Event(Manifest):
    """One span on one rank; times in nanoseconds from the step's start. ``action`` is the action's text.

    ``collective_ns`` of a compute action is the time in which its rank only waited for the other shards
    (`penstock.core.sharding`), without collectives next to compute.
    """

    rank: int
    activity: Activity
    action: str
    start_ns: int
    stop_ns: int
    collective_ns: int = 0

    def __post_init__(self) -> None:
        if self.stop_ns < self.start_ns:
            raise UserError(what=f"{self.action} stops before it starts", where="timeline")
        if not 0 <= self.collective_ns <= self.duration_ns:
            raise UserError(what=f"{self.action} waits for shards for longer than it takes", where="timeline")

    @property
    def duration_ns(self) -> int:
        """Duration of the event."""
        return self.stop_ns - self.start_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(Manifest):
    """One step: events of all ranks, the step's length, and the peak bytes of every rank if known."""

    source: Source
    num_ranks: int
    step_ns: int
    events: tuple[Event, ...]
    peak_bytes: tuple[int, ...] = ()
    step: int | None = None

    def busy_ns(self, rank: int) -> int:
        """Nanoseconds ``rank`` spent computing."""
        return sum(e.duration_ns for e in self.events if e.rank == rank and e.activity is Activity.COMPUTE)

    def waited_ns(self, rank: int) -> int:
        """Nanoseconds of its compute in which ``rank`` waited for its shards."""
        return sum(e.collective_ns for e in self.events if e.rank == rank)

    @property
    def bubble(self) -> Lost:
        """Share of the step in which ranks did not compute, as mean and worst (`penstock.core.bubble`)."""
        return bubble([self.busy_ns(rank) for rank in range(self.num_ranks)], self.step_ns)

    @property
    def collectives(self) -> Lost | None:
        """Share of the step in which ranks wait for their shards inside actions; None if they do not."""
        waited = [0] * self.num_ranks
        for event in self.events:
            waited[event.rank] += event.collective_ns
        return Lost.of(waited, self.step_ns) if any(waited) else None
