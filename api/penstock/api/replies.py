"""Answers as bytes, once: a POST with an Idempotency-Key is done once and answered the same ever after."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from penstock.api.dependencies import IdentityIn
from penstock.api.service import Service
from penstock.api.store.idempotency import Answer, Asked, once

MOST_KEY_LENGTH = 255


async def asked(
    request: Request,
    identity: IdentityIn,
    idempotency_key: Annotated[str | None, Header(max_length=MOST_KEY_LENGTH, min_length=1)] = None,
) -> Asked | None:
    """The request by its key, if it has one."""
    if idempotency_key is None:
        return None
    said = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query}\n".encode())
    said.update(await request.body())
    return Asked(identity=identity.name, key=idempotency_key, request=said.hexdigest())


Once = Annotated[Asked | None, Depends(asked)]


def write_once(service: Service, key: str, asked: Asked | None, change: Callable[[Connection], Answer]) -> Response:
    """Do ``change`` unless the same request did it before."""
    now = service.clock()
    found = service.write(key, lambda connection: once(connection, asked, now, change))
    return Response(found.body, status_code=found.status, media_type="application/json", headers=dict(found.headers))


def reply(view: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A view as it goes over the wire."""
    return Answer(status=status, body=view.model_dump_json(by_alias=True).encode(), headers=dict(headers or {}))
