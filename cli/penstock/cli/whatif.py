"""Plan requests to a service: submitted, watched, and canceled when the user stops waiting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from penstock.cli.lines import Line, line
from penstock.cli.manifests import read_cluster, read_for_service, require_cluster
from penstock.cli.output import warn
from penstock.cli.remote import connected
from penstock.cli.summary import search_text
from penstock.client import Client, PlanRequest
from penstock.core.errors import UserError
from penstock.core.plan import Cost, Plan, RunTime


def plan_at(
    server: str,
    job: Path,
    *,
    cluster: Path | None,
    local: Mapping[str, object],
    costs: Path | None = None,
    what_if: bool = False,
    frontier: bool = False,
) -> tuple[Plan, RunTime | None, Cost | None]:
    """The plan that the service makes for the job, the time of all its steps, and its cost if a price is given. With
    ``what_if`` the service also plans changed jobs and hardware, with ``frontier`` the job on fewer devices.

    ``local`` are options that concern only this machine.

    Raises:
        UserError: such an option was given, or the service refused, or it found no plan.
    """
    for name, value in local.items():
        if value is not None:
            remedy = f"leave out {name} to plan on the service, or --server to plan here"
            raise UserError(what=f"{name} uses this machine, but the service makes the plan", where=name, remedy=remedy)
    require_cluster(costs, cluster)
    pipeline_job = read_for_service(job, warn)
    hardware = None if cluster is None else read_cluster(cluster, costs)
    with connected(server) as client, closing(line()) as shown:
        ended = _ended(
            client, client.plan(pipeline_job, cluster=hardware, what_if=what_if, frontier=frontier).id, shown
        )
    return _plan_of(ended), ended.run_time, ended.cost


def _ended(client: Client, request: str, shown: Line) -> PlanRequest:
    """Wait until the request has ended, and return it; Ctrl-C cancels it."""
    try:
        for planned in client.follow_plan(request):
            shown.update(progress_text(planned), None)
    except KeyboardInterrupt:
        client.cancel_plan(request)
        raise
    return planned


def progress_text(request: PlanRequest) -> str:
    """Return the request's progress, in a line."""
    progress = request.progress
    if not progress.candidates:
        return "waiting" if request.state == "Queued" else "planning"
    return search_text(progress.candidates, progress.best_step_seconds, progress.best_speed, progress.change)


def _plan_of(request: PlanRequest) -> Plan:
    if request.plan is not None:
        return request.plan
    if request.error is not None:
        raise UserError(what=request.error.what, where=request.error.where, remedy=request.error.remedy)
    raise UserError(what="the request was canceled", where=request.id, remedy="request the plan again")
