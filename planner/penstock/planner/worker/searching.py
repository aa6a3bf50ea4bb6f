"""Planning for a command, in the same kind of process as the service's, with the same limits."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.planner.worker.process import MOST_SECONDS, Planner, ProcessPlanner
from penstock.planner.worker.protocol import Answer, PlanningRequest, Progress

POLL_SECONDS = 0.1
KEY = "the search of this command"

Report = Callable[[Progress], None]


def plan_for(
    spec: JobSpec,
    hardware: Profile | ClusterSpec,
    report: Report,
    planner: Planner | None = None,
    *,
    what_if: bool = False,
    frontier: bool = False,
) -> Plan:
    """The best plan, with ``what_if`` also for changed jobs and hardware (`penstock.planner.variations`), and with
    ``frontier`` also for other numbers and kinds of devices (`penstock.planner.choice`).

    Raises:
        UserError: nothing fits, the pins cannot be met, or the search is too large.
    """
    request = dataclasses.replace(planning_request(spec, hardware), what_if=what_if, frontier=frontier)
    answer = answer_of(request, report, planner)
    assert answer.plan is not None, "an answer without a plan says why"
    return answer.plan


def best_plans_for(
    spec: JobSpec, hardware: Profile | ClusterSpec, report: Report, num_plans: int, planner: Planner | None = None
) -> tuple[Plan, ...]:
    """The best plans that differ not only in boundaries, by their predicted steps; raises as `plan_for` does."""
    request = dataclasses.replace(planning_request(spec, hardware), num_plans=num_plans)
    answer = answer_of(request, report, planner)
    assert answer.plan is not None, "an answer without a plan says why"
    return answer.plan, *answer.others


def planning_request(spec: JobSpec, hardware: Profile | ClusterSpec) -> PlanningRequest:
    """The request to plan ``spec`` for measured or described hardware."""
    if isinstance(hardware, ClusterSpec):
        return PlanningRequest(spec=spec, cluster=hardware)
    return PlanningRequest(spec=spec, profile=hardware)


def answer_of(request: PlanningRequest, report: Report, planner: Planner | None = None) -> Answer:
    """The answer of a planning process, by default one with the service's limits; ``report`` gets its progress.

    The process ends with this call, also if it is interrupted by Ctrl-C or a stop.

    Raises:
        UserError: planning failed; the error is the one that the process reported.
    """
    planner = planner or ProcessPlanner(seconds=MOST_SECONDS, level=logging.DEBUG)
    try:
        planner.start(KEY, request)
        while (answer := planner.poll(KEY)) is None:
            report(planner.progress(KEY))
            time.sleep(POLL_SECONDS)
    finally:
        planner.cancel(KEY)
    if answer.what:
        raise UserError(what=answer.what, where=answer.where, remedy=answer.remedy)
    return answer
