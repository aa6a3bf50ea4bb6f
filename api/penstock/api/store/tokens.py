"""Tokens in the store: digests, never secrets."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, insert, select, update

from penstock.api.auth.identity import Identity, Role, digest, new_token
from penstock.api.store.schema import tokens
from penstock.core.errors import PenstockError


class NoSuchTokenError(PenstockError):
    """No token has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredToken:
    """Token without its secret."""

    id: str
    name: str
    digest: str
    role: Role
    namespace: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def valid(self, now: float) -> bool:
        """Whether the token is accepted."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    @property
    def identity(self) -> Identity:
        """Identity of the bearer."""
        return Identity(name=self.name, role=self.role, namespace=self.namespace)


def add(
    connection: Connection,
    identity: Identity,
    now: float,
    lifetime_seconds: float | None = None,
    secret: str | None = None,
) -> tuple[StoredToken, str]:
    """Store a new token; return it and its secret, which cannot be shown again. Without a given secret it is random."""
    secret = secret or new_token()
    row = {
        "id": str(uuid.uuid4()),
        "name": identity.name,
        "digest": digest(secret),
        "role": identity.role.value,
        "namespace": identity.namespace,
        "created_at": now,
        "expires_at": None if lifetime_seconds is None else now + lifetime_seconds,
    }
    connection.execute(insert(tokens).values(row))
    return _one(connection, tokens.c.id == row["id"]), secret


def by_secret(connection: Connection, secret: str) -> StoredToken | None:
    """Return the token with this secret, valid or not."""
    row = connection.execute(select(tokens).where(tokens.c.digest == digest(secret))).one_or_none()
    return None if row is None else _read(row)


def every(connection: Connection) -> list[StoredToken]:
    """Return all tokens, newest first."""
    return [_read(row) for row in connection.execute(select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id))]


def revoke(connection: Connection, token: str, now: float) -> StoredToken:
    """Revoke the token; raises `NoSuchTokenError`."""
    still = update(tokens).where(tokens.c.id == token, tokens.c.revoked_at.is_(None))
    connection.execute(still.values(revoked_at=now))
    return _one(connection, tokens.c.id == token)


def _one(connection: Connection, condition: ColumnElement[bool]) -> StoredToken:
    row = connection.execute(select(tokens).where(condition)).one_or_none()
    if row is None:
        raise NoSuchTokenError("there is no such token")
    return _read(row)


def _read(row: Row[Any]) -> StoredToken:
    values = dict(row._mapping)
    return StoredToken(**{**values, "role": Role(values["role"])})
