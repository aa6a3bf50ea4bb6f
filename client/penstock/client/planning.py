"""Calls about plans and profiles, with their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from penstock.client.calls import Call, given, items_of, of_change
from penstock.client.types import KnownFields
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.plan import Cost, Plan, RunTime
from penstock.core.profile import Profile
from penstock.core.speed import Speed

ENDED = frozenset({"Succeeded", "Failed", "Canceled"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Search(KnownFields):
    """Progress of planning: outlines opened (``divisions``), candidates simulated, and the best plan that fits.

    ``change`` names the changed field or hardware while a variation is searched.
    """

    divisions: int = 0
    candidates: int = 0
    best: str = ""
    best_step_seconds: float | None = None
    best_speed: Speed | None = None
    change: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake(KnownFields):
    """Reason why there is no plan."""

    what: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest(KnownFields):
    """Plan request; lists leave out plan, run time and cost. Times are in ISO 8601."""

    id: str
    namespace: str
    name: str
    state: str
    created_at: str = ""
    finished_at: str | None = None
    progress: Search = field(default_factory=Search)
    error: Mistake | None = None
    plan_digest: str | None = None
    plan: Plan | None = None
    run_time: RunTime | None = None
    cost: Cost | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEntry(KnownFields):
    """Profile in lists."""

    digest: str
    key: str
    host: str
    device: str
    precision: str
    num_ranks: int
    method: str
    measured_at: str
    age_seconds: float
    fresh: bool


def plan(
    job: PipelineJob,
    *,
    cluster: ClusterSpec | None = None,
    profile: str | None = None,
    what_if: bool = False,
    frontier: bool = False,
) -> Call[PlanRequest]:
    """Request a plan without running it, for described hardware or a stored profile; else for the service's machine.

    With ``what_if`` changed jobs and hardware are planned as well: the plan's explanation has the gain of each. With
    ``frontier`` it also has the plans, on all or fewer devices, for which no other one is both as fast and as cheap.
    """
    body = given(
        job=job.to_manifest(),
        cluster=None if cluster is None else cluster.to_manifest(),
        profile=profile,
        whatIf=what_if or None,
        frontier=frontier or None,
    )
    return Call(method="POST", path="/v1/plans", read=PlanRequest.from_manifest, json=body, headers=of_change())


def planned(request: str) -> Call[PlanRequest]:
    """Return a plan request."""
    return Call(method="GET", path=_path(request), read=PlanRequest.from_manifest)


def plans(**query: Any) -> Call[tuple[PlanRequest, ...]]:
    """Return the newest plan requests (namespace, limit), newest first."""
    return Call(method="GET", path="/v1/plans", read=items_of(PlanRequest), query=given(**query))


def cancel_plan(request: str) -> Call[PlanRequest]:
    """Cancel a plan request, or delete one that has ended."""
    return Call(method="DELETE", path=_path(request), read=PlanRequest.from_manifest)


def profiles() -> Call[tuple[ProfileEntry, ...]]:
    """Return all profiles, newest first."""
    return Call(method="GET", path="/v1/profiles", read=items_of(ProfileEntry))


def profile(digest: str) -> Call[Profile]:
    """Return the profile with this digest."""
    path = f"/v1/profiles/{quote(digest, safe='')}"
    return Call(method="GET", path=path, read=lambda value: Profile.from_manifest(value["profile"]))


def _path(request: str) -> str:
    return f"/v1/plans/{quote(request, safe='')}"
