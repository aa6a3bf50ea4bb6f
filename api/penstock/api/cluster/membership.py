"""Service on a cluster: the interface for routes and authentication, and the background work under the Lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.api.cluster.fence import Fence, StoreAccess
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.lease import Lease
from penstock.api.cluster.mirror import Mirror
from penstock.api.cluster.reporter import Reporter
from penstock.api.cluster.reviews import Pods, Reviews, Rights, Users
from penstock.api.store import snapshots
from penstock.core.job_policy import JobPolicy
from penstock.kube.resources import JOBS
from penstock.kube.watching import Watched, Watcher

log = logging.getLogger(__name__)


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


class Following:
    """Follows the jobs in ``namespace``, or in all if it is empty, while this service holds the ``lease``."""

    def __init__(
        self,
        kube: Cluster,
        mirror: Mirror,
        reporter: Reporter,
        lease: Lease,
        namespace: str,
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._mirror, self._reporter, self._lease = kube, mirror, reporter, lease
        self._namespace, self._clock = namespace, clock
        self._watcher: Watcher | None = None

    def run_once(self) -> None:
        """Renew the Lease, and start or stop mirroring when it is taken or lost."""
        with _surviving("renewal of the Lease"):
            self._lease.run_once()
        if self._lease.held and self._watcher is None:
            mirror = self._mirror
            watched = Watched(resource=JOBS, replace=mirror.replace, put=mirror.put, remove=mirror.remove)
            self._watcher = Watcher(self._kube, watched, self._namespace, self._clock)
            self._watcher.start()
        elif not self._lease.held:
            self._stop()

    def report(self) -> None:
        """Write reports to the cluster, once the mirror is synced."""
        watcher = self._watcher
        if self._lease.held and watcher is not None and watcher.synced.is_set():
            self._reporter.run_once()

    def close(self) -> None:
        """Stop, and release the Lease, so that another service continues at once."""
        self._stop()
        self._reporter.close()
        self._lease.release()

    def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        self._watcher = None


@contextmanager
def _surviving(what: str) -> Iterator[None]:
    """Log errors instead of raising them: what follows has to run in any case."""
    try:
        yield
    except Exception:
        log.exception("%s of the cluster failed unexpectedly; retrying at the next poll", what)
