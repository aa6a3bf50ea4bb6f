"""Answers as bytes, and idempotency: a POST with an Idempotency-Key is executed once and answered identically later."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from penstock.api.auth.identity import TOKEN_BYTES, derived_token
from penstock.api.http.credentials import Credential
from penstock.api.http.dependencies import CallerIn
from penstock.api.service import Service
from penstock.api.store.idempotency import Answer, KeyedRequest, once

MOST_KEY_LENGTH = 255
SALTED = re.compile(rb"(p[a-z]{2}_)salt\.([\w-]{43})")
"""Placeholder of a secret in a stored answer."""


async def keyed_request(
    request: Request,
    caller: CallerIn,
    idempotency_key: Annotated[str | None, Header(max_length=MOST_KEY_LENGTH, min_length=1)] = None,
) -> KeyedRequest | None:
    """Return the request's key and digest, if it has a key."""
    if idempotency_key is None:
        return None
    request_hash = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query}\n".encode())
    request_hash.update(await request.body())
    return KeyedRequest(identity=caller.id, key=idempotency_key, request=request_hash.hexdigest())


Once = Annotated[KeyedRequest | None, Depends(keyed_request)]


def write_once(
    service: Service, key: str, keyed: KeyedRequest | None, change: Callable[[Connection, float], Answer]
) -> Response:
    """Execute ``change`` with the current time, unless the same request did before, and notify the executor."""
    now = service.clock()
    answer = service.write(key, lambda connection: once(connection, keyed, now, lambda c: change(c, now)))
    service.requested.set()
    return response_of(answer)


def response_of(answer: Answer) -> Response:
    """Return the answer as a response."""
    return Response(answer.body, status_code=answer.status, media_type="application/json", headers=dict(answer.headers))


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSecret:
    """A secret, and its placeholder in a stored answer."""

    secret: str
    salted: str


def write_secret_once(
    service: Service,
    key: str,
    keyed: KeyedRequest | None,
    credential: Credential,
    prefix: str,
    change: Callable[[Connection, NewSecret, float], Answer],
) -> Response:
    """Create a resource with a new secret.

    A stored answer would put the secret into the database, so a salt is stored instead. The secret is derived again
    from the salt and the caller's own secret, which is not in the database either.
    """
    salt = secrets.token_urlsafe(TOKEN_BYTES)
    made = NewSecret(secret=derived_token(credential.secret, salt, prefix), salted=f"{prefix}salt.{salt}")
    response = write_once(service, key, keyed, lambda connection, now: change(connection, made, now))

    def with_secret(match: re.Match[bytes]) -> bytes:
        return derived_token(credential.secret, match[2].decode(), match[1].decode()).encode()

    body = SALTED.sub(with_secret, bytes(response.body))
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    return Response(body, status_code=response.status_code, headers=headers)


def reply(view: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return a view as an answer in JSON."""
    return Answer(status=status, body=view.model_dump_json(by_alias=True).encode(), headers=dict(headers or {}))
