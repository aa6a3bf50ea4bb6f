"""/metrics, for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest

from penstock.api.auth.identity import Identity, Role
from penstock.api.http.dependencies import ServiceIn, require
from penstock.api.http.problems import answers

router = APIRouter(tags=["health"])

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Everywhere = Annotated[Identity, Depends(require(Role.VIEWER, everywhere=True))]


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
