"""The application: routes, errors and guard around one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from penstock.api import errors
from penstock.api.guard import Guard
from penstock.api.problems import ProblemDocument
from penstock.api.routes import health, ingest, jobs, tokens
from penstock.api.service import Service

ROUTERS = (jobs.router, tokens.router, ingest.router, health.router)


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI application; it is closed when the application ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="penstock",
        version=version("penstock"),
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={500: {"model": ProblemDocument, "description": "The service failed"}},
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    errors.register(app)
    app.add_middleware(Guard, settings=service.settings)
    return app
