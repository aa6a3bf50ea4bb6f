"""/v1/login-links, /v1/sessions, /v1/logout and /v1/me: sign-in and sign-out of browsers."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import Caller, Role
from penstock.api.cluster.reviews import ClusterUser
from penstock.api.http.credentials import COOKIE
from penstock.api.http.dependencies import CallerIn, CredentialIn, ServiceIn, Viewer
from penstock.api.http.documented import ONLY_BY_SESSION, ONLY_BY_TOKEN
from penstock.api.http.problems import Problem, answers
from penstock.api.http.replies import NewSecret, Once, reply, write_once, write_secret_once
from penstock.api.schemas.access import MeView, NewLoginLink, SessionPage, SessionView, session_view
from penstock.api.schemas.wire import instant, maybe
from penstock.api.store import sessions
from penstock.api.store.idempotency import Answer

router = APIRouter(tags=["sessions"])

READS = answers("unauthenticated", "forbidden")
WRITES = answers("unauthenticated", "forbidden", "not-found", "conflict", "too-large", "storage-full")
FORGET_COOKIE = f"{COOKIE}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict"


@router.get("/v1/me", responses=READS, operation_id="getMe")
def me(identity: Viewer, caller: CallerIn) -> MeView:
    """Return the caller's identity."""
    return MeView(
        name=identity.name,
        role=identity.role,
        namespace=identity.namespace,
        session=caller.session,
        until=maybe(caller.until),
    )


@router.post(
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
    now = service.clock()

    def change(connection: Connection, new: NewSecret) -> Answer:
        until = sessions.add_link(connection, caller.token, new.secret, now)
        # In the fragment, which a browser does not send: a query would be written to the logs of proxies, and a program
        # that previews links would use up the code.
        return reply(NewLoginLink(path=f"/login#{new.salted}", expires_at=instant(until)), 201)

    return write_secret_once(service, "sessions", keyed, credential, sessions.LINK_PREFIX, change)


@router.get("/v1/sessions", responses=READS, operation_id="listSessions")
def list_sessions(service: ServiceIn, identity: Viewer, caller: CallerIn) -> SessionPage:
    """List open sessions, newest first. Administrators see all, others those of their own token."""
    now = service.clock()
    open_sessions = service.read(lambda connection: sessions.open_sessions(connection, now, reach(caller)))
    return SessionPage(items=[session_view(session) for session in open_sessions])


@router.delete("/v1/sessions/{session}", responses=WRITES, operation_id="endSession")
def end_session(service: ServiceIn, identity: Viewer, caller: CallerIn, session: str) -> SessionView:
    """End a session: sign out its browser."""
    now, token = service.clock(), reach(caller)
    return session_view(service.write("sessions", lambda c: sessions.end(c, session, now, token)))


@router.post(
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
    now = service.clock()

    def change(connection: Connection) -> Answer:
        return reply(session_view(sessions.end(connection, session, now)), headers={"Set-Cookie": FORGET_COOKIE})

    return write_once(service, "sessions", keyed, change)


def reach(caller: Caller) -> str | None:
    """Return the token whose sessions the caller may list and end; none for all."""
    return None if caller.identity.may(Role.ADMIN) else caller.token
