"""The grid that errors print: one row per rank, one column per step, the bad cell between ``>`` and ``<``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STEPS_BEFORE = 5
STEPS_AFTER = 2
RANKS_AROUND = 6


def draw(rows: Sequence[Mapping[int, str]], rank: int, step: int) -> str:
    """The cells (step -> text, per rank) in a window around the bad one at (``rank``, ``step``)."""
    first_rank, stop_rank = max(0, rank - RANKS_AROUND), min(len(rows), rank + RANKS_AROUND + 1)
    shown = rows[first_rank:stop_rank]
    last = min(step + STEPS_AFTER, max((max(row, default=0) for row in shown), default=0))
    steps = range(max(1, step - STEPS_BEFORE), max(step, last) + 1)
    table = [["step", *map(str, steps)]]
    for number, row in enumerate(shown, start=first_rank):
        texts = [row.get(column, ".") for column in steps]
        if number == rank:
            texts[step - steps.start] = f">{texts[step - steps.start]}<"
        table.append([f"rank {number}", *texts])
    return "\n".join(_line(line, _widths(table)) for line in table)


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()
