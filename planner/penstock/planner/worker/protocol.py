"""Requests to the planning process, and its output: lines with progress, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.replanning import Replanning
from penstock.core.speed import Speed
from penstock.core.timeline import Timeline

SMALLER = "plan a smaller search: pin dp, pp or slices"
PLAIN = "plan without what-if, which takes a search for each change, or pin dp, pp or slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningRequest(Manifest):
    """Request for plans on measured or described hardware. If ``plan`` is given, it is only simulated; with
    ``timelines``, measured steps of it, other plans are searched by the profile that these correct.

    With ``what_if`` changed jobs and changed hardware are planned as well (`penstock.planner.variations`).
    ``num_plans`` is the number of best plans to return. With ``frontier`` the plan's explanation has the frontier of
    time and money (`penstock.planner.choice`).
    """

    spec: JobSpec
    profile: Profile | None = None
    cluster: ClusterSpec | None = None
    plan: Plan | None = None
    timelines: tuple[Timeline, ...] = ()
    what_if: bool = False
    num_plans: int = 1
    frontier: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Manifest):
    """The plan and its simulated step, unless that is too long to be drawn; or the error.

    ``others`` are the next best plans, if more than one was requested; ``replanning`` has the plans for a running one.
    ``is_transient``: the error is not of the
    request but of the planning process, which took too long or crashed, so an equal request may succeed later.
    """

    plan: Plan | None = None
    timeline: Timeline | None = None
    others: tuple[Plan, ...] = ()
    replanning: Replanning | None = None
    what: str = ""
    where: str = ""
    remedy: str = ""
    is_transient: bool = False

    @property
    def error(self) -> str:
        """The error as one string, empty if there is a plan."""
        return str(UserError(what=self.what, where=self.where, remedy=self.remedy)) if self.what else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Manifest):
    """Progress of a search: opened divisions of the devices, simulated candidates, and the best that fits.

    ``change`` names the difference in the search of a variation. ``best_speed`` is the speed of the best step.
    """

    divisions: int = 0
    candidates: int = 0
    best: str = ""
    best_step_seconds: float | None = None
    best_speed: Speed | None = None
    change: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Manifest):
    """One line of the process's output."""

    progress: Progress | None = None
    answer: Answer | None = None
