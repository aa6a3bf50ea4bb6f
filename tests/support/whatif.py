"""Requests for plans: what is asked, and a plan_queue that answers turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.api.executor.plan_queue import PlanQueue
from penstock.api.service import Service
from penstock.api.store import plan_requests, profiles
from penstock.api.store.plan_requests import PlanInput, StoredRequest
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.profile import Profile
from penstock.planner.worker.process import Planner
from tests.support.planning import cluster
from tests.support.service import job_manifest

PATIENCE_SECONDS = 90.0


def tiny_job(**resources: Any) -> PipelineJob:
    """The tiny job on two ranks."""
    manifest = job_manifest()
    manifest["spec"]["resources"] = {"ranks": 2, **resources}
    return PipelineJob.from_manifest(manifest)


def asked_for(job: PipelineJob | None = None, described: ClusterSpec | None = None) -> dict[str, Any]:
    """The body of a request for a plan on described hardware."""
    return {"job": (job or tiny_job()).to_manifest(), "cluster": (described or cluster()).to_manifest()}


def keep_profile(service: Service, found: Profile) -> str:
    """Store it; its digest."""
    service.write("profiles", lambda connection: profiles.keep(connection, found))
    return found.digest


def add_request(service: Service, request: str, plan_input: PlanInput | None = None) -> StoredRequest:
    """A request that waits, with this id."""
    what = plan_input or PlanInput(job=tiny_job(), cluster=cluster())
    now = service.clock()
    return service.write(request, lambda connection: plan_requests.create(connection, what, request, "me", now))


def request_of(service: Service, request: str) -> StoredRequest:
    """The request as it is."""
    return service.read(lambda connection: plan_requests.get(connection, request))


def plan_queue_of(service: Service, planner: Planner, name: str = "here") -> PlanQueue:
    """A plan_queue of that name."""
    return PlanQueue(service, planner, name=name, boottime=service.clock)


def turn_until(plan_queue: PlanQueue, holds: Callable[[], bool]) -> None:
    """Turn until it holds; fails after a while."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        plan_queue.run_once()
        time.sleep(0.02)
