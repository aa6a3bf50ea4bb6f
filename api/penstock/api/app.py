"""The application: routes, errors and guard around one service."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from penstock.api import errors
from penstock.api.guard import Guard
from penstock.api.problems import PROBLEMS, ProblemDocument
from penstock.api.routes import again, files, health, ingest, insight, jobs, pages, plans, profiles, streams, tokens
from penstock.api.service import Service

ROUTERS = (
    ingest.router,
    jobs.router,
    again.router,
    streams.router,
    insight.router,
    files.router,
    plans.router,
    profiles.router,
    tokens.router,
    health.router,
    pages.router,
)
"""What is asked most comes first: a request is matched against one route after the other."""


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI application. Who opened the service closes it, once the application has ended."""
    app = FastAPI(
        title="penstock",
        version=version("penstock"),
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses={500: {"model": ProblemDocument, "description": PROBLEMS["internal"].title}},
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    errors.register(app)
    app.add_middleware(Guard, settings=service.settings)
    return app
