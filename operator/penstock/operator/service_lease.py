"""Liveness of the service: it renews its Lease while it runs.

Renewals are dated by this process's clock, as in Kubernetes' own leader election: the service's clock may be off.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.kube.names import SERVICE_LEASE
from penstock.kube.resources import LEASES
from penstock.kube.transport import KubeError
from penstock.operator.kube import Kube

LAPSE_SECONDS = 30.0


class ServiceLease:
    """Reads the Lease in ``namespace``. Belongs to one thread at a time."""

    def __init__(self, kube: Kube, namespace: str, clock: Callable[[], float]) -> None:
        self._kube, self._namespace, self._clock = kube, namespace, clock
        self._renew_time, self._renewed_at = "", 0.0

    def is_held(self) -> bool:
        """Read the Lease; return whether it was renewed within `LAPSE_SECONDS`.

        While the cluster is unreachable, the last known renewal counts, and lapses.
        """
        try:
            lease = self._kube.get(LEASES, self._namespace, SERVICE_LEASE)
            renew_time = str((lease.get("spec") or {}).get("renewTime") or "")
        except KubeError as error:
            renew_time = "" if error.is_missing else self._renew_time
        if renew_time != self._renew_time:
            self._renew_time, self._renewed_at = renew_time, self._clock()
        return bool(self._renew_time) and self._clock() - self._renewed_at < LAPSE_SECONDS
