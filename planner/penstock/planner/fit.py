"""Fits functions to the unit records of a Profile, as a CostModel.

The model of one (unit, kind), for B sequences of n tokens after c of prefix, t = B n:

    seconds = sum_i u_i hat_i(t)  +  B (n c + n (n + 1) / 2) sum_j s_j hat_j(n)  +  q B n^2

The first sum interpolates between the measured token counts. The second sum is the cost of attended pairs: only
attention has it, and it is known from the growth of the time with the prefix. The last term is the rest of attention
inside the slice; it can be separated from the matrix products only if several batches were measured. All coefficients
are non-negative and minimize the *relative* squared error (scipy's nnls), because errors in percent matter to a plan.

The profile measures some operations of a block's F separately, as R, namely those without matrix products: the norm of
an attention unit, and the norm and the activation of an MLP (`penstock.core.remaking.SELECTIVE`). The collectives of
shards take the time of `MeasuredCost.collective_seconds`. The rest of F is divided among the other operations in
proportion to their FLOPs. Without records of R, F is divided among all operations in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from penstock.core.comparison import FitPoint
from penstock.core.errors import UserError
from penstock.core.layout import Operation
from penstock.core.model import ModelSpec, UnitKind
from penstock.core.moments import MomentType
from penstock.core.profile import LinkRecord, Profile, TransientRecord, UnitRecord
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, Sharding, unit_collectives
from penstock.planner.cost import COLLECTIVES_OF, Devices
from penstock.planner.work import PASSES_WITH_WORK, Floats, Work, flops_share

Key = tuple[UnitKind, Kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The fitted function of one (unit, kind), either alone or while all ranks compute."""

    token_nodes: Floats
    token_seconds: Floats
    slope_nodes: Floats
    slopes: Floats
    quadratic: float

    def seconds(self, work: Work) -> Floats:
        """Seconds of ``work``; below the first node on the line of the first two, beyond the last in proportion."""
        t, n = work.tokens, work.length
        tokens = np.interp(t, self.token_nodes, self.token_seconds) * np.maximum(t / self.token_nodes[-1], 1.0)
        tokens = tokens - self._first_rate * np.maximum(self.token_nodes[0] - t, 0.0)
        slope = np.interp(n, self.slope_nodes, self.slopes)
        seconds: Floats = tokens + work.pairs * slope + self.quadratic * t * n
        return seconds

    @property
    def _first_rate(self) -> float:
        """Seconds per token below the first node: the slope after it, but at most that of the line to 0 seconds at 0
        tokens.
        """
        if len(self.token_nodes) < 2:
            return 0.0
        (near, far), (low, high) = self.token_nodes[:2], self.token_seconds[:2]
        return float(np.clip((high - low) / (far - near), 0.0, low / near))


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """How far one fit is off: mean absolute relative error on the points it used, and on held-out ones (none: nan)."""

    unit: UnitKind
    kind: Kind
    fitted_error: float
    held_out_error: float
    num_records: int
    tp: int = 1
    head_parts: int = 1


def fit_records(records: Sequence[UnitRecord], together: bool) -> Fit:
    """The least-squares fit to the device's times of ``records`` (all of one unit and kind, at least one)."""
    batches, lengths, prefixes = (
        np.array([getattr(r, name) for r in records], dtype=np.float64) for name in ("batch", "length", "prefix")
    )
    nodes = np.unique(batches * lengths)
    attends = records[0].unit is UnitKind.ATTENTION and records[0].kind is not Kind.W and bool(prefixes.any())
    slope_nodes = np.unique(lengths[prefixes > 0]) if attends else np.zeros(1)
    pairs = attends * batches * (lengths * prefixes + lengths * (lengths + 1) / 2)
    squares = (attends and len(set(batches.tolist())) > 1) * batches * lengths**2
    columns = [*_hats(batches * lengths, nodes), *(hat * pairs for hat in _hats(lengths, slope_nodes)), squares]
    seconds = np.array([r.seconds(together=together) for r in records])
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
    """A Profile as a CostModel of ranks with ``tp`` shards each and a head in ``head_parts`` units; make it with
    `measured_cost`.
    """

    profile: Profile
    tp: int
    head_parts: int
    alone: dict[Key, Fit]
    whole: dict[Key, Fit]
    """Fits at tp 1, for the estimate of collectives; empty on the host, and if ``tp`` is 1 or tp 1 was not measured."""
    launches: dict[Key, tuple[Floats, Floats]]
    """Token counts, ascending, and the host's mean seconds of launches; empty for hosts without a device, and for older
    profiles of one shard.
    """
    slowdowns: dict[Key, float]
    links: Floats
    """[latency seconds or seconds per byte, source, target]; the last source and target: any other device."""
    reports: tuple[FitReport, ...]
    moment_type: MomentType = MomentType.FP32
    reduction_type: ReductionType = ReductionType.FP32

    @property
    def action_overhead_seconds(self) -> float:
        """As measured."""
        return self.profile.action_overhead_seconds

    @property
    def constant_bytes(self) -> int:
        """As measured."""
        return self.profile.memory.constant_bytes

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """From the fit; work a unit does not have (an embedding's I, a whole head's I and W) takes no time."""
        fit = self.alone.get((unit, kind))
        return np.zeros(work.tokens.shape) if fit is None else fit.seconds(work)

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Interpolated in the number of tokens. Fewer than measured have no fewer kernels, and more have no more."""
        return np.interp(work.tokens, *self.launches.get((unit, kind), (np.zeros(1), np.zeros(1))))

    @property
    def most_graph_bytes(self) -> int | None:
        """As measured; None for several shards, whose passes meet in the middle."""
        return self.profile.memory.most_graph_bytes if self.tp == 1 else None

    def graph_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """Bytes of the nearest measured point that is at least as large. More tokens hardly need more kernels."""
        nearest = self._nearest(self.profile.memory.graphs, (unit, kind), batch * length, prefix)
        return 0 if nearest is None else nearest.num_bytes

    def collective_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """An estimate: the time of a shard's pass beyond 1 / tp of the whole unit's; 0 if that was not measured.

        It includes the time that products of shards lose by being smaller, so on CUDA pairs hide less than is
        predicted. On the host it is 0: the cores that compute also move the messages.
        """
        whole = self.whole.get((unit, kind))
        if whole is None:
            return np.zeros(work.tokens.shape)
        seconds: Floats = np.maximum(self.unit_seconds(unit, kind, work) - whole.seconds(work) / self.tp, 0.0)
        return seconds

    def operation_seconds(self, spec: ModelSpec, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """Norms and activations as measured; other operations have their shares of the rest of F, and collectives."""
        forward = self.unit_seconds(unit, Kind.F, work)
        selective = self._selective_seconds(unit, work, forward)
        if operation in selective:
            return selective[operation]
        left = np.maximum(forward - sum(selective.values()), 0.0)
        waiting = np.minimum(self.collective_seconds(unit, Kind.F, work), left)
        seconds: Floats = flops_share(spec, unit, operation, work) * (left - waiting)
        collectives = unit_collectives(unit, Kind.F, Sharding(self.tp, self.profile.sequence_parallel))
        if collectives:
            own = sum(collective in COLLECTIVES_OF.get(operation, ()) for collective in collectives)
            seconds = seconds + waiting * own / len(collectives)
        return seconds

    def _selective_seconds(self, unit: UnitKind, work: Work, forward: Floats) -> dict[Operation, Floats]:
        """Seconds of the operations without products, from the records of R, at most those of F. Norms of all units are
        alike, and the time of an MLP beyond its norm is its activation.
        """
        norm = np.minimum(self.unit_seconds(UnitKind.ATTENTION, Kind.R, work), forward)
        if unit is UnitKind.ATTENTION:
            return {Operation.NORM: norm}
        both = np.minimum(self.unit_seconds(UnitKind.MLP, Kind.R, work), forward)
        norm = np.minimum(norm, both)
        return {Operation.NORM: norm, Operation.ACTIVATE: both - norm}

    def slowdown(self, unit: UnitKind, kind: Kind) -> float:
        """The median measured ratio of together to alone, at least 1."""
        return self.slowdowns.get((unit, kind), 1.0)

    def transient_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """Bytes of the nearest measured point that is at least as large; beyond all points, in proportion to tokens."""
        tokens = batch * length
        nearest = self._nearest(self.profile.memory.transients, (unit, kind), tokens, prefix)
        if nearest is None:
            return 0
        return -(-nearest.num_bytes * max(tokens, nearest.batch * nearest.length) // (nearest.batch * nearest.length))

    def _nearest(self, among: Iterable[TransientRecord], key: Key, tokens: int, prefix: int) -> TransientRecord | None:
        """The nearest point that is at least as large; without one the nearest of all."""
        records = [r for r in among if (r.unit, r.kind) == key and _belongs(r, self.tp, self.head_parts)]
        enough = [r for r in records if r.batch * r.length >= tokens and r.prefix >= prefix] or records
        return min(enough, key=lambda r: (abs(r.batch * r.length - tokens), abs(r.prefix - prefix)), default=None)

    def transfer(self, source: Devices, target: Devices) -> tuple[Floats, Floats]:
        """As measured; a pair of devices without a measurement is as slow as the slowest measured link."""
        most = len(self.links[0]) - 1
        latency, per_byte = self.links[:, np.minimum(source, most), np.minimum(target, most)]
        return latency, per_byte

    def all_reduce_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """As `_collective_seconds`."""
        return self._collective_seconds(Collective.SUM, num_bytes, len(devices))

    def reduce_scatter_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """As `_collective_seconds`."""
        return self._collective_seconds(Collective.SCATTER, num_bytes, len(devices))

    def all_gather_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """As `_collective_seconds`."""
        return self._collective_seconds(Collective.GATHER, num_bytes, len(devices))

    def gradient_sum_seconds(self, num_bytes: int, devices: Sequence[int], *, scattered: bool) -> float:
        """As `_collective_seconds`, measured with the conversions of `reduction_type`."""
        collective = Collective.SCATTER if scattered else Collective.SUM
        return self._collective_seconds(collective, num_bytes, len(devices), self.reduction_type)

    def _collective_seconds(
        self,
        collective: Collective,
        num_bytes: int,
        num_devices: int,
        reduction_type: ReductionType = ReductionType.FP32,
    ) -> float:
        """Interpolated over the sizes measured for the nearest number of ranks, in proportion beyond the largest.

        If only sums were measured, a reduce-scatter or all-gather takes half of one: it is one of a ring's two passes.
        """
        of_type = [record for record in self.profile.collectives if record.reduction_type is reduction_type]
        records = [record for record in of_type if record.collective is collective]
        if num_devices < 2:
            return 0.0
        if not records:
            is_sum = collective is Collective.SUM
            return 0.0 if is_sum else self._collective_seconds(Collective.SUM, num_bytes, num_devices) / 2
        nearest = min({record.num_ranks for record in records}, key=lambda count: (abs(count - num_devices), -count))
        points = sorted((record.num_bytes, record.seconds) for record in records if record.num_ranks == nearest)
        sizes, seconds = np.array(points, dtype=np.float64).T
        return float(np.interp(num_bytes, sizes, seconds)) * max(num_bytes / float(sizes[-1]), 1.0)

    def optimizer_seconds(self, num_parameters: int) -> float:
        """Interpolated over the measured sizes; beyond them on the line of the nearest two, but never negative."""
        records = [record for record in self.profile.optimizer if record.moment_type is self.moment_type]
        points = sorted((record.num_parameters, record.seconds) for record in records)
        return _on_line(points, num_parameters) if points else 0.0


def _on_line(points: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds at ``size`` by the measured (size, seconds) ``points``, in order; in proportion to the size if
    there is one point.
    """
    sizes, seconds = np.array(points, dtype=np.float64).T
    proportion = seconds[[0, -1]] / sizes[[0, -1]]
    first, last = (
        np.clip(np.diff(seconds)[[0, -1]] / np.diff(sizes)[[0, -1]], 0.0, proportion) if len(points) > 1 else proportion
    )
    inside = float(np.interp(size, sizes, seconds))
    return inside + float(last * max(size - sizes[-1], 0.0) - first * max(sizes[0] - size, 0.0))


REQUIRED = PASSES_WITH_WORK
REQUIRED_OF_PARTS = ((UnitKind.HEAD, Kind.I), (UnitKind.HEAD, Kind.W))
"""Passes that are also required for a head in several parts: the F of a part does not include its whole backward."""


def measured_cost(
    profile: Profile,
    tp: int = 1,
    head_parts: int = 1,
    moment_type: MomentType = MomentType.FP32,
    reduction_type: ReductionType = ReductionType.FP32,
) -> MeasuredCost:
    """Fit the measurements of ``tp`` shards with a head in ``head_parts`` units, moments in ``moment_type``, and
    gradients that replicas exchange in ``reduction_type``.

    Raises `UserError` if a pass has no measurement or one that took no time.
    """
    groups: dict[Key, list[UnitRecord]] = {}
    for record in profile.units:
        if not _belongs(record, tp, head_parts):
            continue
        seconds = (record.seconds(together=True), record.seconds(together=False))
        if min(*seconds, record.batch, record.length) <= 0 or record.prefix < 0:
            raise _useless(f"{record.unit} {record.kind} of {record.length} tokens has no positive time")
        groups.setdefault((record.unit, record.kind), []).append(record)
    required = REQUIRED if head_parts == 1 else (*REQUIRED, *REQUIRED_OF_PARTS)
    missing = [f"{unit} {kind}" for unit, kind in required if not _used(groups.get((unit, kind), ()))]
    if missing:
        degrees = [f"tp {tp}"] * (tp > 1) + [f"headParts {head_parts}"] * (head_parts > 1)
        where = f" at {' and '.join(degrees)}" if degrees else ""
        raise _useless(f"holds no measurement of {', '.join(missing)}{where}")
    alone = {key: fit_records(_used(records), together=False) for key, records in groups.items()}
    runs_on_device = any(record.host_seconds is not None for record in profile.units)
    whole = measured_cost(profile).alone if tp > 1 and runs_on_device and 1 in profile.tp_degrees else {}
    launches = {
        key: _launches(records) for key, records in groups.items() if any(record.host_seconds for record in records)
    }
    slowdowns = {key: _slowdown(records) for key, records in groups.items()}
    reports = tuple(_report(key, records, alone[key]) for key, records in groups.items())
    return MeasuredCost(
        profile=profile,
        tp=tp,
        head_parts=head_parts,
        alone=alone,
        whole=whole,
        launches=launches,
        slowdowns=slowdowns,
        links=_link_table(profile.links),
        reports=reports,
        moment_type=moment_type,
        reduction_type=reduction_type,
    )


def _belongs(record: UnitRecord | TransientRecord, tp: int, head_parts: int) -> bool:
    """Whether the record is for ``tp`` shards and ``head_parts`` parts; only units of the head depend on the latter."""
    return record.tp == tp and record.head_parts == (head_parts if record.unit is UnitKind.HEAD else 1)


def _useless(what: str) -> UserError:
    return UserError(what=what, where="profile", remedy="run penstock profile again")


def _link_table(links: Sequence[LinkRecord]) -> Floats:
    """[latency seconds or seconds per byte, source, target], with one more row and column for devices beyond."""
    size = 2 + max((max(link.source, link.target) for link in links), default=-1)
    table = np.zeros((2, size, size))
    if links:
        slowest = min(links, key=lambda link: link.bytes_per_second)
        table[:] = np.array([slowest.latency_seconds, 1.0 / slowest.bytes_per_second])[:, None, None]
    for link in links:
        table[:, link.source, link.target] = link.latency_seconds, 1.0 / link.bytes_per_second
    return table


def _used(records: Iterable[UnitRecord]) -> list[UnitRecord]:
    return [record for record in records if not record.held_out]


def _launches(records: Iterable[UnitRecord]) -> tuple[Floats, Floats]:
    """Token counts, ascending, and the mean of the host's times of launches at each."""
    tokens, places = np.unique([record.batch * record.length for record in records], return_inverse=True)
    seconds = np.bincount(places, weights=[record.host_seconds or 0.0 for record in records])
    return tokens.astype(np.float64), seconds / np.bincount(places)


def _slowdown(records: Sequence[UnitRecord]) -> float:
    return max(float(np.median([r.seconds(together=True) / r.seconds(together=False) for r in records])), 1.0)


def _report(key: Key, records: Sequence[UnitRecord], fit: Fit) -> FitReport:
    errors = {held: [_error(r, fit) for r in records if r.held_out is held] for held in (False, True)}
    return FitReport(
        unit=key[0],
        kind=key[1],
        fitted_error=float(np.mean(errors[False])),
        held_out_error=float(np.mean(errors[True])) if errors[True] else float("nan"),
        num_records=len(records),
        tp=records[0].tp,
        head_parts=records[0].head_parts,
    )


def _error(record: UnitRecord, fit: Fit) -> float:
    predicted = float(fit.seconds(_work(record)))
    measured = record.seconds(together=False)
    return abs(predicted - measured) / measured


def _work(record: UnitRecord) -> Work:
    return Work.of(record.batch, record.length, record.prefix)


def fit_points(profile: Profile) -> tuple[FitPoint, ...]:
    """Every measured point with the fitted model's time for it while all ranks compute."""
    costs = {degrees: measured_cost(profile, *degrees) for degrees in profile.degrees}

    def predicted(record: UnitRecord) -> float:
        cost = costs[record.tp, record.head_parts]
        alone = float(cost.unit_seconds(record.unit, record.kind, _work(record)))
        return alone * cost.slowdown(record.unit, record.kind)

    return tuple(FitPoint(record=record, predicted_seconds=predicted(record)) for record in profile.units)
