"""What the process that plans is asked, and what it tells: a line now and then about how far it is, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline

SMALLER = "plan a smaller search: pin dp, pp or slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Manifest):
    """What to plan, for hardware that was measured or described; a ``plan`` that is there is only simulated."""

    spec: JobSpec
    profile: Profile | None = None
    cluster: ClusterSpec | None = None
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Manifest):
    """The plan and its step as simulated, unless it is too long to be drawn; or why there is none."""

    plan: Plan | None = None
    timeline: Timeline | None = None
    what: str = ""
    where: str = ""
    remedy: str = ""

    @property
    def error(self) -> str:
        """Why there is none, as one text."""
        return str(UserError(what=self.what, where=self.where, remedy=self.remedy)) if self.what else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Manifest):
    """How far a search is: divisions of the devices it opened, candidates it simulated, the best that fits."""

    divisions: int = 0
    candidates: int = 0
    best: str = ""
    best_step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Manifest):
    """What the process tells."""

    progress: Progress | None = None
    answer: Answer | None = None
