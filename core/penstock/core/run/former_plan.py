"""The plan that a run returns to if the one that replaced it fails at once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class FormerPlan(Manifest):
    """A replaced plan with its profile, and the digest of the plan that replaced it.

    ``has_returned``: the run has returned to ``plan``, since the other one failed.
    """

    plan: Plan
    profile: Profile
    successor_digest: str
    has_returned: bool = False
