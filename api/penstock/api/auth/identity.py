"""Identities, roles, and tokens."""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import secrets
from dataclasses import dataclass, replace

PREFIX = "pst_"
TOKEN_BYTES = 32


class Role(enum.StrEnum):
    """The permissions of a token; each of the first three includes the one before."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"
    INGEST = "ingest"


_RANKS = {Role.VIEWER: 1, Role.EDITOR: 2, Role.ADMIN: 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporting:
    """The only job and attempt for which an identity may report."""

    name: str
    uid: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """An authenticated caller. The role holds in ``namespace``, everywhere if none.

    ``only`` limits an identity to reports of a single attempt.
    """

    name: str
    role: Role
    namespace: str | None = None
    only: Reporting | None = None

    def may(self, role: Role, namespace: str | None = None, verb: str = "") -> bool:
        """Whether an operation that needs ``role`` is allowed in ``namespace``; without one, it must be allowed
        everywhere.

        ``verb`` is the Kubernetes verb of the operation, for callers with permissions by verbs.
        """
        reaches = self.namespace is None or self.namespace == namespace
        if Role.INGEST in (role, self.role):
            return reaches and role is self.role
        return reaches and _RANKS[self.role] >= _RANKS[role]

    def confined(self) -> Identity:
        """Return the identity as it holds on a cluster, where namespaces belong to different users: an editor without
        a namespace may only read.
        """
        return replace(self, role=Role.VIEWER) if self.role is Role.EDITOR and self.namespace is None else self

    def may_anywhere(self, role: Role, verb: str = "") -> bool:
        """Whether the operation is allowed in some namespace."""
        return self.may(role, self.namespace, verb)

    def namespaces(self, role: Role, verb: str = "") -> tuple[str, ...] | None:
        """The identity's namespaces; none for all, including those without jobs. Callers check the role."""
        return None if self.namespace is None else (self.namespace,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An identity, proved by a ``token``, or by a ``session`` that this token began, and valid ``until`` a time."""

    identity: Identity
    token: str
    session: str | None = None
    until: float | None = None

    @property
    def id(self) -> str:
        """Unique id of the token or session; names of identities are not unique."""
        return self.session or self.token


def new_token(prefix: str = PREFIX) -> str:
    """Return a secret of 256 random bits, with a prefix for secret scanners."""
    return prefix + secrets.token_urlsafe(TOKEN_BYTES)


def derived_token(secret: str, salt: str, prefix: str = PREFIX) -> str:
    """Derive a token from the caller's own secret and a random salt: it cannot be computed without both."""
    made = hmac.digest(secret.encode(), salt.encode(), "sha256")
    return prefix + base64.urlsafe_b64encode(made).decode().rstrip("=")


def digest(token: str) -> str:
    """Return the stored form of a token: SHA-256 suffices for a random secret of this length."""
    return hashlib.sha256(token.encode()).hexdigest()
