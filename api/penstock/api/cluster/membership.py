"""Wiring of a service on a cluster: the interface for routes and authentication, and the background work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.api.cluster.fence import Fence
from penstock.api.cluster.following import Following
from penstock.api.cluster.keeper import Keeper
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.lease import Lease
from penstock.api.cluster.mirror import Mirror
from penstock.api.cluster.people import People, Rights
from penstock.api.cluster.pods import Pods
from penstock.api.cluster.reporter import Reporter
from penstock.api.cluster.reviews import Reviews
from penstock.api.store import snapshots
from penstock.core.job_policy import JobPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of the service in the cluster: its namespace, its name among replicas, and the jobs that it serves.

    ``namespace`` is the only one that it handles; all if empty. ``policy`` limits jobs.
    """

    own_namespace: str
    name: str
    namespace: str = ""
    policy: JobPolicy = field(default_factory=JobPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Interface of the cluster for routes and authentication."""

    kube: Cluster
    mirror: Mirror
    reviews: Reviews
    place: Place
    fence: Fence


def join(keeper: Keeper, kube: Cluster, place: Place) -> Membership:
    """Join the cluster; raises `KubeError` if its identity cannot be read."""
    rights, fence = Rights(kube, keeper.clock), Fence(keeper)
    people = People(rights, lambda: keeper.read(snapshots.namespaces))
    return Membership(
        kube=kube,
        mirror=Mirror(fence, kube, kube.identity(), place.namespace, requests=keeper),
        reviews=Reviews(kube, Pods(kube), people),
        place=place,
        fence=fence,
    )


def following(keeper: Keeper, member: Membership) -> Following:
    """Return the mirror and the reporter, which a thread runs periodically."""
    kube, mirror, place, fence = member.kube, member.mirror, member.place, member.fence
    lease = Lease(
        kube,
        place.own_namespace,
        place.name,
        keeper.clock,
        time.monotonic,
        begin=fence.begin,
        valid=lambda: fence.valid,
    )
    return Following(kube, mirror, Reporter(fence, kube, mirror), lease, place.namespace, keeper.clock)
