"""Measured seconds of units from other software, as a table: unit, pass, tokens, attended pairs, seconds."""

from __future__ import annotations

import csv
import enum
import io
import math
from dataclasses import dataclass
from typing import Annotated

from penstock.core.errors import UserError, mistakes_raised_by, raise_all, shown
from penstock.core.limits import EXACT, MOST_COSTS, one_to, up_to
from penstock.core.manifest import Checked, nearest
from penstock.core.model import UnitKind

HEADER = ("unit", "pass", "tokens", "pairs", "seconds")


class Pass(enum.StrEnum):
    """The timed pass of a unit: forward, the gradient of its input, those of its weights."""

    F = "F"
    I = "I"  # noqa: E741  the field's own name for the input-gradient pass
    W = "W"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRow(Checked):
    """Seconds of one pass of a unit over a number of tokens, whose queries attend to a number of keys altogether."""

    unit: Annotated[UnitKind, "`embedding`, `attention`, `mlp` or `head`"]
    pass_: Annotated[Pass, "`F`, `I` (gradient of the input) or `W` (gradients of the weights)"]
    tokens: Annotated[int, one_to(EXACT), "number of tokens of all sequences of the micro-batch's slice"]
    pairs: Annotated[
        int,
        up_to(EXACT),
        "number of pairs of a query and a key that the query attends to, over all sequences",
    ]
    seconds: Annotated[float, up_to(1e12), "on one rank, collectives of tensor parallelism included"]


def parse_cost_table(text: str, where: str) -> tuple[CostRow, ...]:
    """The rows of a CSV file with the columns of `HEADER`, in any order; raises `UserError` for all mistakes in it."""
    reader = csv.reader(io.StringIO(text))
    header = tuple(name.strip() for name in next(reader, []))
    _require_header(header, where)
    lines = [(reader.line_num, line) for line in reader if any(cell.strip() for cell in line)]
    if not lines:
        raise UserError(what="holds no costs", where=where, remedy=f"write rows of {', '.join(HEADER)}")
    if len(lines) > MOST_COSTS:
        raise UserError(what=f"holds {len(lines)} costs, more than {MOST_COSTS}", where=where, remedy="write fewer")
    rows: list[CostRow] = []
    mistakes: list[UserError] = []
    for number, line in lines:
        place = f"{where}, line {number}"
        mistakes += mistakes_raised_by(lambda: rows.append(_row(header, line, place)))  # noqa: B023
    raise_all(mistakes)
    return tuple(rows)


def _require_header(header: tuple[str, ...], where: str) -> None:
    missing = [name for name in HEADER if name not in header]
    unknown = [name for name in header if name not in HEADER]
    if missing or unknown:
        what = f"the column {unknown[0]!r} is unknown" if unknown else f"lacks the column {missing[0]!r}"
        remedy = (nearest(unknown[0], HEADER) if unknown else "") or f"begin with the line {','.join(HEADER)}"
        raise UserError(what=what, where=f"{where}, line 1", remedy=remedy)


def _row(header: tuple[str, ...], line: list[str], where: str) -> CostRow:
    if len(line) != len(header):
        raise UserError(what=f"has {len(line)} cells, not {len(header)}", where=where, remedy="write one per column")
    cells = {name: cell.strip() for name, cell in zip(header, line, strict=True)}
    value = {**cells, **{name: _number(cells[name], f"{where}, {name}") for name in ("tokens", "pairs", "seconds")}}
    return CostRow.from_manifest(value, where)


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(what=f"{shown(cell)} is not a number", where=where, remedy="write a finite number")
    return number
