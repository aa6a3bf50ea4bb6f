"""Leader election with the service's Lease: of several services, the holder of the Lease mirrors the cluster.

Clocks of other machines are not trusted. As in client-go's leader election, a Lease has expired if it has not changed
for its duration, measured by the local clock. A holder that cannot renew its Lease stops before another may take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from penstock.api.cluster.kube import Cluster
from penstock.kube.names import SERVICE_LEASE
from penstock.kube.resources import LEASES
from penstock.kube.transport import KubeError, Object, unless_missing

log = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
LEASE_SECONDS = 25
"""Duration of the Lease: longer than two renewals, and shorter than the operator's limit for one."""

GIVE_UP_SECONDS = 20.0
"""Seconds without a renewal after which a holder stops: shorter than `LEASE_SECONDS`, so that two never mirror."""

POLL_SECONDS = 5.0
"""Interval in which a service polls a Lease that it does not hold."""


class Lease:
    """The Lease in ``namespace``, for the service called ``name``.

    ``clock`` returns seconds since the epoch, ``seconds`` is a monotonic clock. ``begin`` is called after the Lease was
    taken and before it counts as held. Once ``valid`` returns false, the Lease counts as lost and is taken again.
    """

    def __init__(
        self,
        kube: Cluster,
        namespace: str,
        name: str,
        clock: Callable[[], float],
        seconds: Callable[[], float],
        *,
        begin: Callable[[], None] = lambda: None,
        valid: Callable[[], bool] = lambda: True,
    ) -> None:
        self._kube, self._namespace, self._name = kube, namespace, name
        self._begin, self._valid = begin, valid
        self._clock, self._seconds = clock, seconds
        self._renewed_at: float | None = None
        self._tried_at: float | None = None
        self._observed_version: tuple[str, float] = ("", 0.0)

    @property
    def held(self) -> bool:
        """Whether this service holds the Lease, and so mirrors the cluster."""
        if self._renewed_at is None or not self._valid():
            return False
        return self._seconds() - self._renewed_at < GIVE_UP_SECONDS

    def run_once(self) -> None:
        """Renew the Lease or try to take it, if the interval since the last try has passed."""
        now = self._seconds()
        pause = RENEW_SECONDS if self.held else POLL_SECONDS
        if self._tried_at is not None and now - self._tried_at < pause:
            return
        try:
            self._renewed_at = self._renew_or_take(now)
            self._tried_at = now
        except KubeError as error:
            log.warning(
                "Lease %s/%s could not be renewed or taken: %s; retrying in a second",
                self._namespace,
                SERVICE_LEASE,
                error,
            )
            self._tried_at = now - pause + 1.0

    def release(self) -> None:
        """Release the Lease, so that another service can take it at once."""
        if not self.held:
            return
        self._renewed_at = None
        try:
            lease = self._kube.get(LEASES, self._namespace, SERVICE_LEASE)
            if lease["spec"].get("holderIdentity") == self._name:
                self._kube.write_lease(self._written(lease, holder=""))
        except KubeError as error:
            log.warning(
                "Lease %s/%s could not be released, so another service takes it only once it has expired: %s",
                self._namespace,
                SERVICE_LEASE,
                error,
            )

    def _renew_or_take(self, now: float) -> float | None:
        """Renew or take the Lease. Return the time of the renewal; none if another service holds the Lease."""
        was_held = self.held
        lease = unless_missing(self._kube.get, LEASES, self._namespace, SERVICE_LEASE)
        if lease is not None and not self._is_free(lease, now):
            return None
        try:
            self._kube.write_lease(self._written(lease, holder=self._name))
        except KubeError as error:
            if error.status != 409:  # 409: another service was faster
                raise
            return None
        if not was_held:
            self._begin()
        return now

    def _is_free(self, lease: Object, now: float) -> bool:
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._observed_version[0]:
            self._observed_version = (version, now)
        spec = lease.get("spec") or {}
        duration = float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return spec.get("holderIdentity") in (None, "", self._name) or now - self._observed_version[1] >= duration

    def _written(self, before_lease: Object | None, holder: str) -> dict[str, Any]:
        """Return the new content of the Lease, based on its current one."""
        now = micro_time(self._clock())
        before = dict((before_lease or {}).get("spec") or {})
        is_taken = before.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": now if is_taken else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + int(is_taken and bool(holder)),
        }
        metadata = (
            dict(before_lease["metadata"]) if before_lease else {"name": SERVICE_LEASE, "namespace": self._namespace}
        )
        metadata.pop("managedFields", None)
        return {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}


def micro_time(seconds: float) -> str:
    """Format an instant as in Leases, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
