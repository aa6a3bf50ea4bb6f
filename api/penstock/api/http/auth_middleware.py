"""Authentication, rate limits and the audit log, for every request.

Plain ASGI around the routes, so that it covers all of them, and paths without a route. A route gets the caller from
`penstock.api.http.dependencies`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.auth.identity import PREFIX, Caller, Role
from penstock.api.auth.origin import SAFE_METHODS
from penstock.api.auth.throttle import Rate, Throttle, site
from penstock.api.http.credentials import Credential, read_credential, recognize
from penstock.api.http.errors import translated
from penstock.api.http.problems import Problem
from penstock.api.service import Service
from penstock.api.store import audit
from penstock.api.store.audit import Entry
from penstock.api.store.writer import WriterClosedError
from penstock.kube.transport import KubeError

log = logging.getLogger(__name__)

REFUSED = frozenset({401, 403})
MOST_PATH_CHARACTERS = 512
INGEST = "ingest"


class AuthMiddleware:
    """Middleware; ``clock`` is monotonic."""

    def __init__(self, app: ASGIApp, service: Service, clock: Callable[[], float]) -> None:
        self._app, self._service = app, service
        self._throttle = Throttle(service.settings.limits.counted, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        credential = read_credential(HTTPConnection(scope))
        caller = await self._recognized(credential, address_of(scope))
        self._count(caller, address_of(scope))
        scope.setdefault("state", {}).update(credential=credential, caller=caller)
        answered = _Answered(send)
        await self._app(scope, receive, answered)
        if is_audited(scope, answered.status):
            self._write_down(entry(scope, answered, self._service.clock()))

    async def _recognized(self, credential: Credential | None, address: str) -> Caller | None:
        if credential is None:
            return None
        now, service = self._service.clock(), self._service

        def look_up() -> Caller | None:
            caller = service.read(lambda connection: recognize(connection, credential, now))
            if caller is None or service.cluster is None:
                return caller
            return replace(caller, identity=caller.identity.confined())

        try:
            if credential.session:
                return await run_in_threadpool(look_up)
            if service.cluster is not None and not credential.secret.startswith(PREFIX):
                if service.cluster.reviews.needs_review(credential.secret, now):
                    self._take(f"reviews {site(address)}", service.settings.limits.reviews)
                return await service.cluster.reviews.find(credential.secret, now)
            return await service.known_tokens.find(credential.secret, now, look_up)
        except (SQLAlchemyError, KubeError) as error:
            raise translated(error) from error

    def _count(self, caller: Caller | None, address: str) -> None:
        """Raise `Problem` beyond the rate limit.

        A request with a valid credential counts for its token, and any other for its address. So requests without one
        do not use up the limit of callers with a token at the same address.
        """
        limits = self._service.settings.limits
        rate = limits.ingest_requests if caller and caller.identity.role is Role.INGEST else limits.requests
        self._take(f"token {caller.token}" if caller else f"address {site(address)}", rate)

    def _take(self, key: str, rate: Rate) -> None:
        if seconds := self._throttle.take(key, rate):
            raise Problem(
                kind="too-many-requests",
                detail=f"more than {rate.per_second:g} requests a second, with bursts of {rate.burst}",
                remedy="wait for the seconds in Retry-After, and use live streams instead of polling",
                headers={"Retry-After": str(math.ceil(seconds))},
            )

    def _write_down(self, written: Entry) -> None:
        """Submit the audit entry without waiting: it must not delay the answer, and it is too late to refuse the
        request.
        """
        try:
            future = self._service.submit("audit", lambda connection: audit.add(connection, written))
        except WriterClosedError:
            log.error("audit entry is lost, because the service is shutting down: %s", written)
        else:
            future.add_done_callback(lambda done: _log_failure(done, written))


@dataclass(slots=True)
class _Answered:
    """Forwards messages, and stores the status and the location."""

    send: Send
    status: int = 0
    location: str | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status == 201:
                self.location = Headers(raw=message.get("headers", [])).get("location")
        await self.send(message)


def is_audited(scope: Scope, status: int) -> bool:
    """Whether a request belongs in the audit log: a change that was made, or refused for lack of permission.

    Ingested records are not logged: they are numbered and stored anyway.
    """
    route = scope.get("route")
    if scope["method"] in SAFE_METHODS or route is None:
        return False
    changed = route.operation_id != INGEST and not scope["state"].get("changed_nothing")
    return status in REFUSED or (200 <= status < 400 and changed)


def entry(scope: Scope, answered: _Answered, now: float) -> Entry:
    """Return the request's entry for the audit log, with the path of a created resource."""
    caller: Caller | None = scope["state"]["caller"]
    of_caller = caller.identity.namespace if caller else None
    return Entry(
        at=now,
        identity=caller.identity.name if caller else "",
        action=scope["route"].operation_id,
        method=scope["method"],
        path=(answered.location or scope["path"])[:MOST_PATH_CHARACTERS],
        namespace=scope["path_params"].get("namespace", of_caller or "")[:63],
        status=answered.status,
        address=address_of(scope),
    )


def address_of(scope: Scope) -> str:
    """Return the client's address; empty for a Unix socket."""
    client = scope.get("client")
    return str(client[0])[:63] if client else ""


def _log_failure(done: Future[None], written: Entry) -> None:
    if (error := done.exception()) is not None:
        log.error("audit entry is lost, because it could not be stored (%s): %s", error, written)
