"""/v1/audit: log of changes and their authors."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from penstock.api.http.dependencies import Admin, ServiceIn
from penstock.api.http.problems import answers
from penstock.api.schemas.access import AuditPage, audit_view
from penstock.api.store import audit

router = APIRouter(tags=["audit"])


@router.get("/v1/audit", responses=answers("unauthenticated", "forbidden"), operation_id="listAudit")
def list_audit(
    service: ServiceIn,
    identity: Admin,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description="The `next` of the page before.")] = None,
) -> AuditPage:
    """Every change by REST of the last 90 days, and every one that was refused for lack of permission, newest first.

    Records that ranks reported are left out: they are numbered and stored anyway.
    """
    before = None if cursor is None else int(cursor)
    entries, following = service.read(lambda connection: audit.page(connection, limit, before))
    return AuditPage(items=[audit_view(entry) for entry in entries], next=None if following is None else str(following))
