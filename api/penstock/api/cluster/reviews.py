"""Authentication by tokens of the cluster, with TokenReviews.

A pod is followed from its token along owner references to the only job that it may report for. The permissions of a
user on PipelineJobs also hold for the jobs in the service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.auth.identity import Caller, Identity, Reporting, Role, digest
from penstock.api.auth.known_tokens import KnownTokens
from penstock.api.cluster.kube import Cluster
from penstock.kube.names import ATTEMPT_LABEL, GROUP, INGEST_AUDIENCE, JOB_KIND, PEOPLE_AUDIENCE
from penstock.kube.resources import BATCH_JOBS, JOBSETS, PODS
from penstock.kube.transport import Object, unless_missing

POD_SECONDS = 60.0
"""Time for which a deleted pod may still report."""

MOST_TOKEN_CHARACTERS = 16_384
MOST_KNOWN = 8192


class Reviews:
    """Authenticates pods and users. A token for another audience is refused."""

    def __init__(self, kube: Cluster, pods: Pods, users: Users) -> None:
        self._kube, self._pods, self._users = kube, pods, users
        self._known = KnownTokens(_known_seconds, MOST_KNOWN)

    def needs_review(self, secret: str, now: float) -> bool:
        """Whether the token needs a review by the cluster."""
        return is_candidate(secret) and not self._known.knows(secret, now)

    async def find(self, secret: str, now: float) -> Caller | None:
        """Return the bearer of the token; raises `KubeError` if the review fails."""
        if not is_candidate(secret):
            return None
        return await self._known.find(secret, now, lambda: self.recognize(secret))

    def recognize(self, secret: str) -> Caller | None:
        """Return the bearer of the token, without the cache."""
        status = self._kube.review_token(secret, [INGEST_AUDIENCE, PEOPLE_AUDIENCE])
        if not status.get("authenticated"):
            return None
        audiences, user = status.get("audiences") or (), status.get("user") or {}
        if INGEST_AUDIENCE in audiences:
            return self._pods.caller(user)
        return self._users.caller(user, digest(secret)) if PEOPLE_AUDIENCE in audiences else None


def is_candidate(secret: str) -> bool:
    """Whether it may be a token of the cluster: a JWT (RFC 7519) of a plausible length."""
    return secret.count(".") == 2 and len(secret) <= MOST_TOKEN_CHARACTERS and all(secret.split("."))


def _known_seconds(caller: Caller) -> float:
    return POD_SECONDS if caller.identity.role is Role.INGEST else RIGHT_SECONDS


POD_NAME, POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT = "system:serviceaccount:"
MOST_PODS = 10_000
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
        pod = unless_missing(self._kube.get, PODS, namespace, name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        job = self._job_of(pod, namespace)
        attempt = (pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, "")
        if job is None or not attempt.isdecimal():
            return None
        only = Reporting(name=job[0], uid=job[1], attempt=int(attempt))
        identity = Identity(name=f"pod {name}"[:63], role=Role.INGEST, namespace=namespace, only=only)
        with self._lock:
            if len(self._known) >= MOST_PODS:
                del self._known[next(iter(self._known))]
            self._known[uid] = identity
        return identity

    def _job_of(self, pod: Object, namespace: str) -> tuple[str, str] | None:
        """Return name and uid of the PipelineJob, if the uid of every owner in between matches."""
        current = pod
        for kind, group, resource in ABOVE:
            owner = _owner(current, kind, group)
            owning = unless_missing(self._kube.get, resource, namespace, owner["name"]) if owner else None
            if owner is None or owning is None or owning["metadata"]["uid"] != owner["uid"]:
                return None
            current = owning
        job = _owner(current, JOB_KIND, GROUP)
        return None if job is None else (job["name"], job["uid"])


def _owner(item: Object, kind: str, group: str) -> Object | None:
    owners = item["metadata"].get("ownerReferences") or ()
    return next(
        (owner for owner in owners if owner["kind"] == kind and owner["apiVersion"].partition("/")[0] == group), None
    )


def _only(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""


RIGHT_SECONDS = 15.0
"""Seconds for which a revoked right may still be used."""

MOST_RIGHTS = 10_000
MOST_NAMESPACES = 200

VERBS: Mapping[Role, tuple[str, ...]] = {
    Role.VIEWER: ("get", "list"),
    Role.EDITOR: ("create", "update", "delete"),
    Role.ADMIN: ("*",),
}
"""Verbs that a user needs for a role, unless the operation has a verb of its own."""


class Rights:
    """Cache of access reviews, each for `RIGHT_SECONDS`. Threads may share it."""

    def __init__(self, kube: Cluster, clock: Callable[[], float]) -> None:
        self._kube, self._clock = kube, clock
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, str], tuple[float, bool]] = {}

    def may(self, key: str, user: Mapping[str, Any], verb: str, namespace: str) -> bool:
        """Whether the user may use the verb in the namespace, or in all namespaces if it is empty.

        ``key`` identifies the user in the cache.
        """
        access, now = (key, verb, namespace), self._clock()
        at, allowed = self._known.get(access, (0.0, False))
        if at and 0 <= now - at < RIGHT_SECONDS:
            return allowed
        allowed = self._kube.review_access(user, verb, namespace)
        with self._lock:
            self._known.pop(access, None)
            if len(self._known) >= MOST_RIGHTS:
                del self._known[next(iter(self._known))]
            self._known[access] = (now, allowed)
        return allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterUser(Identity):
    """A user of the cluster, with ``rights`` instead of a ``role``. ``known`` gives the namespaces that have jobs."""

    key: str
    user: Mapping[str, Any] = field(hash=False)
    rights: Rights = field(hash=False)
    known: Callable[[], Sequence[str]] = field(hash=False)

    def may(self, role: Role, namespace: str | None = None, verb: str = "") -> bool:
        """Like `Identity.may`, but may block, because it asks the cluster for permissions that are not cached."""
        if role is Role.INGEST:
            return False
        verbs = (verb,) if verb and role is not Role.ADMIN else VERBS[role]
        return all(self._may(needed, namespace or "") for needed in verbs)

    def may_anywhere(self, role: Role, verb: str = "") -> bool:
        """Whether the user has the role in all namespaces, or in one that has jobs.

        Always true for creation, which may be the first in its namespace.
        """
        if role is Role.INGEST:
            return False
        if verb == "create":
            return True  # the namespace is in the request's body, and the handler that parses it checks the right
        return self.may(role, None, verb) or bool(self._places(role, verb))

    def namespaces(self, role: Role, verb: str = "") -> tuple[str, ...] | None:
        return None if self.may(role, None, verb) else self._places(role, verb)

    def _places(self, role: Role, verb: str) -> tuple[str, ...]:
        return tuple(namespace for namespace in self.known()[:MOST_NAMESPACES] if self.may(role, namespace, verb))

    def _may(self, verb: str, namespace: str) -> bool:
        everywhere = bool(namespace) and self.rights.may(self.key, self.user, verb, "")
        return everywhere or self.rights.may(self.key, self.user, verb, namespace)


class Users:
    """Converts the users of TokenReviews to callers."""

    def __init__(self, rights: Rights, known: Callable[[], Sequence[str]]) -> None:
        self._rights, self._known = rights, known

    def caller(self, user: Mapping[str, Any], key: str) -> Caller | None:
        """Return the user of a TokenReview as a caller; ``key`` identifies the token."""
        name = str(user.get("username", ""))
        if not name:
            return None
        user_spec = {"user": name, "groups": user.get("groups") or [], "uid": user.get("uid", "")}
        user_spec["extra"] = user.get("extra") or {}
        identity = ClusterUser(
            name=name[:63], role=Role.VIEWER, key=key, user=user_spec, rights=self._rights, known=self._known
        )
        return Caller(identity=identity, token=f"kube:{key}"[:63])
