"""Explanation of a plan as data: the parts of the step, its limits, the end of the search, and helpful changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.bubble import Lost
from penstock.core.manifest import Manifest
from penstock.core.speed import Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts(Manifest):
    """Shares of the step, each as the mean over ranks and the rank with the largest; for every rank they add up to 1.

    ``waiting`` is for other ranks, ``communication`` for transfers that are under way (`penstock.core.bubble`).
    """

    compute: Lost
    waiting: Lost
    communication: Lost
    reductions: Lost
    optimizer: Lost

    @property
    def named(self) -> tuple[tuple[str, Lost], ...]:
        """The parts by their printed names."""
        return (
            ("compute", self.compute),
            ("waiting", self.waiting),
            ("communication", self.communication),
            ("reductions", self.reductions),
            ("optimizer", self.optimizer),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchEnd(Manifest):
    """The end of a search: ``ending`` in words, the numbers of simulated candidates and opened outlines, and a lower
    bound of the step.

    ``floor_seconds`` is the model's work alone (`penstock.planner.floor`); None for another objective.
    """

    ending: str
    candidates: int
    outlines: int
    floor_seconds: float | None = None


class Method(enum.StrEnum):
    """How a variation was computed."""

    SAME_PLAN = "same plan simulated"
    NEW_SEARCH = "new search"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation(Manifest):
    """The result of a changed job or changed hardware: a predicted step, or in ``refusal`` the reason why there is
    none.

    ``gain`` is the change of tokens per second per device as a share. ``plan`` is the label of a new search's plan.
    """

    change: str
    method: Method
    step_seconds: float | None = None
    tokens_per_second_per_device: float | None = None
    model_flops_utilization: float | None = None
    gain: float | None = None
    plan: str = ""
    refusal: str = ""

    @property
    def speed(self) -> Speed | None:
        """The predicted speed; None if there is none."""
        if self.tokens_per_second_per_device is None:
            return None
        return Speed(
            tokens_per_second_per_device=self.tokens_per_second_per_device,
            model_flops_utilization=self.model_flops_utilization,
        )

    @property
    def how(self) -> str:
        """The method of computation as text, with the plan that a new search found."""
        return f"{self.method.value}: {self.plan}" if self.plan else self.method.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Manifest):
    """A plan that was run: its predicted step, and the median of ``steps`` measured steps after warm-up.

    ``spread`` is their interquartile range as a share of the median. ``failure`` is the reason why nothing was
    measured. ``predicted_speed`` and ``measured_speed`` are those of the two steps.
    """

    plan: str
    predicted_seconds: float
    measured_seconds: float | None = None
    spread: float = 0.0
    steps: int = 0
    chosen: bool = False
    failure: str = ""
    predicted_speed: Speed | None = None
    measured_speed: Speed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint(Manifest):
    """A plan of the frontier: no other one takes at most as long for all steps and costs at most as much.

    ``devices`` are its devices by kind, ``plan`` is its label. ``run_seconds`` and ``cost`` are those of all steps.
    """

    devices: str
    num_devices: int
    mesh: str
    plan: str
    step_seconds: float
    run_seconds: float
    cost: float
    cost_per_million_tokens: float
    tokens_per_second_per_device: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier(Manifest):
    """The best plans found for other numbers and kinds of devices: ``points`` by rising time and falling cost.

    ``plans`` is the number of plans that were compared, each the best found within the budget of a search.
    """

    points: tuple[FrontierPoint, ...]
    plans: int

    @property
    def meaning(self) -> str:
        """What the points are, as a sentence."""
        return (
            f"{self.plans} plans were compared, each the best found for a set of devices within its search "
            "budget. A plan is left out if another one is both as fast and as cheap."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation(Manifest):
    """Details of a choice beyond the prediction, for people and programs.

    ``limits`` are sentences, the first about time; ``pinned`` are the fields that the job's ``parallelism`` sets.
    """

    parts: StepParts | None = None
    limits: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    search: SearchEnd | None = None
    variations: tuple[Variation, ...] = ()
    trials: tuple[Trial, ...] = ()
    frontier: Frontier | None = None


def most_helpful(variations: tuple[Variation, ...]) -> Variation | None:
    """The change that raises tokens per second per device most; None if none raises it."""
    gains = [
        (variation.gain, variation) for variation in variations if variation.gain is not None and variation.gain > 0
    ]
    return max(gains, key=lambda pair: pair[0])[1] if gains else None
