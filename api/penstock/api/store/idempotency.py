"""Answers by Idempotency-Key, stored in the transaction of their change, which therefore happens once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from penstock.api.store.schema import idempotency
from penstock.core.errors import PenstockError


class KeyReusedError(PenstockError):
    """The key was used before for another request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A stored HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedRequest:
    """Request with a key: its sender, and a digest of its content."""

    identity: str
    key: str
    request: str


def once(
    connection: Connection, keyed: KeyedRequest | None, now: float, change: Callable[[Connection], Answer]
) -> Answer:
    """Return the answer of ``change``, or its stored answer; raises `KeyReusedError` for a key of another request."""
    if keyed is None:
        return change(connection)
    known = remembered(connection, keyed)
    if known is not None:
        return known
    answer = change(connection)
    row = {"identity": keyed.identity, "key": keyed.key, "request": keyed.request, "created_at": now}
    kept = {"status": answer.status, "body": answer.body, "headers": dict(answer.headers)}
    connection.execute(insert(idempotency).values(**row, **kept))
    return answer


def remembered(connection: Connection, keyed: KeyedRequest | None) -> Answer | None:
    """Return the stored answer, if there is one; raises `KeyReusedError` for a key of another request."""
    if keyed is None:
        return None
    same = (idempotency.c.identity == keyed.identity, idempotency.c.key == keyed.key)
    known = connection.execute(select(idempotency).where(*same)).one_or_none()
    if known is None:
        return None
    if known.request != keyed.request:
        raise KeyReusedError(keyed.key)
    return Answer(status=known.status, body=known.body, headers=known.headers)
