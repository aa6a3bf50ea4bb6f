"""An order as text, for plans whose schedule was made from costs: ranks read it instead of making it again.

The text has the columns of the `Order` as differences from one action to the next. In a long step these hardly ever
change, so they compress well: little-endian int32, zlib (RFC 1950), base64 (RFC 4648). The first action of a pair has
its kind's code plus the number of kinds.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import numpy as np

from penstock.core.errors import UserError
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, Flags, Integers, Order, join_ranks

MOST_ACTIONS = 4_000_000
"""Maximum number of actions of a recorded order: texts of longer ones are rejected before they are built."""

_COLUMNS = 5
_NUMBER = np.dtype("<i4")


def record(order: Order) -> str:
    """The order as text."""
    kinds = order.kinds if order.joined is None else order.kinds + len(KINDS) * order.joined
    columns = np.stack([order.ranks, kinds, order.stages, order.microbatches, order.slices])
    differences = np.diff(columns, axis=1, prepend=0).astype(_NUMBER)
    return base64.b64encode(zlib.compress(differences.tobytes())).decode("ascii")


def replay(text: str, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Order:
    """The order that was recorded as ``text``; raises `UserError` if it is corrupt or of another shape."""
    try:
        differences = np.frombuffer(_decompressed(base64.b64decode(text, validate=True)), dtype=_NUMBER)
        columns = np.cumsum(differences.reshape(_COLUMNS, -1), axis=1, dtype=np.int64).astype(np.int32)
    except (ValueError, zlib.error):
        raise _broken() from None
    ranks, kinds, stages, microbatches, parts = columns
    limits = (num_ranks, 2 * len(KINDS), stages.max(initial=0) + 1, num_microbatches, num_slices)
    inside = bool(((columns >= 0) & (columns < np.array(limits)[:, None])).all())
    if not inside or (np.diff(ranks) < 0).any():
        raise _broken()
    actions = np.stack([kinds % len(KINDS), stages, microbatches, parts], axis=1)
    order = join_ranks(
        [actions[ranks == rank] for rank in range(num_ranks)],
        num_stages=int(stages.max(initial=0)) + 1,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )
    joined = kinds >= len(KINDS)
    if not joined.any():
        return order
    if not _are_pairs(order, joined):
        raise _broken()
    return replace(order, joined=joined)


def _are_pairs(order: Order, joined: Flags) -> bool:
    """Whether each marked action and the next one of its rank form a pair, which shares no action with another."""
    firsts = np.flatnonzero(joined)
    if firsts[-1] + 1 == order.num_actions or (joined[firsts + 1]).any():
        return False
    ranks, kinds, microbatches = (np.stack([column[firsts], column[firsts + 1]]) for column in _pair_columns(order))
    has_forward = (kinds == FORWARD).any(axis=0)
    has_backward = ((kinds == BACKWARD) | (kinds == INPUT_GRADIENT)).any(axis=0)
    differ = microbatches[0] != microbatches[1]
    return bool(((ranks[0] == ranks[1]) & has_forward & has_backward & differ).all())


def _pair_columns(order: Order) -> tuple[Integers, Integers, Integers]:
    return order.ranks, order.kinds, order.microbatches


def _decompressed(content: bytes) -> bytes:
    stream, most_bytes = zlib.decompressobj(), MOST_ACTIONS * _COLUMNS * _NUMBER.itemsize
    decompressed = stream.decompress(content, most_bytes)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("is cut short, or holds more actions than any plan")
    return decompressed


def _broken() -> UserError:
    return UserError(
        what="does not hold an order of this plan's shape", where="plan.schedule.text", remedy="plan again"
    )
