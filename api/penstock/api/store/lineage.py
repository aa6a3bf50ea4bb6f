"""Data for a retry or reproduction of a job: taken names, its plan, and the versions of its packages."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from penstock.api.store.documents import unpack
from penstock.api.store.jobs import StoredJob
from penstock.api.store.plans import plan as stored_plan
from penstock.api.store.schema import events, jobs, profiles
from penstock.core.plan import Plan
from penstock.core.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Newest plan, and recorded versions of packages."""

    plan: Plan | None
    versions: tuple[tuple[str, str], ...]


def names(connection: Connection, namespace: str, stem: str) -> frozenset[str]:
    """Return names with that prefix in the namespace, of existing and deleted jobs."""
    chosen = select(jobs.c.name).where(jobs.c.namespace == namespace, jobs.c.name.startswith(stem, autoescape=True))
    return frozenset(connection.execute(chosen).scalars())


def origin(connection: Connection, job: StoredJob) -> Origin:
    """Return the origin of the job's newest attempt."""
    plan = None if job.plan_digest is None else stored_plan(connection, job.plan_digest)
    launched = select(events.c.body).where(events.c.uid == job.uid, events.c.kind == "launched")
    newest = connection.execute(launched.order_by(events.c.number.desc()).limit(1)).scalar_one_or_none() or {}
    versions = {"penstock": newest.get("penstock"), "torch": _torch_version(connection, plan)}
    return Origin(plan=plan, versions=tuple((name, version) for name, version in versions.items() if version))


def _torch_version(connection: Connection, plan: Plan | None) -> str | None:
    """Return the version in the profile that the plan is based on."""
    if plan is None:
        return None
    body = connection.execute(
        select(profiles.c.body).where(profiles.c.digest == plan.profile_digest)
    ).scalar_one_or_none()
    return None if body is None else Profile.from_manifest(unpack(body)).key.torch_version
