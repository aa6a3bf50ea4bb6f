"""Translation of internal errors into problem documents, in one table."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, DBAPIError
from starlette.exceptions import HTTPException

from penstock.api.http.page_response import PageResponse
from penstock.api.http.problems import MEDIA_TYPE, PROBLEMS, Problem
from penstock.api.pages.login import WELCOME, login_page
from penstock.api.pages.shell import Page
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
SOON = {"Retry-After": "2"}
RENAME = "choose another name, or delete that job"
REREAD = "read the job again, and repeat the change if it still applies"

DESCRIBED = "compare the request with its operation in /v1/openapi.json"
"""The default remedy."""
FULL_DISK = ("database or disk is full", "No space left on device")
TOO_LONG = "57014"
"""SQLSTATE of a statement that was canceled at its time limit."""


def _as(
    kind: str, detail: str, *, where: str = "", remedy: str, headers: Mapping[str, str] | None = None
) -> Callable[[Exception], Problem]:
    """Return the translation of an error into a problem of that kind; ``{}`` in ``detail`` is the error's text."""
    return lambda error: Problem(kind=kind, detail=detail.format(error), where=where, remedy=remedy, headers=headers)


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


def _cluster(error: KubeError) -> Problem:
    """Return the problem of a cluster's refusal, with the field that it names; other failures may be retried."""
    if error.status in (400, 422):
        where, what = error.causes[0] if error.causes else ("", error.message)
        return Problem(kind="invalid", detail=what, where=where, remedy=DESCRIBED)
    if error.is_missing:
        return Problem(kind="not-found", detail=error.message, remedy="list the jobs: GET /v1/jobs")
    if error.is_taken:
        return Problem(kind="name-taken", detail=error.message, where="metadata.name", remedy=RENAME)
    if error.status == 403:
        return Problem(
            kind="forbidden",
            detail=f"the cluster refuses: {error.message}",
            remedy="kubectl auth can-i --list shows your permissions; an administrator of the cluster can grant them",
        )
    if error.status == 409:
        return Problem(kind="conflict", detail=error.message, remedy=REREAD)
    log.warning("a request failed, because the cluster did not answer: %s", error)
    return Problem(kind="unavailable", detail="the cluster does not answer", remedy=RETRY, headers=SOON)


_full_disk = _as(
    "storage-full",
    "the disk of the service is full, and nothing can be stored",
    remedy="free some space where the service keeps its data",
)
_ending = _as("unavailable", "{}", remedy=RETRY, headers=SOON)


def _database(error: DBAPIError) -> Problem:
    reason = str(error.orig)
    if any(phrase in reason for phrase in FULL_DISK):
        return _full_disk(error)
    log.error("a request failed in the database: %s", reason)
    if getattr(error.orig, "sqlstate", None) == TOO_LONG:
        return Problem(
            kind="unavailable",
            detail="the database exceeded its time limit",
            remedy="repeat it when the load is lower, or request less at once",
            headers=SOON,
        )
    return Problem(kind="unavailable", detail="the database does not answer", remedy=RETRY, headers=SOON)


def _unstorable(error: DataError) -> Problem:
    """Return the problem of a path or query that no database can hold; bodies are checked before."""
    log.info("a request was refused, because the database cannot hold its text: %s", error.orig)
    return Problem(
        kind="bad-request",
        detail="the path or query has characters that no database can hold",
        remedy="remove NUL and lone surrogates",
    )


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
        return _full_disk(error)
    log.error("a request failed with an unexpected error; its client got status 500", exc_info=error)
    return Problem(
        kind="internal",
        detail=f"unexpected {type(error).__name__}",
        remedy="report the traceback in the service's log as a bug",
    )


TABLE: dict[type[Exception], Callable[[Any], Problem]] = {
    Problem: lambda problem: problem,
    NotAllowedError: _not_allowed,
    UserError: _user_error,
    OutdatedJobError: _outdated,
    NoSuchJobError: _as("not-found", "there is no job {}", remedy="list the jobs with GET /v1/jobs"),
    NoSuchTokenError: _as("not-found", "{}", remedy="list the tokens with GET /v1/tokens"),
    NoSuchRequestError: _as(
        "not-found", "there is no plan request {}", remedy="list the plan requests with GET /v1/plans"
    ),
    NoSuchProfileError: _as("not-found", "there is no profile {}", remedy="list the profiles with GET /v1/profiles"),
    NoSuchSessionError: _as("not-found", "{}", remedy="list the sessions with GET /v1/sessions"),
    NameTakenError: _as("name-taken", "a job {} exists", where="metadata.name", remedy=RENAME),
    ChangedMeanwhileError: _as("changed-meanwhile", "the job has {}", where="If-Match", remedy=REREAD),
    StaleAttemptError: _as(
        "stale-attempt",
        "the records are of {}",
        where="records",
        remedy="stop sending records of this attempt: it is closed",
    ),
    EarlyAttemptError: _as(
        "early-attempt",
        "the records are of {}",
        where="records",
        remedy="send them again after the number of seconds in Retry-After",
        headers=SOON,
    ),
    ForeignJobError: _as(
        "forbidden",
        "the records are of a job in namespace {}",
        where="Authorization",
        remedy="report with a token for that namespace, or with one for all namespaces",
    ),
    KubeError: _cluster,
    KeyReusedError: _as(
        "conflict",
        "the key was used before for another request",
        where="Idempotency-Key",
        remedy="use a new key for a new request",
    ),
    IllegalTransitionError: _as("conflict", "{}", remedy="read the job again: its phase has changed"),
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
            return PageResponse(page, None, problem.status_code)
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
