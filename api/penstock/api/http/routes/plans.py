"""/v1/plans: plans for a job, on this or other hardware, without running it; /v1/profiles: measurements for them."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Identity, Role
from penstock.api.http.acceptance import require_acceptable, require_editor
from penstock.api.http.dependencies import Document, Editor, ServiceIn, Viewer, require_role
from penstock.api.http.problems import READS, Problem, answers
from penstock.api.http.replies import Once, reply, write_once
from penstock.api.http.routes.jobs import visible
from penstock.api.schemas.bodies import CLUSTER, EXAMPLE_CLUSTER, EXAMPLE_JOB, JOB, body
from penstock.api.schemas.plans import (
    PlanRequestPage,
    PlanRequestView,
    ProfilePage,
    ProfileView,
    profile_row,
    profile_view,
    request_row,
    request_view,
)
from penstock.api.service import Service
from penstock.api.store import plan_requests, profiles
from penstock.api.store.idempotency import Answer
from penstock.api.store.plan_requests import PlanInput, StoredRequest
from penstock.core.errors import UserError
from penstock.core.profile_matching import OLDEST_SECONDS, model_digest, unfit

router = APIRouter(tags=["plans"])

MOST_WAITING = 32
MOST_OF_NAMESPACE, MOST_OF_TOKEN = 16, 8
"""Limits of open plan requests; all tokens with one name share a limit."""
RETRY_SECONDS = 10
ASKS = answers(
    "unauthenticated", "forbidden", "conflict", "too-large", "unsupported-media-type", "invalid", "storage-full"
)
BODY = body(
    {
        "type": "object",
        "required": ["job"],
        "additionalProperties": False,
        "properties": {
            "job": JOB,
            "cluster": {
                "description": "Described hardware; excludes profile.",
                "anyOf": [CLUSTER, {"type": "null"}],
            },
            "profile": {"type": ["string", "null"], "description": "The digest of a stored profile."},
            "whatIf": {
                "type": "boolean",
                "default": False,
                "description": "Also plan with faster links, more memory, a node more or fewer, more micro-batches and "
                "longer sequences, a search each: `plan.prediction.explanation.variations`.",
            },
            "frontier": {
                "type": "boolean",
                "default": False,
                "description": "Also plan on fewer devices and on those of some kinds alone, at most 13 further "
                "searches: `plan.prediction.explanation.frontier` has the plans for which no other one is both as fast "
                "and as cheap. The request needs a price.",
            },
        },
    },
    {"job": EXAMPLE_JOB, "cluster": EXAMPLE_CLUSTER},
)
CANCELS = answers("unauthenticated", "forbidden", "not-found", "storage-full")


@router.post(
    "/v1/plans",
    status_code=202,
    response_model=PlanRequestView,
    responses=ASKS,
    operation_id="requestPlan",
    openapi_extra=BODY,
)
def ask(service: ServiceIn, identity: Editor, document: Document, keyed: Once) -> Response:
    """Plan a job without running it.

    The body, JSON or YAML, holds the PipelineJob as `job`, and either `cluster`, hardware as `penstock plan --cluster`
    reads it, or `profile`, the digest of a stored profile. With neither, the newest fresh profile of the service's
    machine that fits the job is used. Poll Location until the state is Succeeded, Failed or Canceled.
    """
    plan_input = PlanInput.from_manifest(document)
    if service.cluster is not None:
        require_editor(identity, plan_input.job)
    else:
        locations = service.settings.locations
        service.read(lambda connection: require_acceptable(connection, locations, identity, plan_input.job))
    plan_input = _for_hardware(service, plan_input)
    request = str(uuid.uuid4())

    def change(connection: Connection, now: float) -> Answer:
        _require_capacity(connection, plan_input.job.metadata.namespace, identity.name)
        made = plan_requests.create(connection, plan_input, request, identity.name, now)
        return reply(request_view(made, plan_input, None), 202, {"Location": f"/v1/plans/{made.id}"})

    return write_once(service, request, keyed, change)


def _for_hardware(service: Service, plan_input: PlanInput) -> PlanInput:
    """Return the request with the chosen profile; raises `UserError` if there is none, or if it does not fit."""
    if plan_input.cluster is not None and plan_input.profile is not None:
        raise UserError(
            what="cannot be combined with cluster",
            where="profile",
            remedy="leave out cluster for a measured machine, or profile for described hardware",
        )
    if plan_input.cluster is not None:
        return plan_input
    spec, model = plan_input.job.spec, model_digest(plan_input.job.spec.model, plan_input.job.spec.data.sequence_length)
    if plan_input.profile is not None:
        _require_fit(service, plan_input, model)
        return plan_input
    since, host = service.clock() - OLDEST_SECONDS, service.settings.machine
    candidates = service.read(lambda connection: profiles.measured_since(connection, spec, model, host, since))
    fitting = next((candidate for candidate in candidates if unfit(candidate, spec, model) is None), None)
    if fitting is None:
        raise UserError(
            what="is missing, and this service has no fresh profile that fits the job",
            where="profile",
            remedy="describe the hardware in the field cluster, or run the job, which measures first",
        )
    return dataclasses.replace(plan_input, profile=fitting.digest)


def _require_fit(service: Service, plan_input: PlanInput, model: str) -> None:
    """Raise `UserError` unless the named profile fits the job; its age is not checked."""
    remedy = "list the profiles: GET /v1/profiles"
    digest = plan_input.profile or ""
    try:
        _, profile = service.read(lambda connection: profiles.get(connection, digest))
    except profiles.NoSuchProfileError:
        raise UserError(what="does not exist", where="profile", remedy=remedy) from None
    reason = unfit(profile, plan_input.job.spec, model)
    if reason is not None:
        raise UserError(what=reason, where="profile", remedy=remedy)


def _require_capacity(connection: Connection, namespace: str, by: str) -> None:
    """Raise `Problem` if too many requests are open: in total, of the namespace, or of the caller."""
    of_namespace, own = plan_requests.num_open(connection, namespace, by)
    waiting = plan_requests.num_waiting(connection)
    for count, most, kind, what in (
        (own, MOST_OF_TOKEN, "too-many-requests", f"of {by} are open"),
        (of_namespace, MOST_OF_NAMESPACE, "too-many-requests", f"of namespace {namespace} are open"),
        (waiting, MOST_WAITING, "unavailable", "wait"),
    ):
        if count >= most:
            raise Problem(
                kind=kind,
                detail=f"{count} requests for plans {what} already",
                remedy="repeat it after the number of seconds in Retry-After, or cancel requests with "
                "DELETE /v1/plans/ID",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )


@router.get("/v1/plans", responses=READS, operation_id="listPlanRequests")
def list_requests(
    service: ServiceIn,
    identity: Viewer,
    namespace: Annotated[str | None, Query(max_length=63, description="Only requests of this namespace.")] = None,
    limit: Annotated[int, Query(ge=1, le=plan_requests.MOST_PER_PAGE)] = 50,
) -> PlanRequestPage:
    """List the newest plan requests, without their plans. Requests that have ended are deleted after 30 days."""
    chosen = visible(identity, namespace)
    requests = service.read(lambda connection: plan_requests.newest(connection, chosen, limit))
    return PlanRequestPage(items=[request_row(stored) for stored in requests])


@router.get("/v1/plans/{request}", responses=READS, operation_id="getPlanRequest")
def get(service: ServiceIn, identity: Viewer, request: str) -> PlanRequestView:
    """Return a plan request, and after success its plan, with reasons and the rejected alternatives."""
    return service.read(lambda connection: _view(connection, _permitted(connection, identity, Role.VIEWER, request)))


@router.delete("/v1/plans/{request}", responses=CANCELS, operation_id="cancelPlanRequest")
def cancel(service: ServiceIn, identity: Editor, request: str) -> PlanRequestView:
    """Cancel an open plan request, or delete one that has ended; return its last state."""
    now = service.clock()
    service.read(
        lambda connection: _permitted(connection, identity, Role.EDITOR, request)
    )  # outside of the writer: it may call the cluster

    def change(connection: Connection) -> PlanRequestView:
        before = _view(connection, _permitted(connection, identity, Role.EDITOR, request))
        after = plan_requests.cancel(connection, request, now)
        return before if before.state.terminal else _view(connection, after)

    return service.write(request, change)


def _permitted(connection: Connection, identity: Identity, role: Role, request: str) -> StoredRequest:
    """Return the request, if it is in a namespace where ``identity`` has ``role``."""
    stored = plan_requests.get(connection, request)
    require_role(identity, role, stored.namespace, "get" if role is Role.VIEWER else "create")
    return stored


def _view(connection: Connection, stored: StoredRequest) -> PlanRequestView:
    return request_view(
        stored, plan_requests.plan_input(connection, stored.id), plan_requests.plan(connection, stored.id)
    )


@router.get("/v1/profiles", responses=READS, operation_id="listProfiles")
def list_profiles(service: ServiceIn, identity: Viewer) -> ProfilePage:
    """List every profile, newest first. Profiles belong to machines, and so to no namespace."""
    now = service.clock()
    return ProfilePage(items=[profile_row(profile, now) for profile in service.read(profiles.every)])


@router.get("/v1/profiles/{digest}", responses=READS, operation_id="getProfile")
def get_profile(service: ServiceIn, identity: Viewer, digest: str) -> ProfileView:
    """Return a profile: costs of layers, links between ranks as matrices, memory, and the whole manifest."""
    stored, profile = service.read(lambda connection: profiles.get(connection, digest))
    return profile_view(stored, profile, service.clock())
