"""/login: exchange of a link's code for a session. Only the POST uses the code, not opening the page."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import Connection

from penstock.api.auth.identity import Caller
from penstock.api.http.auth_middleware import address_of
from penstock.api.http.credentials import COOKIE
from penstock.api.http.dependencies import ServiceIn, require_same_origin
from penstock.api.http.page_response import PageResponse
from penstock.api.pages.login import STALE, WELCOME, login_page
from penstock.api.store import sessions
from penstock.api.store.sessions import NoSuchLinkError, StoredSession

router = APIRouter(include_in_schema=False)


@router.get("/login", operation_id="showLogin")
def show() -> PageResponse:
    """Show the form, which a script fills with the code from the URL's fragment."""
    return PageResponse(login_page(WELCOME), None)


async def read_code(request: Request) -> str:
    """Return the form's only field; empty if the body is not a form."""
    try:
        return parse_qs((await request.body()).decode(), max_num_fields=4).get("code", [""])[0].strip()
    except ValueError:
        return ""


@router.post("/login", operation_id="login", dependencies=[Depends(require_same_origin)])
def sign_in(request: Request, service: ServiceIn, code: Annotated[str, Depends(read_code)]) -> Response:
    """Begin a session, and redirect to the first page.

    A form of another site is refused: it could sign a user in as somebody else.
    """
    now = service.clock()
    before: Caller | None = request.state.caller
    address = address_of(request.scope)

    def change(connection: Connection) -> tuple[StoredSession, str]:
        if before is not None and before.session is not None:
            sessions.end(connection, before.session, now)
        return sessions.begin(connection, code, address, now)

    try:
        session, secret = service.write("sessions", change)
    except NoSuchLinkError:
        return PageResponse(login_page(STALE), None, 403)
    request.state.caller = session.caller
    response = RedirectResponse("/", status_code=303)
    response.set_cookie(
        COOKIE,
        secret,
        max_age=int(session.expires_at - now),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response
