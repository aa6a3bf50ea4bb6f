"""Plans in the store: compressed documents by digest, and the plans that each job used."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from penstock.api.store import profiles
from penstock.api.store.documents import pack, unpack
from penstock.api.store.engine import upsert
from penstock.api.store.jobs import StoredJob, add_event
from penstock.api.store.schema import events, job_plans, plans
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A plan that a job used, from an attempt on."""

    revision: int
    attempt: int
    created_at: float
    plan: Plan


def keep_plan(
    connection: Connection, uid: str, attempt: int, plan: Plan, now: float, timeline: Timeline | None = None
) -> int:
    """Store the plan as the job's newest revision; return its number. ``timeline`` is that of a simulated step."""
    timeline_body = pack(timeline.to_manifest()) if timeline else None
    row = {"digest": plan.digest, "body": pack(plan.to_manifest()), "timeline": timeline_body, "created_at": now}
    connection.execute(upsert(connection.dialect.name, plans).values(row).on_conflict_do_nothing())
    add_event(connection, uid, "planned", {"digest": plan.digest, "attempt": attempt}, now, plan_digest=plan.digest)
    newest = select(func.max(job_plans.c.revision)).where(job_plans.c.uid == uid)
    revision = 1 + (connection.execute(newest).scalar_one() or 0)
    mine = {"uid": uid, "revision": revision, "attempt": attempt, "digest": plan.digest, "created_at": now}
    connection.execute(insert(job_plans).values(mine))
    return revision


def keep_replanning(connection: Connection, uid: str, attempt: int, message: str, now: float) -> None:
    """Add an event with a decision of planning again, unless the job's newest one of this kind is the same."""
    mine = select(events.c.body).where(events.c.uid == uid, events.c.kind == "replanning")
    newest = connection.execute(mine.order_by(events.c.number.desc()).limit(1)).scalar_one_or_none()
    body = {"attempt": attempt, "message": message}
    if newest != body:
        add_event(connection, uid, "replanning", body, now)


def revisions(connection: Connection, uid: str) -> list[Revision]:
    """Return every plan of the job, oldest first."""
    joined = select(job_plans, plans.c.body).join(plans, plans.c.digest == job_plans.c.digest)
    rows = connection.execute(joined.where(job_plans.c.uid == uid).order_by(job_plans.c.revision))
    return [
        Revision(
            revision=row.revision,
            attempt=row.attempt,
            created_at=row.created_at,
            plan=Plan.from_manifest(unpack(row.body)),
        )
        for row in rows
    ]


def newest_plan(connection: Connection, uid: str) -> Plan | None:
    """Return the current plan of the job."""
    joined = select(plans.c.body).join(job_plans, plans.c.digest == job_plans.c.digest)
    newest = joined.where(job_plans.c.uid == uid).order_by(job_plans.c.revision.desc()).limit(1)
    body = connection.execute(newest).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


def predicted(connection: Connection, digest: str) -> Timeline | None:
    """Return the timeline of the plan's simulated step, if it was stored."""
    body = connection.execute(select(plans.c.timeline).where(plans.c.digest == digest)).scalar_one_or_none()
    return None if body is None else Timeline.from_manifest(unpack(body))


def plan(connection: Connection, digest: str) -> Plan | None:
    """Return the plan with this digest."""
    body = connection.execute(select(plans.c.body).where(plans.c.digest == digest)).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Newest plan, and recorded versions of packages."""

    plan: Plan | None
    versions: tuple[tuple[str, str], ...]


def origin(connection: Connection, job: StoredJob) -> Origin:
    """Return the origin of the job's newest attempt."""
    current = None if job.plan_digest is None else plan(connection, job.plan_digest)
    launched = select(events.c.body).where(events.c.uid == job.uid, events.c.kind == "launched")
    newest = connection.execute(launched.order_by(events.c.number.desc()).limit(1)).scalar_one_or_none() or {}
    profile = profiles.find(connection, current.profile_digest) if current else None
    versions = {"penstock": newest.get("penstock"), "torch": profile.key.torch_version if profile else None}
    return Origin(plan=current, versions=tuple((name, version) for name, version in versions.items() if version))
