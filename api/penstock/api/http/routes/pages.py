"""Pages for browsers: jobs, comparisons, submission, what-if plans and profiles, and the files that pages refer to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Role
from penstock.api.files.runfiles import artifacts, checkpoints
from penstock.api.http.dependencies import Editor, ServiceIn, Viewer, require_role
from penstock.api.http.page_response import PageResponse
from penstock.api.http.problems import LARGEST_NUMBER, Problem
from penstock.api.http.routes.insight import not_sampled
from penstock.api.http.routes.jobs import visible
from penstock.api.http.run_folder import elsewhere
from penstock.api.pages import static
from penstock.api.pages.comparison import FEWEST, MOST, comparison
from penstock.api.pages.job import job_page
from penstock.api.pages.job_data import NotSampledError, read_job
from penstock.api.pages.job_files import JobFiles
from penstock.api.pages.listing import listing
from penstock.api.pages.profiles import profile_list, profile_page
from penstock.api.pages.submit import submit_page
from penstock.api.pages.whatif import answer_page, whatif_page
from penstock.api.store import jobs, plan_requests, profiles
from penstock.api.store.plan_requests import PlanInput, StoredRequest
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.planner.pricing import cost_of, run_time_of

router = APIRouter(include_in_schema=False)

MONTH_SECONDS = 30 * 86_400
DEFAULT_NAMESPACE = "default"


@router.get("/")
def show_jobs(
    service: ServiceIn,
    identity: Viewer,
    name: Annotated[str, Query(max_length=63)] = "",
    phase: Phase | str = "",
    sort: str = "-created",
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> PageResponse:
    """Show the list of jobs."""
    phases = (Phase(phase),) if phase in set(Phase) else ()
    query = jobs.Query(namespaces=visible(identity, None), phases=phases, name=name, sort=sort, cursor=cursor)
    page_jobs, following = service.read(lambda connection: jobs.page(connection, query))
    return PageResponse(listing(page_jobs, query, following, service.clock()), identity)


@router.get("/jobs/{namespace}/{name}")
def show_job(
    service: ServiceIn,
    identity: Viewer,
    namespace: str,
    name: str,
    step: Annotated[
        int | None, Query(ge=0, le=LARGEST_NUMBER, description="A sampled step; else a typical one.")
    ] = None,
) -> PageResponse:
    """Show a job."""
    try:
        data = service.read(lambda connection: read_job(connection, namespace, name, step))
    except NotSampledError as error:
        raise not_sampled(str(error), error.sampled) from None
    root = service.settings.runs / data.stored.uid
    files = JobFiles(
        checkpoints=checkpoints(root),
        artifacts=artifacts(root),
        elsewhere=elsewhere(service.settings, data.stored),
    )
    return PageResponse(job_page(data, files, identity, service.clock()), identity)


@router.get("/compare")
def show_comparison(
    service: ServiceIn,
    identity: Viewer,
    job: Annotated[list[str], Query(description="NAMESPACE/NAME, two to four times.")] = [],  # noqa: B006
) -> PageResponse:
    """Compare jobs."""
    places = [read_place(text) for text in job]
    if not FEWEST <= len(places) <= MOST:
        raise Problem(
            kind="bad-request",
            detail=f"{len(places)} jobs cannot be compared",
            where="job",
            remedy="mark two to four jobs in the list, then press Compare",
        )
    for namespace, _ in places:
        require_role(identity, Role.VIEWER, namespace, "get")
    compared = service.read(lambda connection: [read_job(connection, *place) for place in places])
    return PageResponse(comparison(compared), identity)


def read_place(text: str) -> tuple[str, str]:
    """Parse ``NAMESPACE/NAME``; raises `Problem`."""
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name:
        raise Problem(
            kind="bad-request",
            detail=f"{text!r} does not name a job",
            where="job",
            remedy="write NAMESPACE/NAME, such as default/llama",
        )
    return namespace, name


@router.get("/submit")
def show_submit(identity: Viewer) -> PageResponse:
    """Show the form to submit a job."""
    return PageResponse(submit_page(), identity)


@router.get("/whatif")
def show_whatif(
    service: ServiceIn, identity: Editor, job: Annotated[str | None, Query(description="NAMESPACE/NAME.")] = None
) -> PageResponse:
    """Show controls and the resulting plan, of an example or of an existing job. It needs the right to plan."""
    if job is None:
        return PageResponse(whatif_page(identity.namespace or DEFAULT_NAMESPACE), identity)
    namespace, name = read_place(job)
    require_role(identity, Role.EDITOR, namespace, "create")
    example = service.read(lambda connection: jobs.find(connection, namespace, name))
    return PageResponse(whatif_page(namespace, example.recorded_job), identity)


@router.get("/plans/{request}")
def show_plan(service: ServiceIn, identity: Viewer, request: str) -> PageResponse:
    """Show a plan request, with its progress."""

    def question(connection: Connection) -> tuple[StoredRequest, Plan | None, PlanInput]:
        of_request = (connection, request)
        return plan_requests.get(*of_request), plan_requests.plan(*of_request), plan_requests.plan_input(*of_request)

    stored, plan, plan_input = service.read(question)
    require_role(identity, Role.VIEWER, stored.namespace, "get")
    spec, cluster = plan_input.job.spec, plan_input.cluster
    run_time = None if plan is None else run_time_of(plan, spec, cluster)
    cost = None if plan is None else cost_of(plan, spec, cluster)
    return PageResponse(answer_page(stored, plan, run_time, cost), identity)


@router.get("/profiles")
def show_profiles(service: ServiceIn, identity: Viewer) -> PageResponse:
    """Show the list of profiles."""
    return PageResponse(profile_list(service.read(profiles.every), service.clock()), identity)


@router.get("/profiles/{digest}")
def show_profile(service: ServiceIn, identity: Viewer, digest: str) -> PageResponse:
    """Show a profile."""
    from penstock.planner.fit import fit_points

    stored, profile = service.read(lambda connection: profiles.get(connection, digest))
    return PageResponse(profile_page(stored, profile, fit_points(profile)), identity)


@router.get("/static/{name}")
def show_file(name: str, accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Return a file that pages refer to, the same for all users."""
    if name not in static.FILES:
        raise Problem(
            kind="not-found",
            detail=f"there is no file {name}",
            remedy="reload the page: another version of the service made it",
        )
    headers = {"Cache-Control": f"public, max-age={MONTH_SECONDS}, immutable", "Vary": "Accept-Encoding"}
    media_type, _ = static.FILES[name]
    if "gzip" in accept_encoding:
        return Response(static.compressed(name), media_type=media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(static.content(name), media_type=media_type, headers=headers)
