"""What the process that plans is asked, and what it tells: a line now and then about how far it is, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.speed import Speed
from penstock.core.timeline import Timeline

SMALLER = "plan a smaller search: pin dp, pp or slices"
PLAIN = "plan without what-if, which takes a search for each change, or pin dp, pp or slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Manifest):
    """What to plan, for hardware that was measured or described; a ``plan`` that is there is only simulated.

    With ``what_if`` changed jobs and changed hardware are planned as well (`penstock.planner.variations`).
    ``num_plans`` asks for that many of the best plans.
    """

    spec: JobSpec
    profile: Profile | None = None
    cluster: ClusterSpec | None = None
    plan: Plan | None = None
    what_if: bool = False
    num_plans: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Manifest):
    """The plan and its step as simulated, unless it is too long to be drawn; or why there is none.

    ``others`` are the next best, if more than one was asked for.
    """

    plan: Plan | None = None
    timeline: Timeline | None = None
    others: tuple[Plan, ...] = ()
    what: str = ""
    where: str = ""
    remedy: str = ""

    @property
    def error(self) -> str:
        """Why there is none, as one text."""
        return str(UserError(what=self.what, where=self.where, remedy=self.remedy)) if self.what else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Manifest):
    """How far a search is: divisions of the devices it opened, candidates it simulated, the best that fits.

    ``change`` names what is different in the search of a variation. ``best_speed`` is that of the best's step.
    """

    divisions: int = 0
    candidates: int = 0
    best: str = ""
    best_step_seconds: float | None = None
    best_speed: Speed | None = None
    change: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Manifest):
    """What the process tells."""

    progress: Progress | None = None
    answer: Answer | None = None
