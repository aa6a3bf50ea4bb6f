"""Pass 6, arena: a place in the rank's arena for every slot, so that slots which live together do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.layout import aligned


def place(lives: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of the slots with the given lives and bytes, and the bytes of the arena."""
    live: list[tuple[int, int, int]] = []
    offsets: list[int] = []
    for (start, stop), num_bytes in zip(lives, sizes, strict=True):
        live = [slot for slot in live if slot[2] > start]
        at = 0
        for offset, end, _ in sorted(live):
            if offset - at >= num_bytes:
                break
            at = max(at, end)
        live.append((at, at + aligned(num_bytes), stop))
        offsets.append(at)
    return offsets, max((at + aligned(size) for at, size in zip(offsets, sizes, strict=True)), default=0)
