"""Arguments of a block unit's pass over one slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Tokens [start, stop) of every sequence of a micro-batch, and the unit's views of its slots.

    ``x`` [rows, h] is the shard's part of the unit's input, all tokens of sequence 0 first. The mappings hold the
    buffers of `penstock.core.layout.unit_graph` by name. Mappings of slots that the action does not access are empty.
    ``kv`` and ``dkv`` have one mapping for each slot: of the whole micro-batch, or of all slices up to this one, in
    order.
    """

    start: int
    stop: int
    x: Tensor
    a: Mapping[str, Tensor]
    l: Mapping[str, Tensor]  # noqa: E741 (the slot's name)
    w: Mapping[str, Tensor]
    kv: Sequence[Mapping[str, Tensor]]
    dkv: Sequence[Mapping[str, Tensor]]
