"""An order as text, for plans whose schedule was made from costs: ranks read it, and need not make it again.

The columns of the `Order` as differences from one action to the next, which hardly ever change in a long step, so that
they compress to little: little-endian int32, zlib (RFC 1950), base64 (RFC 4648).
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from penstock.core.errors import UserError
from penstock.planner.order import KINDS, Order, join_ranks

MOST_ACTIONS = 4_000_000
"""Of a recorded order: a text that stands for more is refused before it is built."""

_COLUMNS = 5
_NUMBER = np.dtype("<i4")


def record(order: Order) -> str:
    """The order as text."""
    columns = np.stack([order.ranks, order.kinds, order.stages, order.microbatches, order.slices])
    differences = np.diff(columns, axis=1, prepend=0).astype(_NUMBER)
    return base64.b64encode(zlib.compress(differences.tobytes())).decode("ascii")


def replay(text: str, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Order:
    """The order that was recorded as ``text``; raises `UserError` if it is broken or of another shape."""
    try:
        differences = np.frombuffer(_decompressed(base64.b64decode(text, validate=True)), dtype=_NUMBER)
        columns = np.cumsum(differences.reshape(_COLUMNS, -1), axis=1, dtype=np.int64).astype(np.int32)
    except (ValueError, zlib.error):
        raise _broken() from None
    ranks, kinds, stages, microbatches, parts = columns
    limits = (num_ranks, len(KINDS), stages.max(initial=0) + 1, num_microbatches, num_slices)
    inside = bool(((columns >= 0) & (columns < np.array(limits)[:, None])).all())
    if not inside or (np.diff(ranks) < 0).any():
        raise _broken()
    actions = np.stack([kinds, stages, microbatches, parts], axis=1)
    return join_ranks(
        [actions[ranks == rank] for rank in range(num_ranks)],
        num_stages=int(stages.max(initial=0)) + 1,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def _decompressed(content: bytes) -> bytes:
    stream, most_bytes = zlib.decompressobj(), MOST_ACTIONS * _COLUMNS * _NUMBER.itemsize
    found = stream.decompress(content, most_bytes)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("is cut short, or holds more actions than any plan")
    return found


def _broken() -> UserError:
    return UserError(
        what="does not hold an order of this plan's shape", where="plan.schedule.text", remedy="plan again"
    )
