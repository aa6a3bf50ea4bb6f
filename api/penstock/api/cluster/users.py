"""Users of the Kubernetes cluster: their permissions on PipelineJobs also hold for the jobs in the service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.auth.identity import Caller, Identity, Role
from penstock.api.cluster.kube import Cluster

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
