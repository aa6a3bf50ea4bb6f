"""Fits a Profile's unit records, and answers as a CostModel.

The model of one (unit, kind), for B sequences of n tokens after c of prefix, t = B n:

    seconds = sum_i u_i hat_i(log2 t)  +  B n c sum_j s_j hat_j(log2 n)  +  q B n^2

The first sum interpolates between the measured token counts, the second is the prefix slope (attention only), the last
separates attention inside the slice from the matrices when several batches were measured. All coefficients are
non-negative and minimise the *relative* squared error (scipy's nnls), since a plan is as wrong as its percentages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from penstock.core.errors import UserError
from penstock.core.model import UnitKind
from penstock.core.profile import Profile, UnitRecord
from penstock.core.schedule import Kind
from penstock.planner.cost import Floats, Lengths

Key = tuple[UnitKind, Kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The fitted function of one (unit, kind), for one of alone and together."""

    token_nodes: Floats
    token_seconds: Floats
    slope_nodes: Floats
    slopes: Floats
    quadratic: float

    def seconds(self, batch: int, length: Lengths, prefix: Lengths) -> Floats:
        """Seconds at (B, n, c); beyond the last node the token part goes on in proportion to t."""
        n, c = np.asarray(length, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        t = np.log2(np.maximum(batch * n, 1))
        tokens = np.interp(t, self.token_nodes, self.token_seconds)
        beyond = np.maximum(batch * n / 2 ** self.token_nodes[-1], 1.0)
        slope = np.interp(np.log2(np.maximum(n, 1)), self.slope_nodes, self.slopes)
        seconds: Floats = tokens * beyond + batch * n * c * slope + self.quadratic * batch * n * n
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """How far one fit is off: mean absolute relative error on the points it used, and on held-out ones (none: nan)."""

    unit: UnitKind
    kind: Kind
    fitted_error: float
    held_out_error: float
    num_records: int


def fit_records(records: Sequence[UnitRecord], together: bool) -> Fit:
    """The least-squares fit to ``records`` (all of one unit and kind); needs at least one record."""
    tokens = np.log2([r.batch * r.length for r in records])
    nodes = np.unique(tokens)
    prefixed = [r for r in records if r.prefix]
    slope_nodes = np.unique(np.log2([r.length for r in prefixed])) if prefixed else np.zeros(1)
    lengths = np.log2([r.length for r in records])
    pairs = np.array([float(r.batch * r.length * r.prefix) for r in records])
    squares = np.array([float(r.batch * r.length**2) for r in records])
    columns = [*_hats(tokens, nodes), *(hat * pairs for hat in _hats(lengths, slope_nodes))]
    columns.append(squares if len({r.batch for r in records}) > 1 and prefixed else 0.0 * squares)
    seconds = np.array([r.together_seconds if together else r.alone_seconds for r in records])
    design = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    weights = scipy.optimize.nnls(design / scale, np.ones(len(records)))[0] / scale
    cut = len(nodes)
    return Fit(
        token_nodes=nodes,
        token_seconds=weights[:cut],
        slope_nodes=slope_nodes,
        slopes=weights[cut:-1],
        quadratic=float(weights[-1]),
    )


def _hats(x: Floats, nodes: Floats) -> list[Floats]:
    """The piecewise-linear basis: one at its own node, zero at the others."""
    return [np.interp(x, nodes, np.eye(len(nodes))[i]) for i in range(len(nodes))]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost:
    """A Profile as a CostModel; make it with `measured_cost`."""

    profile: Profile
    alone: dict[Key, Fit]
    slowdowns: dict[Key, float]
    reports: tuple[FitReport, ...]

    @property
    def action_overhead_seconds(self) -> float:
        """As measured."""
        return self.profile.action_overhead_seconds

    @property
    def constant_bytes(self) -> int:
        """As measured."""
        return self.profile.memory.constant_bytes

    def unit_seconds(self, unit: UnitKind, kind: Kind, batch: int, length: Lengths, prefix: Lengths) -> Floats:
        """From the fit; work a unit does not have (an embedding's I, a head's I and W) takes no time."""
        fit = self.alone.get((unit, kind))
        if fit is None:
            return np.zeros(np.broadcast(np.asarray(length), np.asarray(prefix)).shape)
        return fit.seconds(batch, length, prefix)

    def slowdown(self, unit: UnitKind, kind: Kind) -> float:
        """The median measured ratio of together to alone, at least 1."""
        return self.slowdowns.get((unit, kind), 1.0)

    def transient_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """The measured transient of the nearest point that is at least as large, scaled down by tokens."""
        found = [r for r in self.profile.memory.transients if (r.unit, r.kind) == (unit, kind)]
        if not found:
            return 0
        tokens = batch * length
        enough = [r for r in found if r.batch * r.length >= tokens and r.prefix >= prefix] or found
        nearest = min(enough, key=lambda r: (abs(r.batch * r.length - tokens), abs(r.prefix - prefix)))
        return nearest.num_bytes

    def transfer(self, source: int, target: int) -> tuple[float, float]:
        """The measured channel; a pair that was not measured takes the slowest that was."""
        links = self.profile.links
        own = [link for link in links if (link.source, link.target) == (source, target)]
        if not links:
            return 0.0, 0.0
        chosen = own or [min(links, key=lambda link: link.bytes_per_second)]
        return chosen[0].latency_seconds, 1.0 / chosen[0].bytes_per_second

    def all_reduce_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Interpolated over the measured sizes for that many ranks, in proportion beyond the largest."""
        if len(devices) < 2:
            return 0.0
        records = self.profile.collectives
        most = max((r.num_ranks for r in records if r.num_ranks <= len(devices)), default=0)
        points = sorted((r.num_bytes, r.seconds) for r in records if r.num_ranks == most)
        if not points:
            return 0.0
        largest = points[-1][0]
        seconds = float(np.interp(num_bytes, [p[0] for p in points], [p[1] for p in points]))
        return seconds * max(num_bytes / largest, 1.0)

    def optimizer_seconds(self, num_parameters: int) -> float:
        """Interpolated over the measured sizes from zero, in proportion beyond the largest."""
        points = sorted((r.num_parameters, r.seconds) for r in self.profile.optimizer)
        if not points:
            return 0.0
        sizes, seconds = [0, *(p[0] for p in points)], [0.0, *(p[1] for p in points)]
        return float(np.interp(num_parameters, sizes, seconds)) * max(num_parameters / sizes[-1], 1.0)


def measured_cost(profile: Profile) -> MeasuredCost:
    """The Profile fitted; raises `UserError` when a unit has no measurement."""
    groups: dict[Key, list[UnitRecord]] = {}
    for record in profile.units:
        groups.setdefault((record.unit, record.kind), []).append(record)
    missing = {UnitKind.ATTENTION, UnitKind.MLP, UnitKind.HEAD, UnitKind.EMBEDDING} - {unit for unit, _ in groups}
    if missing:
        raise UserError(
            what=f"holds no measurement of {', '.join(sorted(missing))}",
            where="profile",
            remedy="run penstock profile again",
        )
    alone = {key: fit_records(_used(records), together=False) for key, records in groups.items()}
    slowdowns = {key: _slowdown(records) for key, records in groups.items()}
    reports = tuple(_report(key, records, alone[key]) for key, records in groups.items())
    return MeasuredCost(profile=profile, alone=alone, slowdowns=slowdowns, reports=reports)


def _used(records: Iterable[UnitRecord]) -> list[UnitRecord]:
    return [record for record in records if not record.held_out]


def _slowdown(records: Sequence[UnitRecord]) -> float:
    return max(float(np.median([r.together_seconds / r.alone_seconds for r in records])), 1.0)


def _report(key: Key, records: Sequence[UnitRecord], fit: Fit) -> FitReport:
    errors = {held: [_error(r, fit) for r in records if r.held_out is held] for held in (False, True)}
    return FitReport(
        unit=key[0],
        kind=key[1],
        fitted_error=float(np.mean(errors[False])),
        held_out_error=float(np.mean(errors[True])) if errors[True] else float("nan"),
        num_records=len(records),
    )


def _error(record: UnitRecord, fit: Fit) -> float:
    predicted = float(fit.seconds(record.batch, record.length, record.prefix))
    return abs(predicted - record.alone_seconds) / record.alone_seconds
