"""Plans in the store: documents by digest, compressed, and those that each job used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from penstock.api.store.documents import pack, unpack
from penstock.api.store.engine import upsert
from penstock.api.store.jobs import add_event
from penstock.api.store.schema import job_plans, plans
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A plan that a job went by, from an attempt on."""

    revision: int
    attempt: int
    created_at: float
    plan: Plan


def keep_plan(
    connection: Connection, uid: str, attempt: int, plan: Plan, now: float, timeline: Timeline | None = None
) -> int:
    """Make it the job's newest revision; its number. ``timeline`` is that of its step as simulated."""
    drawn = pack(timeline.to_manifest()) if timeline else None
    row = {"digest": plan.digest, "body": pack(plan.to_manifest()), "timeline": drawn, "created_at": now}
    connection.execute(upsert(connection.dialect.name, plans).values(row).on_conflict_do_nothing())
    add_event(connection, uid, "planned", {"digest": plan.digest, "attempt": attempt}, now, plan_digest=plan.digest)
    newest = select(func.max(job_plans.c.revision)).where(job_plans.c.uid == uid)
    revision = 1 + (connection.execute(newest).scalar_one() or 0)
    mine = {"uid": uid, "revision": revision, "attempt": attempt, "digest": plan.digest, "created_at": now}
    connection.execute(insert(job_plans).values(mine))
    return revision


def revisions(connection: Connection, uid: str) -> list[Revision]:
    """Every plan of the job, oldest first."""
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
    """The plan that the job goes by now."""
    joined = select(plans.c.body).join(job_plans, plans.c.digest == job_plans.c.digest)
    newest = joined.where(job_plans.c.uid == uid).order_by(job_plans.c.revision.desc()).limit(1)
    body = connection.execute(newest).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


def predicted(connection: Connection, digest: str) -> Timeline | None:
    """The plan's step as simulated, if it was kept."""
    body = connection.execute(select(plans.c.timeline).where(plans.c.digest == digest)).scalar_one_or_none()
    return None if body is None else Timeline.from_manifest(unpack(body))


def plan(connection: Connection, digest: str) -> Plan | None:
    """The plan with this digest."""
    body = connection.execute(select(plans.c.body).where(plans.c.digest == digest)).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


_UNUSED = plans.c.digest.not_in(select(job_plans.c.digest))


def unused_since(connection: Connection, before: float, most: int) -> list[str]:
    """The digests of plans that were kept before that time and that no job goes or went by."""
    chosen = select(plans.c.digest).where(plans.c.created_at < before, _UNUSED)
    return list(connection.execute(chosen.order_by(plans.c.digest).limit(most)).scalars())


def forget(connection: Connection, digests: Sequence[str]) -> None:
    """Remove these plans, unless a job goes by one by now."""
    connection.execute(delete(plans).where(plans.c.digest.in_(digests), _UNUSED))
