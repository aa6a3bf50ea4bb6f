"""Answers stored by Idempotency-Key, in the transaction of their change, which so happens once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from penstock.api.store.schema import idempotency
from penstock.core.errors import PenstockError


class KeyReusedError(PenstockError):
    """The key came before with another request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer as it was given."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedRequest:
    """A request with a key: its sender, and a digest of its content."""

    identity: str
    key: str
    request: str


def once(connection: Connection, keyed: KeyedRequest | None, now: float, change: Callable[[Connection], Answer]) -> Answer:
    """The answer of ``change``, or its stored answer; raises `KeyReusedError` if the key was another request's."""
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
    """The stored answer, if there is one; raises `KeyReusedError` if the key was another request's."""
    if keyed is None:
        return None
    same = (idempotency.c.identity == keyed.identity, idempotency.c.key == keyed.key)
    known = connection.execute(select(idempotency).where(*same)).one_or_none()
    if known is None:
        return None
    if known.request != keyed.request:
        raise KeyReusedError(keyed.key)
    return Answer(status=known.status, body=known.body, headers=known.headers)


def old_keys(connection: Connection, before: float, most: int) -> list[tuple[str, str]]:
    """Identity and key of answers that were given before that time, oldest first."""
    chosen = select(idempotency.c.identity, idempotency.c.key).where(idempotency.c.created_at < before)
    rows = connection.execute(chosen.order_by(idempotency.c.created_at).limit(most))
    return [(identity, key) for identity, key in rows]


def forget_keys(connection: Connection, old: Sequence[tuple[str, str]]) -> None:
    """Drop these answers: a request that is sent again with such a key is a new one."""
    own = (idempotency.c.identity == bindparam("of"), idempotency.c.key == bindparam("named"))
    connection.execute(delete(idempotency).where(*own), [{"of": identity, "named": key} for identity, key in old])
