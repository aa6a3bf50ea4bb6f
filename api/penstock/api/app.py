"""ASGI application: routes, errors and middleware around one service."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import core
from penstock.api.http import errors
from penstock.api.http.auth_middleware import AuthMiddleware
from penstock.api.http.dependencies import by_name, by_uid
from penstock.api.http.documented import completed
from penstock.api.http.limits_middleware import LimitsMiddleware
from penstock.api.http.problems import refusals
from penstock.api.http.routes import (
    access,
    files,
    health,
    ingest,
    insight,
    jobs,
    login,
    pages,
    plans,
    reruns,
    streams,
)
from penstock.api.metrics.instruments import Observer
from penstock.api.service import Service

ROUTERS = (
    ingest.router,
    jobs.router,
    reruns.router,
    streams.router,
    files.router,
    plans.router,
    access.tokens_router,
    access.sessions_router,
    access.audit_router,
    health.router,
    pages.router,
    login.router,
)
"""Routers in the order in which a request is matched: those of frequent requests come first."""
OF_JOB = (jobs.of_job, streams.of_job, insight.of_job, files.of_job, reruns.of_job)
"""Routers with routes about one job, below its name and, until its retention ends, below its uid."""


class _Documented(FastAPI):
    """A FastAPI application with a fuller OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, made at its first request."""
        return self._completed

    @functools.cached_property
    def _completed(self) -> dict[str, Any]:
        return completed(super().openapi())


class FastPath:
    """Middleware that calls the endpoint of one ``route`` directly: the framework's overhead exceeds this route's own
    work.

    The route is declared, documented and tested like any other. Its endpoint takes only the request, and returns a
    response.
    """

    def __init__(self, app: ASGIApp, route: APIRoute) -> None:
        self._app, self._route = app, route
        self._methods = frozenset(route.methods or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        route = self._route
        if scope["type"] != "http" or scope["path"] != route.path or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
            return
        scope.update(route=route, path_params={})
        try:
            response = await route.endpoint(Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as error:
            response = errors.answer(errors.translated(error))
        await response(scope, receive, send)


def create_app(service: Service, seconds: Callable[[], float] = time.monotonic) -> FastAPI:
    """Return the service as an ASGI application. The caller closes the service, once the application has ended.

    ``seconds`` is a monotonic clock, by which rates are measured.
    """
    app = _Documented(
        title="penstock",
        version=core.__version__,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses=refusals(("internal",)),
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    for router in OF_JOB:
        _include_twice(app, router)
    errors.register(app)
    app.add_middleware(FastPath, route=ingest.ROUTE)
    app.add_middleware(AuthMiddleware, service=service, clock=seconds)
    app.add_middleware(LimitsMiddleware, settings=service.settings)
    app.add_middleware(Observer, requests=service.instruments.requests)  # the last added is the outermost
    return app


def _include_twice(app: FastAPI, router: APIRouter) -> None:
    app.include_router(
        router,
        prefix="/v1/jobs/{namespace}/{name}",
        dependencies=[Depends(by_name)],
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(
        router,
        prefix="/v1/history/{uid}",
        dependencies=[Depends(by_uid)],
        generate_unique_id_function=lambda route: f"{route.name}ByUid",
    )
