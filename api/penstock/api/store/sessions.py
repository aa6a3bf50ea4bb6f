"""Sessions of browsers, and the links that begin them, in the store: digests, never secrets.

A session has the permissions of its token, and is valid no longer than the token.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, insert, select, update

from penstock.api.auth.identity import Caller, Identity, Role, digest, new_token
from penstock.api.store.schema import login_links, sessions, tokens
from penstock.core.errors import PenstockError

LINK_PREFIX, SESSION_PREFIX = "psl_", "pss_"
LINK_SECONDS = 60.0
SESSION_SECONDS = 12 * 3600.0


class NoSuchLinkError(PenstockError):
    """The link was used, is too old, or never existed."""


class NoSuchSessionError(PenstockError):
    """No session has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSession:
    """Session with the permissions of its token; ``expires_at`` is never later than the token's."""

    id: str
    token: str
    name: str
    role: Role
    namespace: str | None
    address: str
    created_at: float
    expires_at: float
    revoked_at: float | None
    token_revoked_at: float | None

    @property
    def ended_at(self) -> float | None:
        """Time at which the session or its token was revoked, whichever was first."""
        return min((at for at in (self.revoked_at, self.token_revoked_at) if at is not None), default=None)

    def valid(self, now: float) -> bool:
        """Whether the session is accepted."""
        return self.ended_at is None and now < self.expires_at

    @property
    def caller(self) -> Caller:
        """Identity of requests in the session."""
        identity = Identity(name=self.name, role=self.role, namespace=self.namespace)
        return Caller(identity=identity, token=self.token, session=self.id, until=self.expires_at)


_TOKEN_COLUMNS = (tokens.c.name, tokens.c.role, tokens.c.namespace, tokens.c.revoked_at.label("token_revoked_at"))
_COLUMNS = [column for column in sessions.c if column.name != "digest"]
_JOINED: Select[Any] = select(*_COLUMNS, *_TOKEN_COLUMNS).join_from(sessions, tokens)


def add_link(connection: Connection, token: str, secret: str, now: float) -> float:
    """Store a link whose ``secret`` begins one session of this token; return its expiry. Expired links are deleted."""
    connection.execute(delete(login_links).where(login_links.c.expires_at <= now))
    until = now + LINK_SECONDS
    connection.execute(insert(login_links).values(digest=digest(secret), token=token, expires_at=until))
    return until


def begin(connection: Connection, link: str, address: str, now: float) -> tuple[StoredSession, str]:
    """Use a link; return the session that it begins, and the session's secret.

    Raises:
        NoSuchLinkError: the link or its token is unknown, used, revoked or expired.
    """
    used = delete(login_links).where(login_links.c.digest == digest(link), login_links.c.expires_at > now)
    token = connection.execute(used.returning(login_links.c.token)).scalar_one_or_none()
    holds = (tokens.c.id == token, tokens.c.revoked_at.is_(None))
    token_row = connection.execute(select(tokens.c.expires_at).where(*holds)).one_or_none()
    until = now + SESSION_SECONDS if token_row is None or token_row.expires_at is None else token_row.expires_at
    if token_row is None or until <= now:
        raise NoSuchLinkError("the link was used already, or is older than a minute")
    secret = new_token(SESSION_PREFIX)
    row = {"id": str(uuid.uuid4()), "digest": digest(secret), "token": token, "address": address}
    connection.execute(insert(sessions).values(**row, created_at=now, expires_at=min(until, now + SESSION_SECONDS)))
    return _one(connection, sessions.c.id == row["id"]), secret


def by_secret(connection: Connection, secret: str) -> StoredSession | None:
    """Return the session with this secret, valid or not."""
    row = connection.execute(_JOINED.where(sessions.c.digest == digest(secret))).one_or_none()
    return None if row is None else _read(row)


def open_sessions(connection: Connection, now: float, token: str | None = None) -> list[StoredSession]:
    """Return valid sessions, newest first, of one token or of all."""
    holds = [sessions.c.expires_at > now, sessions.c.revoked_at.is_(None), tokens.c.revoked_at.is_(None)]
    if token is not None:
        holds.append(sessions.c.token == token)
    return [_read(row) for row in connection.execute(_JOINED.where(*holds).order_by(sessions.c.created_at.desc()))]


def end(connection: Connection, session: str, now: float, token: str | None = None) -> StoredSession:
    """End the session; raises `NoSuchSessionError`, also for one of another token than ``token``, if that is given."""
    session_row = _one(connection, sessions.c.id == session, *([] if token is None else [sessions.c.token == token]))
    still = update(sessions).where(sessions.c.id == session, sessions.c.revoked_at.is_(None))
    connection.execute(still.values(revoked_at=now))
    return _one(connection, sessions.c.id == session_row.id)


def _one(connection: Connection, *conditions: ColumnElement[bool]) -> StoredSession:
    row = connection.execute(_JOINED.where(*conditions)).one_or_none()
    if row is None:
        raise NoSuchSessionError("there is no such session")
    return _read(row)


def _read(row: Row[Any]) -> StoredSession:
    values = dict(row._mapping)
    return StoredSession(**{**values, "role": Role(values["role"])})
