"""Liveness, readiness and version of the service, without a token, and its metrics for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from sqlalchemy import select

from penstock import core
from penstock.api.auth.identity import Identity, Role
from penstock.api.http.dependencies import ServiceIn, require
from penstock.api.http.documented import OPEN_TO_ALL
from penstock.api.http.problems import answers
from penstock.api.schemas.wire import Health, VersionView
from penstock.api.store.migrate import current

router = APIRouter(tags=["health"])

OPEN = frozenset({"/healthz", "/readyz", "/version"})
"""Routes without a token."""

ANSWERS = answers()
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Everywhere = Annotated[Identity, Depends(require(Role.VIEWER, everywhere=True))]


@router.get("/healthz", responses=ANSWERS, operation_id="healthz", openapi_extra=OPEN_TO_ALL)
def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", responses=ANSWERS, operation_id="readyz", openapi_extra=OPEN_TO_ALL)
def readyz(service: ServiceIn) -> Health:
    """The database answers too."""
    service.read(lambda connection: connection.execute(select(1)).one())
    return Health(status="ok")


@router.get("/version", responses=ANSWERS, operation_id="version", openapi_extra=OPEN_TO_ALL)
def show_version(service: ServiceIn) -> VersionView:
    """Versions of penstock, of this API, and of the database's schema."""
    return VersionView(version=core.__version__, api="v1", schema_revision=current(service.engine) or "")


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=answers("unauthenticated", "forbidden"),
    operation_id="scrapeMetrics",
)
def metrics(service: ServiceIn, identity: Everywhere) -> PlainTextResponse:
    """Return metrics of the service and of its unfinished jobs, in Prometheus' text format.

    They cover all namespaces, so the token must be valid in all.
    """
    return PlainTextResponse(generate_latest(service.instruments.registry), media_type=MEDIA_TYPE)
