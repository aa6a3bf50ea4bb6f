"""Who asks and who asked, as pydantic models."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from penstock.api.auth.identity import Role
from penstock.api.schemas import Wire, instant
from penstock.api.store.audit import NumberedEntry
from penstock.api.store.sessions import StoredSession


class MeView(Wire):
    """Who asks."""

    name: str
    role: Role
    namespace: str | None = Field(description="Where the role holds; everywhere if null.")
    session: str | None = Field(description="The browser's session; null for a token.")
    until: datetime | None = Field(description="When the session or token ends; null: never by itself.")


class NewLoginLink(Wire):
    """A link that signs a browser in, once."""

    path: str = Field(description="Below the service's URL.", examples=["/login#psl_..."])
    expires_at: datetime


class SessionView(Wire):
    """A browser that is signed in."""

    id: str
    name: str = Field(description="The token's.")
    role: Role
    namespace: str | None
    token: str = Field(description="The id of the token that made it; the session ends with it.")
    address: str = Field(description="Where it was begun from.")
    created_at: datetime
    expires_at: datetime


class SessionPage(Wire):
    """Open sessions, newest first."""

    items: list[SessionView]


class AuditView(Wire):
    """A change that somebody made, or was refused."""

    number: int
    at: datetime
    identity: str = Field(description="Empty where nobody was recognized.")
    action: str = Field(description="The operation's id.", examples=["createJob"])
    method: str
    path: str = Field(description="Of what was made, where the answer named it.")
    namespace: str
    status: int
    address: str


class AuditPage(Wire):
    """Entries, newest first."""

    items: list[AuditView]
    next: str | None = Field(description="Pass it as `cursor` for those that follow; null at the end.")


def session_view(stored: StoredSession) -> SessionView:
    """The session as it is listed."""
    return SessionView(
        id=stored.id,
        name=stored.name,
        role=stored.role,
        namespace=stored.namespace,
        token=stored.token,
        address=stored.address,
        created_at=instant(stored.created_at),
        expires_at=instant(stored.expires_at),
    )


def audit_view(entry: NumberedEntry) -> AuditView:
    """The entry over the wire."""
    return AuditView(
        number=entry.number,
        at=instant(entry.at),
        identity=entry.identity,
        action=entry.action,
        method=entry.method,
        path=entry.path,
        namespace=entry.namespace,
        status=entry.status,
        address=entry.address,
    )
