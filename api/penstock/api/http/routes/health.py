"""Liveness, readiness and version of the service, without a token."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy import select

from penstock import core
from penstock.api.http.dependencies import ServiceIn
from penstock.api.http.documented import OPEN_TO_ALL
from penstock.api.http.problems import answers
from penstock.api.schemas.wire import Health, VersionView
from penstock.api.store.migrate import current

router = APIRouter(tags=["health"])

OPEN = frozenset({"/healthz", "/readyz", "/version"})
"""Routes without a token."""

ANSWERS = answers()


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
