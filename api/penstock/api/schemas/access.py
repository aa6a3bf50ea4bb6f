"""Schemas of access: tokens, sessions and audit entries."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from penstock.api.auth.identity import Role
from penstock.api.schemas.wire import Wire, instant, maybe
from penstock.api.store.audit import NumberedEntry
from penstock.api.store.sessions import StoredSession
from penstock.api.store.tokens import StoredToken


class TokenRequest(Wire):
    """Input for a new token."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.@]{0,61}[a-z0-9])?$", description="Name of the bearer.")
    role: Role
    namespace: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="Its only namespace; all if null.",
    )
    lifetime_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)


class TokenView(Wire):
    """A token, without its secret."""

    id: str
    name: str
    role: Role
    namespace: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewToken(TokenView):
    """A token and its secret, which is shown only once."""

    token: str


class TokenPage(Wire):
    """Every token, newest first."""

    items: list[TokenView]


class MeView(Wire):
    """The caller's identity."""

    name: str
    role: Role
    namespace: str | None = Field(description="Namespace of the role; null: all.")
    session: str | None = Field(description="The browser's session; null for a token.")
    until: datetime | None = Field(description="Expiry of the session or token; null: none.")


class NewLoginLink(Wire):
    """A link that signs a browser in, once."""

    path: str = Field(description="Path below the service's URL.", examples=["/login#psl_..."])
    expires_at: datetime


class SessionView(Wire):
    """A browser that is signed in."""

    id: str
    name: str = Field(description="Name of the token.")
    role: Role
    namespace: str | None
    token: str = Field(description="Id of the token that created the session, which ends with it.")
    address: str = Field(description="Address of the client that began it.")
    created_at: datetime
    expires_at: datetime


class SessionPage(Wire):
    """Open sessions, newest first."""

    items: list[SessionView]


class AuditView(Wire):
    """A change, or the refusal of one."""

    number: int
    at: datetime
    identity: str = Field(description="Name of the caller; empty without authentication.")
    action: str = Field(description="The operation's id.", examples=["createJob"])
    method: str
    path: str = Field(description="Path of the request, or of the created resource if the answer named it.")
    namespace: str
    status: int
    address: str


class AuditPage(Wire):
    """Entries, newest first."""

    items: list[AuditView]
    next: str | None = Field(description="Pass it as `cursor` for those that follow; null at the end.")


def token_view(stored: StoredToken) -> TokenView:
    """Return the view of a token."""
    return TokenView(
        id=stored.id,
        name=stored.name,
        role=stored.role,
        namespace=stored.namespace,
        created_at=instant(stored.created_at),
        expires_at=maybe(stored.expires_at),
        revoked_at=maybe(stored.revoked_at),
    )


def session_view(stored: StoredSession) -> SessionView:
    """Return the view of a session."""
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
    """Return the view of an audit entry."""
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
