"""Interfaces of the search: the judge that bounds and simulates candidates, its evaluations, what bounds ruled out, the
error if nothing fits, progress reports, and the reason of its end.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.bubble import Lost
from penstock.core.explanation import StepParts
from penstock.planner.candidate import Candidate
from penstock.planner.candidates import Proposer
from penstock.planner.memory_fit import Shortage
from penstock.planner.problem import Mesh


class Ending(enum.StrEnum):
    """Why a search ended."""

    EVERYTHING = "every outline that could fit was opened"
    ESTIMATES = "the others take longer by their estimates"
    BUDGET = "the budget was spent before the others were opened"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of simulating a candidate: the step, the parts of the busiest rank's time, and bytes per rank."""

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
    """Number of simulated compute actions."""
    is_exact: bool = True
    """False if a long step was extrapolated without a proof that it repeats the simulated part."""
    bubble: Lost | None = None
    waiting: Lost | None = None
    """``bubble`` and ``waiting`` are over all ranks, as fractions of the step."""
    parts: StepParts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBound:
    """Lower bound of the step of an order; making the order cost as much as simulating ``num_actions``."""

    step_ns: int
    num_actions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """A candidate that was not simulated: another step was already no longer than this lower bound of its step.

    The bound holds for the order that was made for the candidate if ``of_order``, else for all orders.
    """

    candidate: Candidate
    bound_ns: int
    of_order: bool = False


class NothingFitsError(Exception):
    """No candidate fits: ``label`` comes closest and needs at least ``least_bytes`` on a rank. The label is empty and
    the bytes are 0 if no mesh allows the pinned stages or parts of the head. ``closest`` are a few candidates of
    different kinds that need least, each with its bytes.
    """

    def __init__(self, least_bytes: int, label: str, closest: Sequence[tuple[int, Candidate]] = ()) -> None:
        super().__init__(f"{label} needs {least_bytes} bytes")
        self.least_bytes = least_bytes
        self.label = label
        self.closest = closest


class Judge(Protocol):
    """Source of bounds and simulations for the search."""

    def bound_ns(self, candidate: Candidate) -> int:
        """A proved lower bound of the candidate's step."""
        ...

    def order_bound(self, candidate: Candidate) -> OrderBound | None:
        """A lower bound for the order that the candidate would be simulated with; None if only simulating would give
        it.
        """
        ...

    @property
    def proposer(self) -> Proposer:
        """Turns outlines into candidates."""
        ...

    def best_variant(self, candidate: Candidate) -> Candidate:
        """The candidate with the best order of its schedule."""
        ...

    def exposed_shares(self, candidate: Candidate) -> tuple[float, ...]:
        """Per rank, the share of its recomputation that delays other ranks or the end of the step; empty if unknown."""
        ...

    def with_windows(self, candidate: Candidate) -> Candidate | None:
        """The candidate with its recomputations in waits of their ranks; None if its step does not get shorter."""
        ...

    def with_moved_actions(self, candidate: Candidate) -> Candidate | None:
        """The candidate with single actions moved within their ranks; None if its step does not get shorter."""
        ...

    def evaluate(self, candidate: Candidate, *, in_full: bool = False) -> Evaluation:
        """Simulate the candidate. A step that repeats itself may be extrapolated unless ``in_full``."""
        ...


class Reporter:
    """Progress of a search. This one ignores it; subclasses show it."""

    def opened(self, mesh: Mesh, num_candidates: int) -> None:
        """An outline of the mesh was opened into candidates."""

    def no_stages_fit(self, shortage: Shortage) -> None:
        """The candidate's slices have no stages that fit in memory."""

    def judged(self, evaluation: Evaluation, fits: bool) -> None:
        """A candidate was simulated."""
