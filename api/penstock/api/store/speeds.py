"""Speeds of jobs' steps, from the tokens, FLOPs and devices of their plans.

A plan never changes under its digest, and unpacking one takes longer than reading the rest of a job. So the speed of a
step of one second is cached by digest: a step of s seconds is s times slower.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from sqlalchemy import Connection, select

from penstock.api.store.documents import unpack
from penstock.api.store.schema import plans
from penstock.core.errors import UserError
from penstock.core.manifest import limits_lifted
from penstock.core.plan import Plan
from penstock.core.speed import Speed

MOST_DIGESTS = 500
"""Digests in one query: databases limit the number of parameters."""
MOST_REMEMBERED = 16_384
LEAST_SECONDS = 1e-9
"""Lower bound of a step's duration."""

Speeds = Mapping[str, Speed | None]

_remembered: dict[str, Speed | None] = {}
_lock = threading.Lock()


def speeds_of_a_second(connection: Connection, digests: Collection[str]) -> Speeds:
    """Return the speed of a step of one second, for each plan with one of these digests."""
    with _lock:
        speeds = {digest: _remembered[digest] for digest in digests if digest in _remembered}
    missing = sorted({*digests} - speeds.keys())
    for i in range(0, len(missing), MOST_DIGESTS):
        some = select(plans.c.digest, plans.c.body).where(plans.c.digest.in_(missing[i : i + MOST_DIGESTS]))
        speeds.update((digest, _of_a_second(body)) for digest, body in connection.execute(some))
    _remember({digest: speeds[digest] for digest in missing if digest in speeds})
    return speeds


def speed_of_step(speeds: Speeds, digest: str | None, step_seconds: float | None) -> Speed | None:
    """Return the speed of a step of the plan with this digest; none if plan or time is unknown."""
    of_a_second = speeds.get(digest or "")
    if of_a_second is None or step_seconds is None or step_seconds < LEAST_SECONDS:
        return None
    return of_a_second.slowed(step_seconds)


def _of_a_second(body: bytes) -> Speed | None:
    """Return the speed of a step of one second; none for a plan that this version cannot read."""
    try:
        with limits_lifted():
            return Plan.from_manifest(unpack(body)).speed(1.0)
    except UserError:
        return None


def _remember(new: Speeds) -> None:
    """Cache the speeds, and evict the oldest beyond the limit."""
    with _lock:
        _remembered.update(new)
        for digest in list(_remembered)[: max(0, len(_remembered) - MOST_REMEMBERED)]:
            del _remembered[digest]
