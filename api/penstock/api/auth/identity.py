"""Identities, roles, and the tokens that prove them."""

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
    """The one attempt of the one job for which an identity may report."""

    name: str
    uid: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """An authenticated caller; the role holds in ``namespace``, everywhere if none.

    One that reports for a single attempt has it in ``only``.
    """

    name: str
    role: Role
    namespace: str | None = None
    only: Reporting | None = None

    def may(self, role: Role, namespace: str | None = None, verb: str = "") -> bool:
        """Whether what needs ``role`` is allowed in ``namespace``; in none, it must be allowed everywhere.

        ``verb`` is the Kubernetes verb of the operation, for callers with rights by verbs.
        """
        reaches = self.namespace is None or self.namespace == namespace
        if Role.INGEST in (role, self.role):
            return reaches and role is self.role
        return reaches and _RANKS[self.role] >= _RANKS[role]

    def confined(self) -> Identity:
        """The same on a cluster, whose namespaces belong to different people: an editor without one only reads."""
        return replace(self, role=Role.VIEWER) if self.role is Role.EDITOR and self.namespace is None else self

    def may_anywhere(self, role: Role, verb: str = "") -> bool:
        """Whether there is a namespace in which it is allowed."""
        return self.may(role, self.namespace, verb)

    def namespaces(self, role: Role, verb: str = "") -> tuple[str, ...] | None:
        """Where it is allowed; none for everywhere, also where there is nothing yet."""
        return None if self.namespace is None else (self.namespace,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An identity as a request proved it: by a token, or by a session that this token made. It holds ``until`` then."""

    identity: Identity
    token: str
    session: str | None = None
    until: float | None = None

    @property
    def id(self) -> str:
        """Of the proof, which is one of its kind; names of identities are not."""
        return self.session or self.token


def new_token(prefix: str = PREFIX) -> str:
    """A secret of 256 random bits; a prefix lets secret scanners find it."""
    return prefix + secrets.token_urlsafe(TOKEN_BYTES)


def derived_token(secret: str, salt: str, prefix: str = PREFIX) -> str:
    """A token derived from the caller's own secret and a random salt: it cannot be computed without both."""
    made = hmac.digest(secret.encode(), salt.encode(), "sha256")
    return prefix + base64.urlsafe_b64encode(made).decode().rstrip("=")


def digest(token: str) -> str:
    """The stored form of a token: SHA-256 suffices for a random secret of this length."""
    return hashlib.sha256(token.encode()).hexdigest()
