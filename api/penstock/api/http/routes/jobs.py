"""/v1/jobs and /v1/history: create, get, list, suspend, resume and delete jobs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Identity, Role
from penstock.api.http.acceptance import require_acceptable, require_editor
from penstock.api.http.dependencies import Document, Editor, JobIn, ServiceIn, Viewer, require_role
from penstock.api.http.problems import READS, Problem, answers
from penstock.api.http.replies import Once, reply, write_once
from penstock.api.http.routes import on_cluster
from penstock.api.schemas.bodies import EXAMPLE_JOB, JOB, body
from penstock.api.schemas.jobs import JobPage, JobView, job_view
from penstock.api.store import jobs
from penstock.api.store.idempotency import Answer
from penstock.api.store.jobs import StoredJob
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase

router, of_job = APIRouter(tags=["jobs"]), APIRouter(tags=["jobs"])

WRITES = answers(
    "unauthenticated",
    "forbidden",
    "not-allowed",
    "not-found",
    "name-taken",
    "conflict",
    "changed-meanwhile",
    "too-large",
    "unsupported-media-type",
    "invalid",
    "storage-full",
)
WRITTEN: dict[str, Any] = {"response_model": JobView, "responses": WRITES}
PROPOSED: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "The result of a dry run. The uid of the job itself will differ."}
}
DryRun = Annotated[
    bool,
    Query(
        alias="dryRun",
        description="Only check whether the job would be accepted: nothing is stored, and the key is ignored.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(description='The ETag of the job as it was read, such as "3".', pattern=r'^(\*|(W/)?"[0-9]{1,9}")$'),
]
NamespaceQuery = Annotated[str | None, Query(max_length=63, description="Only jobs of this namespace.")]
LabelQuery = Annotated[list[str], Query(description="KEY=VALUE; given several times, all must hold.")]
NameQuery = Annotated[str, Query(max_length=63, description="Part of the name.")]


Change = Callable[[Connection, str, str, float], StoredJob]


class _Edit:
    """Change of the job in a path, by an authorized caller."""

    def __init__(
        self, service: ServiceIn, identity: Editor, namespace: str, name: str, keyed: Once, if_match: IfMatch = None
    ) -> None:
        self._service, self._identity, self._keyed = service, identity, keyed
        self._place, self._version = (namespace, name), read_etag(if_match)

    def suspend(self, value: bool) -> Response:
        """Set or clear ``suspend``; raises `NoSuchJobError` once the job is deleted."""
        service, member = self._service, self._service.cluster
        if member is not None:
            return on_cluster.suspend(service, member, self._identity, self._keyed, self._place, self._version, value)
        return self._answer(200, lambda connection, uid, by, now: jobs.set_suspend(connection, uid, value, by, now))

    def delete(self) -> Response:
        """Request the job's deletion; raises `NoSuchJobError` once it is deleted."""
        service, member = self._service, self._service.cluster
        if member is not None:
            return on_cluster.delete(service, member, self._identity, self._keyed, self._place, self._version)
        return self._answer(202, jobs.request_delete)

    def _answer(self, status: int, change: Change) -> Response:
        uid = self._service.read(lambda connection: jobs.find(connection, *self._place)).uid

        def changed(connection: Connection, now: float) -> Answer:
            current = jobs.require_version(connection, uid, self._version)
            if current.deleted_at is not None:
                raise jobs.NoSuchJobError("/".join(self._place))
            after = change(connection, uid, self._identity.name, now)
            return reply(job_view(after), status, {"ETag": etag(after)})

        return write_once(self._service, uid, self._keyed, changed)


Editing = Annotated[_Edit, Depends()]


@router.post(
    "/v1/jobs",
    status_code=201,
    response_model=JobView,
    responses={**WRITES, **PROPOSED},
    operation_id="createJob",
    openapi_extra=body(JOB, EXAMPLE_JOB),
)
def create(
    request: Request, service: ServiceIn, identity: Editor, document: Document, keyed: Once, dry_run: DryRun = False
) -> Response:
    """Submit a job: a PipelineJob as JSON or YAML. A dry run returns the job as it would be accepted."""
    job, settings = PipelineJob.from_manifest(document), service.settings
    if service.cluster is not None:
        require_editor(identity, job)
        if dry_run:
            return on_cluster.propose(request, service, service.cluster, identity, job)
        return on_cluster.create(service, service.cluster, identity, keyed, job)
    service.read(lambda connection: require_acceptable(connection, settings.locations, identity, job))
    uid, executor = str(uuid.uuid4()), settings.executor_for(job)

    def propose(connection: Connection, now: float) -> Answer:
        return reply(job_view(jobs.proposed(connection, job, uid, identity.name, now, executor)))

    def change(connection: Connection, now: float) -> Answer:
        made = jobs.create(connection, job, uid, identity.name, now, executor)
        place = f"/v1/jobs/{made.namespace}/{made.name}"
        return reply(job_view(made), 201, {"Location": place, "ETag": etag(made)})

    if dry_run:
        request.state.changed_nothing = True
        return write_once(service, "jobs", None, propose)
    return write_once(service, uid, keyed, change)


@router.get("/v1/jobs", responses=READS, operation_id="listJobs")
def list_jobs(
    service: ServiceIn,
    identity: Viewer,
    namespace: NamespaceQuery = None,
    phase: Annotated[list[Phase], Query(description="Only these phases.")] = [],  # noqa: B006, FastAPI copies it
    label: LabelQuery = [],  # noqa: B006
    name: NameQuery = "",
    sort: Annotated[str, Query(description="created, name, priority or phase; with a minus descending.")] = "-created",
    limit: Annotated[int, Query(ge=1, le=jobs.MOST_PER_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="The `next` of the page before.")] = None,
    deleted: Annotated[bool, Query(description="Also those that were deleted.")] = False,
) -> JobPage:
    """List jobs."""
    query = jobs.Query(
        namespaces=visible(identity, namespace),
        phases=tuple(phase),
        labels=read_labels(label),
        name=name,
        deleted=deleted,
        sort=sort,
        limit=limit,
        cursor=cursor,
    )
    try:
        page_jobs, following = service.read(lambda connection: jobs.page(connection, query))
    except UserError as error:
        raise Problem(kind="bad-request", detail=error.what, where=error.where, remedy=error.remedy) from None
    return JobPage(items=[job_view(job) for job in page_jobs], next=following)


@of_job.get("", responses=READS, name="getJob")
def get(job: JobIn, response: Response) -> JobView:
    """Return the job: any job by its uid, deleted or not; by its name the existing one, else the latest deleted one."""
    response.headers["ETag"] = etag(job)
    return job_view(job)


@router.delete("/v1/jobs/{namespace}/{name}", status_code=202, **WRITTEN, operation_id="deleteJob")
def delete(editing: Editing) -> Response:
    """Delete the job: it ends, and its name becomes free. Its records stay readable below /v1/history."""
    return editing.delete()


@router.post("/v1/jobs/{namespace}/{name}/suspend", **WRITTEN, operation_id="suspendJob")
def suspend(editing: Editing) -> Response:
    """Suspend the job: it saves a checkpoint after the current step and releases its devices."""
    return editing.suspend(True)


@router.post("/v1/jobs/{namespace}/{name}/resume", **WRITTEN, operation_id="resumeJob")
def resume(editing: Editing) -> Response:
    """Resume a suspended job."""
    return editing.suspend(False)


def etag(stored: StoredJob) -> str:
    """Return the ETag, which changes with everything but progress."""
    return f'"{stored.version}"'


def read_etag(header: str | None) -> int | None:
    """Return the version in an If-Match header; none without a header, and for a star."""
    if header is None or header == "*":
        return None
    return int(header.removeprefix("W/").strip('"'))


def visible(identity: Identity, namespace: str | None) -> tuple[str, ...] | None:
    """Return the namespaces that a list shows; none for all."""
    if namespace is None:
        return identity.namespaces(Role.VIEWER, "list")
    require_role(identity, Role.VIEWER, namespace, "list")
    return (namespace,)


def read_labels(texts: list[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` strings."""
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise Problem(
                kind="bad-request",
                detail=f"{text!r} is not a label selector",
                where="label",
                remedy="write KEY=VALUE, such as team=speech",
            )
        labels[key] = value
    return labels
