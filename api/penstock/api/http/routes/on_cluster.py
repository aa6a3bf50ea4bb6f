"""What routes answer where jobs are on a cluster: the same as elsewhere, after the cluster was asked."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Identity
from penstock.api.cluster import submitting
from penstock.api.cluster.kube import Place
from penstock.api.cluster.membership import Membership
from penstock.api.http.replies import reply, response_of, write_once
from penstock.api.schemas.jobs import job_view
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.idempotency import Answer, Asked, remembered
from penstock.api.store.jobs import StoredJob
from penstock.core.job import PipelineJob
from penstock.kube.transport import Object


def create(service: Service, member: Membership, identity: Identity, asked: Asked | None, job: PipelineJob) -> Response:
    """Make the job."""
    if known := _remembered(service, asked):
        return known
    return _made(service, member, identity, asked, job, {})


def propose(request: Request, service: Service, member: Membership, identity: Identity, job: PipelineJob) -> Response:
    """Have the cluster say what it would make of the job."""
    submitting.require_allowed(member.kube, job, member.place.policy)
    found = submitting.submitted(member.kube, job, identity.name, None, dry_run=True)
    cluster, now = member.mirror.cluster, service.clock()

    def change(connection: Connection) -> Answer:
        return reply(job_view(submitting.proposed(connection, found, cluster, identity.name, now)))

    request.state.changed_nothing = True
    return write_once(service, "jobs", None, change)


def retry(
    service: Service, member: Membership, identity: Identity, asked: Asked | None, job: PipelineJob, old: StoredJob
) -> Response:
    """Make the job that goes on where the old one ended."""
    if known := _remembered(service, asked):
        return known
    again = submitting.on_the_same_storage(job, old.next_job)
    told = {"of": old.uid, "resumeFrom": job.spec.checkpoint.resume_from}
    return _made(service, member, identity, asked, again, told)


def suspend(
    service: Service,
    member: Membership,
    identity: Identity,
    asked: Asked | None,
    place: tuple[str, str],
    version: int | None,
    wanted: bool,
) -> Response:
    """Ask for a suspension, or take it back; nothing happens to a job that has ended or is asked for the same."""

    def change(job: Place, guard: str | None, stored: StoredJob) -> Object:
        if stored.phase.terminal or stored.suspend == wanted:
            return {}
        return member.kube.set_suspend(job, wanted, guard)

    if known := _remembered(service, asked):
        return known
    found = submitting.changed(member.kube, member.mirror.see, *place, version, change)
    uid, cluster, now = found["metadata"]["uid"], member.mirror.cluster, service.clock()

    def keep(connection: Connection) -> Answer:
        return _told(submitting.kept(connection, found, cluster, identity.name, now), 200)

    return write_once(service, uid, asked, keep)


def delete(
    service: Service,
    member: Membership,
    identity: Identity,
    asked: Asked | None,
    place: tuple[str, str],
    version: int | None,
) -> Response:
    """Remove the job from the cluster; the mirror tells when it is gone."""

    def change(job: Place, guard: str | None, stored: StoredJob) -> Object:
        member.kube.delete(job, guard)
        return {}

    if known := _remembered(service, asked):
        return known
    found = submitting.changed(member.kube, member.mirror.see, *place, version, change)
    uid, now = found["metadata"]["uid"], service.clock()

    def keep(connection: Connection) -> Answer:
        return _told(jobs.request_delete(connection, uid, identity.name, now), 202)

    return write_once(service, uid, asked, keep)


def _made(
    service: Service,
    member: Membership,
    identity: Identity,
    asked: Asked | None,
    job: PipelineJob,
    retried: Mapping[str, object],
) -> Response:
    submitting.require_allowed(member.kube, job, member.place.policy)
    found = submitting.submitted(member.kube, job, identity.name, asked)
    uid, cluster, now = found["metadata"]["uid"], member.mirror.cluster, service.clock()

    def change(connection: Connection) -> Answer:
        made = submitting.kept(connection, found, cluster, identity.name, now)
        if retried:
            jobs.add_event(connection, uid, "retry", retried, now)
            made = jobs.get(connection, uid)
        return _told(made, 201, {"Location": f"/v1/jobs/{made.namespace}/{made.name}"})

    return write_once(service, uid, asked, change)


def _remembered(service: Service, asked: Asked | None) -> Response | None:
    """The cluster is not asked twice for what was answered before."""
    known = service.read(lambda connection: remembered(connection, asked))
    return None if known is None else response_of(known)


def _told(stored: StoredJob, status: int, headers: Mapping[str, str] | None = None) -> Answer:
    return reply(job_view(stored), status, {**(headers or {}), "ETag": f'"{stored.version}"'})
