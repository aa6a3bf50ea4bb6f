"""Credentials of a request: a token in its Authorization header, else the cookie of a session."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection
from starlette.requests import HTTPConnection

from penstock.api.auth.identity import Caller
from penstock.api.store import sessions, tokens

COOKIE = "penstock_session"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """A secret, of a session or of a token."""

    secret: str
    session: bool


def read_credential(request: HTTPConnection) -> Credential | None:
    """Return the request's credential. A token has precedence over a cookie: a page sends one deliberately."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        return Credential(secret=secret.strip(), session=False) if scheme.lower() == "bearer" else None
    secret = request.cookies.get(COOKIE, "")
    return Credential(secret=secret, session=True) if secret else None


def recognize(connection: Connection, credential: Credential, now: float) -> Caller | None:
    """Return the bearer of the credential; none if it or its token is unknown, expired or revoked."""
    if credential.session:
        session = sessions.by_secret(connection, credential.secret)
        return session.caller if session is not None and session.valid(now) else None
    token = tokens.by_secret(connection, credential.secret)
    if token is None or not token.valid(now):
        return None
    return Caller(identity=token.identity, token=token.id, until=token.expires_at)
