"""Background work of a service on a cluster: hold the Lease, and mirror and report while it is held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.lease import Lease
from penstock.api.cluster.mirror import Mirror
from penstock.api.cluster.reporter import Reporter
from penstock.kube.resources import JOBS
from penstock.kube.watching import Watched, Watcher

log = logging.getLogger(__name__)


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
            self._watcher = self._new_watcher()
            self._watcher.start()
        elif not self._lease.held:
            self._stop()

    def report(self) -> None:
        """Write reports to the cluster, once the mirror is synced."""
        watcher = self._watcher
        if self._lease.held and watcher is not None and watcher.synced.is_set():
            with _surviving("reporting to the jobs"):
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

    def _new_watcher(self) -> Watcher:
        mirror = self._mirror
        watched = Watched(resource=JOBS, replace=mirror.replace, put=mirror.put, remove=mirror.remove)
        return Watcher(self._kube, watched, self._namespace, self._clock)


@contextmanager
def _surviving(what: str) -> Iterator[None]:
    """Log errors instead of raising them: an error would end the thread unnoticed."""
    try:
        yield
    except Exception:
        log.exception("%s of the cluster failed unexpectedly; retrying at the next poll", what)
