"""Access: tokens for administrators, sign-in and sign-out of browsers, and the log of changes and their authors."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import PREFIX, Caller, Identity, Role
from penstock.api.cluster.reviews import ClusterUser
from penstock.api.http.credentials import COOKIE
from penstock.api.http.dependencies import Admin, CallerIn, CredentialIn, ServiceIn, Viewer
from penstock.api.http.documented import ONLY_BY_SESSION, ONLY_BY_TOKEN
from penstock.api.http.problems import Problem, answers
from penstock.api.http.replies import NewSecret, Once, reply, write_once, write_secret_once
from penstock.api.schemas.access import (
    AuditPage,
    AuditView,
    MeView,
    NewLoginLink,
    NewToken,
    SessionPage,
    SessionView,
    TokenPage,
    TokenRequest,
    TokenView,
)
from penstock.api.schemas.wire import instant, maybe
from penstock.api.store import audit, sessions, tokens
from penstock.api.store.idempotency import Answer
from penstock.core.errors import UserError

tokens_router = APIRouter(tags=["tokens"])
sessions_router = APIRouter(tags=["sessions"])
audit_router = APIRouter(tags=["audit"])

READS = answers("unauthenticated", "forbidden")
TOKEN_WRITES = answers("unauthenticated", "forbidden", "not-found", "conflict", "too-large", "invalid", "storage-full")
WRITES = answers("unauthenticated", "forbidden", "not-found", "conflict", "too-large", "storage-full")
FORGET_COOKIE = f"{COOKIE}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict"


@tokens_router.post(
    "/v1/tokens", status_code=201, response_model=NewToken, responses=TOKEN_WRITES, operation_id="createToken"
)
def create_token(
    service: ServiceIn, identity: Admin, credential: CredentialIn, wanted: TokenRequest, keyed: Once
) -> Response:
    """Create a token. Only this answer contains its secret. On a cluster the token of an editor needs a namespace."""
    if service.cluster is not None and wanted.role is Role.EDITOR and wanted.namespace is None:
        raise UserError(
            what="is missing: an editor changes jobs of one namespace",
            where="namespace",
            remedy="name the namespace whose jobs it may change, and create one token for each namespace",
        )
    bearer = Identity(name=wanted.name, role=wanted.role, namespace=wanted.namespace)

    def change(connection: Connection, new: NewSecret, now: float) -> Answer:
        made, _ = tokens.add(connection, bearer, now, wanted.lifetime_seconds, new.secret)
        return reply(NewToken(**TokenView.model_validate(made).model_dump(by_alias=False), token=new.salted), 201)

    return write_secret_once(service, "tokens", keyed, credential, PREFIX, change)


@tokens_router.get("/v1/tokens", responses=READS, operation_id="listTokens")
def list_tokens(service: ServiceIn, identity: Admin) -> TokenPage:
    """List every token, newest first, without its secret."""
    return TokenPage(items=[TokenView.model_validate(token) for token in service.read(tokens.every)])


@tokens_router.delete("/v1/tokens/{token}", responses=TOKEN_WRITES, operation_id="revokeToken")
def revoke_token(service: ServiceIn, identity: Admin, token: str) -> TokenView:
    """Revoke a token permanently."""
    now = service.clock()
    revoked = service.write("tokens", lambda connection: tokens.revoke(connection, token, now))
    service.known_tokens.forget()
    return TokenView.model_validate(revoked)


@sessions_router.get("/v1/me", responses=READS, operation_id="getMe")
def me(identity: Viewer, caller: CallerIn) -> MeView:
    """Return the caller's identity."""
    return MeView(
        name=identity.name,
        role=identity.role,
        namespace=identity.namespace,
        session=caller.session,
        until=maybe(caller.until),
    )


@sessions_router.post(
    "/v1/login-links",
    status_code=201,
    response_model=NewLoginLink,
    responses=WRITES,
    operation_id="createLoginLink",
    openapi_extra=ONLY_BY_TOKEN,
)
def create_link(
    service: ServiceIn, identity: Viewer, caller: CallerIn, credential: CredentialIn, keyed: Once
) -> Response:
    """Create a link that signs a browser in as the bearer of this token: once, within a minute, for twelve hours.

    It needs the token itself: a session that could create links would never end.
    """
    if caller.session is not None:
        raise Problem(
            kind="forbidden",
            detail="a session cannot create login links",
            where="Authorization",
            remedy="send the token: Authorization: Bearer TOKEN",
        )
    if isinstance(identity, ClusterUser):
        raise Problem(
            kind="forbidden",
            detail="a token of the cluster cannot create login links",
            where="Authorization",
            remedy="use a token of the service: penstock token create",
        )

    def change(connection: Connection, new: NewSecret, now: float) -> Answer:
        until = sessions.add_link(connection, caller.token, new.secret, now)
        # In the fragment, which a browser does not send: a query would be written to the logs of proxies, and a program
        # that previews links would use up the code.
        return reply(NewLoginLink(path=f"/login#{new.salted}", expires_at=instant(until)), 201)

    return write_secret_once(service, "sessions", keyed, credential, sessions.LINK_PREFIX, change)


@sessions_router.get("/v1/sessions", responses=READS, operation_id="listSessions")
def list_sessions(service: ServiceIn, identity: Viewer, caller: CallerIn) -> SessionPage:
    """List open sessions, newest first. Administrators see all, others those of their own token."""
    now = service.clock()
    open_sessions = service.read(lambda connection: sessions.open_sessions(connection, now, reach(caller)))
    return SessionPage(items=[SessionView.model_validate(session) for session in open_sessions])


@sessions_router.delete("/v1/sessions/{session}", responses=WRITES, operation_id="endSession")
def end_session(service: ServiceIn, identity: Viewer, caller: CallerIn, session: str) -> SessionView:
    """End a session: sign out its browser."""
    now, token = service.clock(), reach(caller)
    return SessionView.model_validate(service.write("sessions", lambda c: sessions.end(c, session, now, token)))


@sessions_router.post(
    "/v1/logout",
    response_model=SessionView,
    responses=WRITES,
    operation_id="logout",
    openapi_extra=ONLY_BY_SESSION,
)
def logout(service: ServiceIn, identity: Viewer, caller: CallerIn, keyed: Once) -> Response:
    """Sign out the browser that sends this."""
    session = caller.session
    if session is None:
        raise Problem(
            kind="conflict",
            detail="the request belongs to no session",
            where="Cookie",
            remedy="revoke the token instead, or end a session: DELETE /v1/sessions/{session}",
        )

    def change(connection: Connection, now: float) -> Answer:
        return reply(
            SessionView.model_validate(sessions.end(connection, session, now)), headers={"Set-Cookie": FORGET_COOKIE}
        )

    return write_once(service, "sessions", keyed, change)


def reach(caller: Caller) -> str | None:
    """Return the token whose sessions the caller may list and end; none for all."""
    return None if caller.identity.may(Role.ADMIN) else caller.token


@audit_router.get("/v1/audit", responses=READS, operation_id="listAudit")
def list_audit(
    service: ServiceIn,
    identity: Admin,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description="The `next` of the page before.")] = None,
) -> AuditPage:
    """Every change by REST of the last 90 days, and every one that was refused for lack of permission, newest first.

    Records that ranks reported are left out: they are numbered and stored anyway.
    """
    before = None if cursor is None else int(cursor)
    entries, following = service.read(lambda connection: audit.page(connection, limit, before))
    return AuditPage(
        items=[AuditView.model_validate(entry) for entry in entries], next=None if following is None else str(following)
    )
