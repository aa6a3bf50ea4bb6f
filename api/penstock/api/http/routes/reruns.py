"""Retry of a job from its newest checkpoint, and its reproduction."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Identity
from penstock.api.cluster import submitting
from penstock.api.cluster.membership import Membership
from penstock.api.files.runfiles import newest_checkpoint
from penstock.api.http.acceptance import require_acceptable, require_editor
from penstock.api.http.dependencies import Editor, JobIn, ServiceIn
from penstock.api.http.problems import Problem, answers
from penstock.api.http.replies import Once, reply, write_once
from penstock.api.http.reruns import commands, name_stem, next_name, pinned, retried
from penstock.api.http.routes import on_cluster
from penstock.api.http.routes.jobs import WRITES, etag
from penstock.api.http.run_folder import run_folder
from penstock.api.schemas.jobs import JobView, job_view
from penstock.api.schemas.runs import ReproductionView, RetryRequest
from penstock.api.service import Service
from penstock.api.settings import Settings
from penstock.api.store import jobs, plans
from penstock.api.store.idempotency import Answer, KeyedRequest
from penstock.api.store.jobs import StoredJob
from penstock.core.manifest import limits_lifted
from penstock.core.run.locations import OUT

router, of_job = APIRouter(tags=["jobs"]), APIRouter(tags=["jobs"])

READS = answers("unauthenticated", "forbidden", "not-found", "conflict")


@router.post(
    "/v1/jobs/{namespace}/{name}/retry",
    status_code=201,
    response_model=JobView,
    responses={**WRITES, **answers("elsewhere")},
    operation_id="retryJob",
)
def retry(
    service: ServiceIn,
    identity: Editor,
    namespace: str,
    name: str,
    keyed: Once,
    wanted: Annotated[RetryRequest | None, Body()] = None,
) -> Response:
    """Create a new job from one that has ended.

    It continues from the newest complete checkpoint; without one it starts where the old job started.
    """
    if service.cluster is not None:
        return _retry_there(service, service.cluster, identity, (namespace, name), keyed, wanted)
    uid, settings = str(uuid.uuid4()), service.settings

    def change(connection: Connection, now: float) -> Answer:
        old = jobs.find(connection, namespace, name)
        _require_ended(old)
        begin = _begin(settings, old)
        taken = jobs.names(connection, namespace, name_stem(name))
        job = retried(old.next_job, (wanted and wanted.name) or next_name(name, taken), begin)
        require_acceptable(connection, settings.locations, identity, job)
        jobs.create(connection, job, uid, identity.name, now, settings.executor_for(job))
        jobs.add_event(connection, uid, "retry", {"of": old.uid, "resumeFrom": begin}, now)
        made = jobs.get(connection, uid)
        place = f"/v1/jobs/{made.namespace}/{made.name}"
        return reply(job_view(made), 201, {"Location": place, "ETag": etag(made)})

    return write_once(service, uid, keyed, change)


def _retry_there(
    service: Service,
    member: Membership,
    identity: Identity,
    place: tuple[str, str],
    keyed: KeyedRequest | None,
    wanted: RetryRequest | None,
) -> Response:
    """Retry the job on its cluster."""

    def question(connection: Connection) -> tuple[StoredJob, tuple[int, str] | None, frozenset[str]]:
        old = jobs.find(connection, *place)
        return old, submitting.begin(connection, old), jobs.names(connection, place[0], name_stem(place[1]))

    old, saved, taken = service.read(question)
    _require_ended(old)
    if saved is not None:
        _require_steps_left(old, *saved)
    job = retried(old.next_job, (wanted and wanted.name) or next_name(place[1], taken), saved and saved[1])
    require_editor(identity, job)
    return on_cluster.retry(service, member, identity, keyed, job, old)


def _require_ended(old: StoredJob) -> None:
    if old.phase.terminal or old.deleted_at is not None:
        return
    raise Problem(
        kind="conflict",
        detail=f"the job is {old.phase}",
        remedy="wait until it has ended, or delete it; resume a suspended job with POST .../resume",
    )


def _begin(settings: Settings, old: StoredJob) -> str | None:
    """Return the newest complete checkpoint; raises `Problem` if no steps are left after it."""
    newest = newest_checkpoint(run_folder(settings, old))
    if newest is None:
        return None
    uri = f"{OUT}{old.uid}/{newest.attempt}/{newest.step}"
    _require_steps_left(old, newest.step, uri)
    return uri


def _require_steps_left(old: StoredJob, step: int, uri: str) -> None:
    """Raise `Problem` if the checkpoint is that of the last step."""
    steps = old.next_job.spec.training.steps
    if step >= steps:
        raise Problem(
            kind="conflict",
            detail=f"all {steps} steps are done",
            remedy=f"submit a job with more steps and resumeFrom: {uri}",
        )


@of_job.get("/reproduce", responses=READS, name="reproduceJob")
def reproduce(request: Request, service: ServiceIn, job: JobIn) -> ReproductionView:
    """Return what repeats the run: its manifest with the newest plan pinned, package versions, and shell commands."""

    def question(connection: Connection) -> tuple[plans.Origin, str]:
        taken = jobs.names(connection, job.namespace, name_stem(job.name))
        free = job.name if job.deleted_at is not None else next_name(job.name, taken)
        return plans.origin(connection, job), free

    origin, free = service.read(question)
    ran = job.recorded_job
    with limits_lifted():  # the commands install the version that ran the job, so limits of this one do not apply
        rerun = retried(ran if origin.plan is None else pinned(ran, origin.plan), free, None)
    return ReproductionView(
        manifest=rerun.to_manifest(),
        plan_digest=job.plan_digest if origin.plan else None,
        versions=dict(origin.versions),
        commands=list(commands(rerun, str(request.base_url).rstrip("/"), origin.versions)),
    )
