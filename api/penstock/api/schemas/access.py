"""Schemas of access: tokens, sessions and audit entries."""

from __future__ import annotations

from pydantic import Field

from penstock.api.auth.identity import Role
from penstock.api.schemas.wire import Instant, Wire


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
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None


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
    until: Instant | None = Field(description="Expiry of the session or token; null: none.")


class NewLoginLink(Wire):
    """A link that signs a browser in, once."""

    path: str = Field(description="Path below the service's URL.", examples=["/login#psl_..."])
    expires_at: Instant


class SessionView(Wire):
    """A browser that is signed in."""

    id: str
    name: str = Field(description="Name of the token.")
    role: Role
    namespace: str | None
    token: str = Field(description="Id of the token that created the session, which ends with it.")
    address: str = Field(description="Address of the client that began it.")
    created_at: Instant
    expires_at: Instant


class SessionPage(Wire):
    """Open sessions, newest first."""

    items: list[SessionView]


class AuditView(Wire):
    """A change, or the refusal of one."""

    number: int
    at: Instant
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
