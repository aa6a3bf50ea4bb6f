"""Routes for jobs on a cluster: the same answers as for local jobs, after a call to the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import Request, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Identity
from penstock.api.cluster import submitting
from penstock.api.cluster.kube import ObjectKey
from penstock.api.cluster.membership import Membership
from penstock.api.http.replies import reply, response_of, write_once
from penstock.api.schemas.jobs import job_view
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.idempotency import Answer, KeyedRequest, remembered
from penstock.api.store.jobs import StoredJob
from penstock.core.job import PipelineJob
from penstock.kube.transport import Object


def create(
    service: Service,
    member: Membership,
    identity: Identity,
    keyed: KeyedRequest | None,
    job: PipelineJob,
    retried: Mapping[str, object] | None = None,
) -> Response:
    """Create the job; ``retried`` is the content of the event of a retry."""

    def make() -> Object:
        submitting.require_allowed(member.kube, job, member.instance.policy)
        return submitting.submitted(member.kube, job, identity.name, keyed)

    def keep(connection: Connection, item: Object, now: float) -> Answer:
        made = submitting.kept(connection, item, member.mirror.cluster, identity.name, now)
        if retried:
            jobs.add_event(connection, made.uid, "retry", retried, now)
            made = jobs.get(connection, made.uid)
        return _answer(made, 201, {"Location": f"/v1/jobs/{made.namespace}/{made.name}"})

    return _changed(service, keyed, make, keep)


def propose(request: Request, service: Service, member: Membership, identity: Identity, job: PipelineJob) -> Response:
    """Return the job as the cluster would accept it."""
    submitting.require_allowed(member.kube, job, member.instance.policy)
    item = submitting.submitted(member.kube, job, identity.name, None, dry_run=True)

    def change(connection: Connection, now: float) -> Answer:
        return reply(job_view(submitting.proposed(connection, item, member.mirror.cluster, identity.name, now)))

    request.state.changed_nothing = True
    return write_once(service, "jobs", None, change)


def retry(
    service: Service,
    member: Membership,
    identity: Identity,
    keyed: KeyedRequest | None,
    job: PipelineJob,
    old: StoredJob,
) -> Response:
    """Create the job that continues where the old one ended."""
    new_job = submitting.on_the_same_storage(job, old.next_job)
    retried = {"of": old.uid, "resumeFrom": job.spec.checkpoint.resume_from}
    return create(service, member, identity, keyed, new_job, retried)


def suspend(
    service: Service,
    member: Membership,
    identity: Identity,
    keyed: KeyedRequest | None,
    place: tuple[str, str],
    version: int | None,
    value: bool,
) -> Response:
    """Set or clear ``suspend``; no change of a job that has ended or has the same value."""

    def change(job: ObjectKey, guard: str | None, stored: StoredJob) -> Object:
        is_same = stored.phase.terminal or stored.suspend == value
        return {} if is_same else member.kube.set_suspend(job, value, guard)

    def keep(connection: Connection, item: Object, now: float) -> Answer:
        return _answer(submitting.kept(connection, item, member.mirror.cluster, identity.name, now), 200)

    return _changed(
        service, keyed, lambda: submitting.changed(member.kube, member.mirror.store, *place, version, change), keep
    )


def delete(
    service: Service,
    member: Membership,
    identity: Identity,
    keyed: KeyedRequest | None,
    place: tuple[str, str],
    version: int | None,
) -> Response:
    """Delete the job from the cluster; the mirror reports the end of the deletion."""

    def change(job: ObjectKey, guard: str | None, stored: StoredJob) -> Object:
        member.kube.delete(job, guard)
        return {}

    def keep(connection: Connection, item: Object, now: float) -> Answer:
        return _answer(jobs.request_delete(connection, item["metadata"]["uid"], identity.name, now), 202)

    return _changed(
        service, keyed, lambda: submitting.changed(member.kube, member.mirror.store, *place, version, change), keep
    )


def _changed(
    service: Service,
    keyed: KeyedRequest | None,
    change: Callable[[], Object],
    keep: Callable[[Connection, Object, float], Answer],
) -> Response:
    """Change a job on the cluster, unless the same request did that before, and store its answer by ``keep``."""
    known = service.read(lambda connection: remembered(connection, keyed))
    if known is not None:
        return response_of(known)
    item = change()
    return write_once(service, item["metadata"]["uid"], keyed, lambda connection, now: keep(connection, item, now))


def _answer(stored: StoredJob, status: int, headers: Mapping[str, str] | None = None) -> Answer:
    return reply(job_view(stored), status, {**(headers or {}), "ETag": f'"{stored.version}"'})
