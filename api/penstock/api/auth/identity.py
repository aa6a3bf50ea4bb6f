"""Identities, roles, and the tokens that prove them."""

from __future__ import annotations

import enum
import hashlib
import secrets
from dataclasses import dataclass

PREFIX = "pst_"
TOKEN_BYTES = 32


class Role(enum.StrEnum):
    """What a token is good for; each of the first three may do what the one before may."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"
    INGEST = "ingest"


_RANKS = {Role.VIEWER: 1, Role.EDITOR: 2, Role.ADMIN: 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Somebody who was recognised; ``namespace`` is where the role holds, everywhere if none."""

    name: str
    role: Role
    namespace: str | None = None

    def may(self, role: Role, namespace: str | None = None) -> bool:
        """Whether what needs ``role`` is allowed in ``namespace``; in none, it must be allowed everywhere."""
        if Role.INGEST in (role, self.role):
            return role is self.role
        reaches = self.namespace is None or self.namespace == namespace
        return reaches and _RANKS[self.role] >= _RANKS[role]


def new_token() -> str:
    """A secret of 256 random bits; a prefix lets secret scanners find it."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def digest(token: str) -> str:
    """What the store keeps of a token: SHA-256 suffices for a secret that nobody can guess."""
    return hashlib.sha256(token.encode()).hexdigest()
