"""Authentication of pods: from a token's review along owner references to the only job that it may report for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from penstock.api.auth.identity import Caller, Identity, Reporting, Role
from penstock.api.cluster.kube import Cluster
from penstock.kube.names import ATTEMPT_LABEL, GROUP, JOB_KIND
from penstock.kube.resources import BATCH_JOBS, JOBSETS, PODS
from penstock.kube.transport import Object, find

POD_NAME, POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT = "system:serviceaccount:"
MOST_KNOWN = 10_000
ABOVE = (("Job", "batch", BATCH_JOBS), ("JobSet", "jobset.x-k8s.io", JOBSETS))
"""Owners of a rank's pod, up to its PipelineJob."""


class Pods:
    """Cache of pods by their uids. The owner of a pod never changes, so it is read once."""

    def __init__(self, kube: Cluster) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._known: dict[str, Identity] = {}

    def caller(self, user: Mapping[str, Any]) -> Caller | None:
        """Return the pod to which a token is bound, as a reporter for its own job; none if it is gone, or no rank's."""
        extra = user.get("extra") or {}
        name, uid = _only(extra.get(POD_NAME)), _only(extra.get(POD_UID))
        namespace = str(user.get("username", "")).removeprefix(SERVICE_ACCOUNT).partition(":")[0]
        if not (name and uid and str(user.get("username", "")).startswith(SERVICE_ACCOUNT)):
            return None
        identity = self._known.get(uid) or self._identified(namespace, name, uid)
        return None if identity is None else Caller(identity=identity, token=f"pod:{uid}"[:63])

    def _identified(self, namespace: str, name: str, uid: str) -> Identity | None:
        pod = find(self._kube, PODS, namespace, name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        job = self._job_of(pod, namespace)
        attempt = (pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, "")
        if job is None or not attempt.isdecimal():
            return None
        only = Reporting(name=job[0], uid=job[1], attempt=int(attempt))
        identity = Identity(name=f"pod {name}"[:63], role=Role.INGEST, namespace=namespace, only=only)
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[uid] = identity
        return identity

    def _job_of(self, pod: Object, namespace: str) -> tuple[str, str] | None:
        """Return name and uid of the PipelineJob, if the uid of every owner in between matches."""
        current: Object | None = pod
        for kind, group, resource in ABOVE:
            owner = _owner(current, kind, group)
            current = find(self._kube, resource, namespace, owner["name"]) if owner else None
            if owner is None or current is None or current["metadata"]["uid"] != owner["uid"]:
                return None
        job = _owner(current, JOB_KIND, GROUP)
        return None if job is None else (job["name"], job["uid"])


def _owner(item: Object, kind: str, group: str) -> Object | None:
    owners = item["metadata"].get("ownerReferences") or ()
    return next(
        (owner for owner in owners if owner["kind"] == kind and owner["apiVersion"].partition("/")[0] == group), None
    )


def _only(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""
