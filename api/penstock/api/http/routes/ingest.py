"""/v1/ingest: route to which `penstock-agent ship` sends records of ranks.

It gets more requests than all other routes together, so the application calls it directly
(`penstock.api.app.FastPath`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from penstock.api.auth.identity import Reporting, Role
from penstock.api.http.dependencies import authenticated, decompress, let_pass, load_json, read_aside, service_of
from penstock.api.http.documented import ONLY_BY_TOKEN
from penstock.api.http.problems import Problem, answers
from penstock.api.schemas.examples import EXAMPLE_RECORD
from penstock.api.schemas.wire import Acknowledged
from penstock.api.service import Service
from penstock.api.store.ingest import Batch, EarlyAttemptError, take
from penstock.api.store.jobs import NoSuchJobError
from penstock.api.store.sanitize import ESCAPED, cleaned
from penstock.core.errors import UserError
from penstock.core.manifest import read_value
from penstock.core.records import Record

router = APIRouter(tags=["ingest"])

MOST_RECORDS = 5_000
SMALL_BYTES = 4096
"""A body up to this size is parsed in the event loop, which delays other requests by a few milliseconds at most. A
larger or compressed one is parsed in a worker thread: a full batch takes tenths of a second.
"""
ANSWERS = answers(
    "unauthenticated",
    "forbidden",
    "not-found",
    "stale-attempt",
    "early-attempt",
    "too-large",
    "invalid",
    "storage-full",
)
DOCUMENTED = {
    **ONLY_BY_TOKEN,
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["records"],
                    "additionalProperties": False,
                    "properties": {"records": {"type": "array", "items": {"type": "object"}, "minItems": 1}},
                },
                "example": {"records": [EXAMPLE_RECORD]},
            }
        },
    },
}


async def read_batch(request: Request, service: Service, namespace: str | None) -> Batch:
    """Return the records in the body of a caller who may report into ``namespace``.

    Raises:
        Problem: the body cannot be read.
        UserError: a field has an invalid value.
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    most_bytes = service.settings.limits.decompressed_bytes
    if len(body) <= SMALL_BYTES and encoding != "gzip":  # gzip expands a byte to up to a thousand
        records = read_records(body, encoding, most_bytes)
    else:
        records = await read_aside(read_records, body, encoding, most_bytes, limiter=service.bodies)
    return Batch.of(records, service.clock(), namespace)


def read_records(body: bytes, encoding: str, most_bytes: int) -> list[Record]:
    """Parse the records in a body of at most ``most_bytes`` decompressed; raises as `read_batch` does."""
    if encoding == "gzip":
        body = decompress(body, most_bytes)
    elif encoding != "identity":
        raise Problem(
            kind="bad-request",
            detail=f"{encoding} is not supported",
            where="Content-Encoding",
            remedy="compress the body with gzip, or leave Content-Encoding out",
        )
    document = load_json(body)
    return _records(cleaned(document) if ESCAPED.search(body) else document)


def _records(document: Any) -> list[Record]:
    if not isinstance(document, dict) or document.keys() != {"records"}:
        raise UserError(what="is not a batch", where="body", remedy='send {"records": [...]}')
    listed = document["records"]
    if not isinstance(listed, list) or len(listed) > MOST_RECORDS:
        raise UserError(
            what=f"is not a list of up to {MOST_RECORDS} records", where="records", remedy="send several batches"
        )
    records: list[Record] = [read_value(Record, record, f"records[{i}]") for i, record in enumerate(listed)]
    return records


@router.post(
    "/v1/ingest", response_model=Acknowledged, responses=ANSWERS, operation_id="ingest", openapi_extra=DOCUMENTED
)
async def ingest(request: Request) -> Response:
    """Store records of one source of one attempt. Duplicates are skipped; acknowledged records are durable.

    Records are numbered, so it is safe to send them again, and Idempotency-Key is ignored. An attempt accepts records
    until its executor has closed it, also after the next attempt has started. Records of a closed attempt are refused
    with 409, and their sender should stop. Those of an unknown attempt are refused with 425: send them again later.
    """
    service = await service_of(request)
    identity = let_pass(request, authenticated(request).identity, Role.INGEST)
    batch = await read_batch(request, service, identity.namespace)
    if identity.only is not None:
        _require_own(identity.only, batch)
    sequence = await _kept(service, identity.only, batch)
    service.instruments.records.inc(len(batch.records))
    return Response(Acknowledged(sequence=sequence).model_dump_json(by_alias=True), media_type="application/json")


def _require_own(only: Reporting, batch: Batch) -> None:
    """Raise unless the batch is of the sender's job, and of its attempt or an earlier one, whose pods left records
    behind.
    """
    if batch.uid != only.uid or batch.attempt > only.attempt:
        raise Problem(
            kind="forbidden",
            detail=f"the records are of attempt {batch.attempt} of {batch.uid}, which is not the sender's",
            where="records",
            remedy=f"send only records of {only.uid}, up to attempt {only.attempt}",
        )


async def _kept(service: Service, only: Reporting | None, batch: Batch) -> int:
    """Store the batch; return the highest stored sequence.

    A pod may know its attempt before the mirror does: then the job is read from the cluster once.
    """
    try:
        return await asyncio.wrap_future(service.submit_joint(batch.uid, take, batch))
    except (NoSuchJobError, EarlyAttemptError):
        if only is None or service.cluster is None or batch.namespace is None:
            raise
    await run_in_threadpool(service.cluster.mirror.refresh, batch.namespace, only.name)
    return await asyncio.wrap_future(service.submit_joint(batch.uid, take, batch))


ROUTE = next(route for route in router.routes if isinstance(route, APIRoute))
