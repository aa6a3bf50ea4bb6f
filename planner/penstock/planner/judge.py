"""What the search asks of a judge of candidates, what that answers, and who follows the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.core.bubble import Lost
from penstock.core.explanation import StepParts
from penstock.planner.candidate import Candidate
from penstock.planner.candidates import Proposer
from penstock.planner.problem import Mesh
from penstock.planner.room import Shortage


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What the simulator said of a candidate: the step, where the busiest rank's time goes, and bytes per rank."""

    candidate: Candidate
    step_ns: int
    compute_ns: int
    bubble_ns: int
    communication_ns: int
    reduction_ns: int
    optimizer_ns: int
    peak_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    num_actions: int
    """Compute actions that were simulated."""
    is_exact: bool = True
    """Whether a long step was simulated in full, or proved to repeat what was simulated."""
    bubble: Lost | None = None
    waiting: Lost | None = None
    """Over all ranks, as shares of the step."""
    parts: StepParts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBound:
    """No step of an order is shorter than ``step_ns``; making it took as long as simulating ``num_actions``."""

    step_ns: int
    num_actions: int


class Judge(Protocol):
    """What the search asks: bounds, and the simulation itself."""

    def bound_ns(self, candidate: Candidate) -> int:
        """The candidate's step is no shorter: a proof."""
        ...

    def order_bound(self, candidate: Candidate) -> OrderBound | None:
        """A bound of the order that the candidate would be simulated with, where there is one without that."""
        ...

    @property
    def proposer(self) -> Proposer:
        """Makes outlines into candidates."""
        ...

    def best_variant(self, candidate: Candidate) -> Candidate:
        """The same with the best of its schedule's orders."""
        ...

    def evaluate(self, candidate: Candidate, *, in_full: bool = False) -> Evaluation:
        """Simulate it, where it repeats itself perhaps not ``in_full``."""
        ...


class Reporter:
    """Told what the search does; does nothing. Subclasses show progress."""

    def opened(self, mesh: Mesh, num_candidates: int) -> None:
        """An outline of the mesh was opened into candidates."""

    def no_room(self, shortage: Shortage) -> None:
        """Slices of an outline have no stages that fit in memory."""

    def judged(self, evaluation: Evaluation, fits: bool) -> None:
        """A candidate was simulated."""
