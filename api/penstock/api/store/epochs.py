"""Epochs of the cluster's Lease in the store, as fencing tokens: writes of a former holder are refused.

A Lease alone does not keep a former holder from writing: it may be frozen inside a transaction, another service takes
the Lease, and the former one continues. So each holder begins an epoch, which increments a row, and each of its
transactions checks and locks that row until its end. A new epoch waits for transactions of the one before. PostgreSQL
ends a transaction whose service is frozen (`penstock.api.store.engine.IDLE_SECONDS`).
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from penstock.api.store.engine import upsert
from penstock.api.store.schema import epochs
from penstock.core.errors import PenstockError

NAME = "service"


class LostLeaseError(PenstockError):
    """Another service holds the Lease."""


def begin(connection: Connection) -> int:
    """Begin an epoch, which ends the one before; return its number."""
    making = upsert(connection.dialect.name, epochs).values(name=NAME, epoch=1)
    raised = making.on_conflict_do_update(index_elements=[epochs.c.name], set_={"epoch": epochs.c.epoch + 1})
    return int(connection.execute(raised.returning(epochs.c.epoch)).scalar_one())


def require(connection: Connection, epoch: int) -> None:
    """Lock the epoch until the transaction ends; raises `LostLeaseError` if another has begun."""
    chosen = select(epochs.c.epoch).where(epochs.c.name == NAME).with_for_update(read=True)
    current = connection.execute(chosen).scalar_one_or_none()
    if current != epoch:
        raise LostLeaseError(f"epoch {epoch} of the Lease has ended; the newest is {current}")
