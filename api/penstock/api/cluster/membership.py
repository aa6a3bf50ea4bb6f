"""Wiring of a service on a cluster: the interface for routes and authentication, and the background work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.api.cluster.fence import Fence
from penstock.api.cluster.following import Following
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.lease import Lease
from penstock.api.cluster.mirror import Mirror
from penstock.api.cluster.pods import Pods
from penstock.api.cluster.reporter import Reporter
from penstock.api.cluster.reviews import Reviews
from penstock.api.cluster.store_access import StoreAccess
from penstock.api.cluster.users import Rights, Users
from penstock.api.store import snapshots
from penstock.core.job_policy import JobPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceInstance:
    """One instance of the service: its namespace, its name among replicas, and the jobs that it serves.

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
    instance: ServiceInstance
    fence: Fence


def join(store: StoreAccess, kube: Cluster, instance: ServiceInstance) -> Membership:
    """Join the cluster; raises `KubeError` if its identity cannot be read."""
    rights, fence = Rights(kube, store.clock), Fence(store)
    users = Users(rights, lambda: store.read(snapshots.namespaces))
    return Membership(
        kube=kube,
        mirror=Mirror(fence, kube, kube.identity(), instance.namespace, requests=store),
        reviews=Reviews(kube, Pods(kube), users),
        instance=instance,
        fence=fence,
    )


def following(store: StoreAccess, member: Membership) -> Following:
    """Return the mirror and the reporter, which a thread runs periodically."""
    kube, mirror, instance, fence = member.kube, member.mirror, member.instance, member.fence
    lease = Lease(
        kube,
        instance.own_namespace,
        instance.name,
        store.clock,
        time.monotonic,
        begin=fence.begin,
        valid=lambda: fence.valid,
    )
    return Following(kube, mirror, Reporter(fence, kube, mirror), lease, instance.namespace, store.clock)
