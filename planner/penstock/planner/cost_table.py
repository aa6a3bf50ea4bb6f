"""Times of units from a table that was measured with other software.

A pass is measured at some token counts, the *nodes*, and attention at several numbers of attended pairs per node.
Seconds are linear in the pairs between and beyond the measured ones, and never negative; a node with one number of
pairs takes the seconds per pair of the nearest node that has several. Between nodes they are linear in the tokens at
equal pairs per token. Below the first node they follow the line of the first two, limited in slope so that they stay
positive, and beyond the last they are proportional. Every row of the table is reproduced exactly.

A table has the times of one rank, including collectives of tensor parallelism, so it holds for one degree of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.cost_table import CostRow
from penstock.core.errors import UserError
from penstock.core.model import UnitKind
from penstock.core.schedule import Kind
from penstock.planner.work import PASSES_WITH_WORK, Floats, Work


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Node:
    """Measurements at one token count: seconds by pairs, ascending, and seconds per pair beyond them."""

    tokens: float
    pairs: Floats
    seconds: Floats
    rate: float

    def at(self, pairs_per_token: Floats) -> Floats:
        """Seconds of the node's tokens, by the number of pairs per token."""
        pairs = pairs_per_token * self.tokens
        inside = np.interp(pairs, self.pairs, self.seconds)
        beyond = np.maximum(pairs - self.pairs[-1], 0.0) - np.maximum(self.pairs[0] - pairs, 0.0)
        seconds: Floats = np.maximum(inside + self.rate * beyond, 0.0)
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableTimes:
    """A cost table as times of units; made by `table_times`."""

    nodes: dict[tuple[UnitKind, Kind], tuple[_Node, ...]]

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """From the table; passes that it lacks have no work."""
        nodes = self.nodes.get((unit, kind))
        if nodes is None:
            return np.zeros(work.tokens.shape)
        per_token = work.pairs / work.tokens
        points = np.array([node.tokens for node in nodes])
        times = np.stack([node.at(per_token) for node in nodes])
        return _between(points, times, work.tokens)


def _between(points: Floats, times: Floats, tokens: Floats) -> Floats:
    """``times`` [points, ...] interpolated at ``tokens``."""
    last = len(points) - 1
    after = np.clip(np.searchsorted(points, tokens), min(1, last), last)
    before = np.maximum(after - 1, 0)
    low, high = (np.take_along_axis(times, place[None], axis=0)[0] for place in (before, after))
    width = np.maximum(points[after] - points[before], 1.0)
    share = np.clip((tokens - points[before]) / width, 0.0, 1.0)
    seconds: Floats = (low + (high - low) * share) * np.maximum(tokens / points[-1], 1.0)
    first = np.clip((times[min(1, last)] - times[0]) / max(points[min(1, last)] - points[0], 1.0), 0.0, None)
    steepest = times[0] / points[0]
    seconds -= np.minimum(first, steepest) * np.maximum(points[0] - tokens, 0.0)
    return seconds


def table_times(rows: Sequence[CostRow]) -> TableTimes:
    """The table's times; raises `UserError` for a missing pass, and for attention without a cost per pair."""
    groups: dict[tuple[UnitKind, Kind], dict[int, dict[int, float]]] = {}
    for row in rows:
        groups.setdefault((row.unit, Kind(row.pass_)), {}).setdefault(row.tokens, {})[row.pairs] = row.seconds
    missing = [f"{unit} {kind}" for unit, kind in PASSES_WITH_WORK if (unit, kind) not in groups]
    if missing:
        raise UserError(
            what=f"holds no {', '.join(missing)}",
            where="costs",
            remedy="add a row for each; one of 0 seconds where nothing is done",
        )
    return TableTimes(nodes={key: _nodes(key, measured) for key, measured in groups.items()})


def _nodes(key: tuple[UnitKind, Kind], measured: dict[int, dict[int, float]]) -> tuple[_Node, ...]:
    unit, kind = key
    rates = {tokens: rate for tokens, points in measured.items() if (rate := _rate(points)) is not None}
    if not rates and unit is UnitKind.ATTENTION and kind is not Kind.W:
        raise UserError(
            what=f"does not give the cost of an attended pair: every count of tokens of {unit} {kind} has one row",
            where="costs",
            remedy="add a row with the same tokens and another number of pairs",
        )
    return tuple(_node(tokens, measured[tokens], rates) for tokens in sorted(measured))


def _node(tokens: int, points: dict[int, float], rates: dict[int, float]) -> _Node:
    nearest = min(rates, key=lambda other: abs(other - tokens), default=None)
    pairs = sorted(points)
    return _Node(
        tokens=float(tokens),
        pairs=np.array(pairs, dtype=np.float64),
        seconds=np.array([points[count] for count in pairs]),
        rate=0.0 if nearest is None else rates[nearest],
    )


def _rate(points: dict[int, float]) -> float | None:
    """Seconds per pair between the fewest and the most pairs measured; None if only one number was."""
    fewest, most = min(points), max(points)
    return max((points[most] - points[fewest]) / (most - fewest), 0.0) if most > fewest else None
