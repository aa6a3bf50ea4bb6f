"""Translation of internal errors into problem documents, in one table."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sqlalchemy.exc import DataError, DBAPIError
from starlette.exceptions import HTTPException

from penstock.api.http.problems import MEDIA_TYPE, PROBLEMS, Problem
from penstock.api.pages.login import WELCOME, login_page
from penstock.api.pages.shell import POLICY, Page
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.idempotency import KeyReusedError
from penstock.api.store.ingest import EarlyAttemptError, ForeignJobError, StaleAttemptError
from penstock.api.store.jobs import ChangedMeanwhileError, NameTakenError, NoSuchJobError, OutdatedJobError
from penstock.api.store.plan_requests import NoSuchRequestError
from penstock.api.store.profiles import NoSuchProfileError
from penstock.api.store.sessions import NoSuchSessionError
from penstock.api.store.tokens import NoSuchTokenError
from penstock.api.store.writer import WriterClosedError
from penstock.core.errors import UserError, mistakes_in
from penstock.core.job_policy import NotAllowedError
from penstock.core.lifecycle import IllegalTransitionError
from penstock.kube.transport import KubeError
from penstock.view.markup import element, join
from penstock.view.tables import card

log = logging.getLogger(__name__)

BY_STATUS = {kind.status: kind.name for kind in reversed(PROBLEMS.values())}
RETRY = "repeat the request after the number of seconds in Retry-After"
"""Remedy of a passing failure, whose answer has that header."""

DESCRIBED = "compare the request with its operation in /v1/openapi.json"
"""The default remedy."""
FULL_DISK = ("database or disk is full", "No space left on device")
TOO_LONG = "57014"
"""SQLSTATE of a statement that was canceled at its time limit."""


def _user_error(error: UserError) -> Problem:
    others = [f"{mistake.where}: {mistake.what}" for mistake in mistakes_in(error)[1:]]
    detail = "; ".join((error.what, *others))
    return Problem(kind="invalid", detail=detail, where=error.where, remedy=error.remedy or DESCRIBED)


def _outdated(error: OutdatedJobError) -> Problem:
    """Return the problem of a stored job that this version does not accept; the request itself is correct."""
    same = _user_error(error)
    detail = f"this version of penstock does not accept the job: {same.detail}"
    return Problem(kind="conflict", detail=detail, where=same.where, remedy=same.remedy)


def _not_allowed(error: NotAllowedError) -> Problem:
    return Problem(kind="not-allowed", detail=error.what, where=error.where, remedy=error.remedy)


def _no_such_job(error: NoSuchJobError) -> Problem:
    return Problem(kind="not-found", detail=f"there is no job {error}", remedy="list the jobs with GET /v1/jobs")


def _no_such_token(error: NoSuchTokenError) -> Problem:
    return Problem(kind="not-found", detail=str(error), remedy="list the tokens with GET /v1/tokens")


def _no_such_request(error: NoSuchRequestError) -> Problem:
    remedy = "list the plan requests with GET /v1/plans"
    return Problem(kind="not-found", detail=f"there is no plan request {error}", remedy=remedy)


def _no_such_profile(error: NoSuchProfileError) -> Problem:
    return Problem(
        kind="not-found", detail=f"there is no profile {error}", remedy="list the profiles with GET /v1/profiles"
    )


def _no_such_session(error: NoSuchSessionError) -> Problem:
    return Problem(kind="not-found", detail=str(error), remedy="list the sessions with GET /v1/sessions")


def _name_taken(error: NameTakenError) -> Problem:
    remedy = "choose another name, or delete that job"
    return Problem(kind="name-taken", detail=f"a job {error} exists", where="metadata.name", remedy=remedy)


def _changed(error: ChangedMeanwhileError) -> Problem:
    remedy = "read the job again, and repeat the change if it still applies"
    return Problem(kind="changed-meanwhile", detail=f"the job has {error}", where="If-Match", remedy=remedy)


def _early(error: EarlyAttemptError) -> Problem:
    detail = f"the records are of {error}"
    retry = {"Retry-After": "2"}
    return Problem(
        kind="early-attempt",
        detail=detail,
        where="records",
        remedy="send them again after the number of seconds in Retry-After",
        headers=retry,
    )


def _stale(error: StaleAttemptError) -> Problem:
    remedy = "stop sending records of this attempt: it is closed"
    return Problem(kind="stale-attempt", detail=f"the records are of {error}", where="records", remedy=remedy)


def _foreign(error: ForeignJobError) -> Problem:
    detail = f"the records are of a job in namespace {error}"
    remedy = "report with a token for that namespace, or with one for all namespaces"
    return Problem(kind="forbidden", detail=detail, where="Authorization", remedy=remedy)


def _cluster(error: KubeError) -> Problem:
    """Return the problem of a cluster's refusal, with the field that it names; other failures may be retried."""
    if error.status in (400, 422):
        where, what = error.causes[0] if error.causes else ("", error.message)
        return Problem(kind="invalid", detail=what, where=where, remedy=DESCRIBED)
    if error.is_missing:
        return Problem(kind="not-found", detail=error.message, remedy="list the jobs: GET /v1/jobs")
    if error.is_taken:
        remedy = "choose another name, or delete that job"
        return Problem(kind="name-taken", detail=error.message, where="metadata.name", remedy=remedy)
    if error.status == 403:
        remedy = "kubectl auth can-i --list shows your permissions; an administrator of the cluster can grant them"
        return Problem(kind="forbidden", detail=f"the cluster refuses: {error.message}", remedy=remedy)
    if error.status == 409:
        remedy = "read the job again, and repeat the change if it still applies"
        return Problem(kind="conflict", detail=error.message, remedy=remedy)
    log.warning("a request failed, because the cluster did not answer: %s", error)
    retry = {"Retry-After": "2"}
    return Problem(kind="unavailable", detail="the cluster does not answer", remedy=RETRY, headers=retry)


def _reused(error: KeyReusedError) -> Problem:
    remedy = "use a new key for a new request"
    detail = "the key was used before for another request"
    return Problem(kind="conflict", detail=detail, where="Idempotency-Key", remedy=remedy)


def _illegal(error: IllegalTransitionError) -> Problem:
    return Problem(kind="conflict", detail=str(error), remedy="read the job again: its phase has changed")


def _ending(error: WriterClosedError | LostLeaseError) -> Problem:
    return Problem(kind="unavailable", detail=str(error), remedy=RETRY, headers={"Retry-After": "2"})


def _database(error: DBAPIError) -> Problem:
    reason = str(error.orig)
    if any(phrase in reason for phrase in FULL_DISK):
        remedy = "free some space where the service keeps its data"
        return Problem(
            kind="storage-full", detail="the disk of the service is full, and nothing can be stored", remedy=remedy
        )
    log.error("a request failed in the database: %s", reason)
    retry = {"Retry-After": "2"}
    if getattr(error.orig, "sqlstate", None) == TOO_LONG:
        detail, remedy = (
            "the database exceeded its time limit",
            "repeat it when the load is lower, or request less at once",
        )
        return Problem(kind="unavailable", detail=detail, remedy=remedy, headers=retry)
    return Problem(kind="unavailable", detail="the database does not answer", remedy=RETRY, headers=retry)


def _unstorable(error: DataError) -> Problem:
    """Return the problem of a path or query that no database can hold; bodies are checked before."""
    log.info("a request was refused, because the database cannot hold its text: %s", error.orig)
    detail, remedy = "the path or query has characters that no database can hold", "remove NUL and lone surrogates"
    return Problem(kind="bad-request", detail=detail, remedy=remedy)


def _invalid_request(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
    kind = "invalid" if first["loc"][:1] == ("body",) else "bad-request"
    return Problem(kind=kind, detail=str(first["msg"]), where=place, remedy=DESCRIBED)


def _http(error: HTTPException) -> Problem:
    kind = BY_STATUS.get(error.status_code, "internal" if error.status_code >= 500 else "bad-request")
    headers = dict(error.headers or {})
    return Problem(kind=kind, detail=str(error.detail), remedy="/v1/openapi.json lists all paths", headers=headers)


def _unexpected(error: Exception) -> Problem:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        remedy = "free some space where the service keeps its data"
        return Problem(
            kind="storage-full", detail="the disk of the service is full, and nothing can be stored", remedy=remedy
        )
    log.error("a request failed with an unexpected error; its client got status 500", exc_info=error)
    detail = f"unexpected {type(error).__name__}"
    return Problem(kind="internal", detail=detail, remedy="report the traceback in the service's log as a bug")


TABLE: dict[type[Exception], Callable[[Any], Problem]] = {
    Problem: lambda problem: problem,
    NotAllowedError: _not_allowed,
    UserError: _user_error,
    OutdatedJobError: _outdated,
    NoSuchJobError: _no_such_job,
    NoSuchTokenError: _no_such_token,
    NoSuchRequestError: _no_such_request,
    NoSuchProfileError: _no_such_profile,
    NoSuchSessionError: _no_such_session,
    NameTakenError: _name_taken,
    ChangedMeanwhileError: _changed,
    StaleAttemptError: _stale,
    EarlyAttemptError: _early,
    ForeignJobError: _foreign,
    KubeError: _cluster,
    KeyReusedError: _reused,
    IllegalTransitionError: _illegal,
    WriterClosedError: _ending,
    LostLeaseError: _ending,
    DataError: _unstorable,
    DBAPIError: _database,
    RequestValidationError: _invalid_request,
    HTTPException: _http,
    Exception: _unexpected,
}


def translated(error: Exception) -> Problem:
    """Return the problem document of an error, for the middleware around the routes."""
    return next(TABLE[kind](error) for kind in type(error).__mro__ if kind in TABLE)


def register(app: FastAPI) -> None:
    """Register the table's translations as handlers of the application."""
    for kind, translate in TABLE.items():
        app.add_exception_handler(kind, _handler(translate))


def _handler(translate: Callable[[Any], Problem]) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        problem = translate(error)
        if not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", ""):
            page = login_page(WELCOME) if problem.kind == "unauthenticated" else problem_page(problem)
            headers = {"Content-Security-Policy": POLICY}
            return HTMLResponse(page.document(None), status_code=problem.status_code, headers=headers)
        if problem.kind == "method-not-allowed":
            problem.headers = {"Allow": ", ".join(allowed(request.app, request.url.path))}
        return answer(problem)

    return handle


def allowed(app: FastAPI, path: str) -> list[str]:
    """Return all methods of a path; a route knows only its own."""
    methods: set[str] = set()
    for template, operations in app.openapi()["paths"].items():
        anywhere = template.replace("{path}", ".+")  # the one parameter that may hold slashes
        if re.fullmatch(re.sub(r"\{[a-z]+\}", "[^/]+", anywhere), path):
            methods |= {method.upper() for method in operations}
    return sorted(methods)


def answer(problem: Problem) -> JSONResponse:
    """Return the problem as a response."""
    document = problem.document().model_dump()
    headers = dict(problem.headers or {})
    return JSONResponse(document, status_code=problem.status_code, media_type=MEDIA_TYPE, headers=headers)


def problem_page(problem: Problem) -> Page:
    """Return the problem document as a page, for browsers."""
    title = PROBLEMS[problem.kind].title
    failure = card(element("strong", problem.detail), element("p", problem.remedy), class_="failure")
    head = element("div", element("h1", title), class_="head")
    back = element("p", element("a", "All jobs", href="/"))
    return Page(title=title, body=join((head, failure, back)))
