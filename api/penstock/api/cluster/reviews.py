"""Authentication by tokens of the cluster, with TokenReviews."""

from __future__ import annotations

import logging

from penstock.api.auth.identity import Caller, Role, digest
from penstock.api.auth.known_tokens import KnownTokens
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.pods import Pods
from penstock.api.cluster.users import RIGHT_SECONDS, Users
from penstock.kube.names import INGEST_AUDIENCE, PEOPLE_AUDIENCE

log = logging.getLogger(__name__)

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
