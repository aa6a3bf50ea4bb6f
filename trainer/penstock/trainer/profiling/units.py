"""Times F, I, W and R of units as actions of one-unit stages, in the order of a step.

R runs the operations without matrix products. The cost of the others is F minus the cost of these
(`penstock.planner.fit`). Several blocks with separate weights and buffers run in turn, so that a unit finds the caches
as cold as in training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.core.layout import SlotKind
from penstock.core.model import Unit, UnitKind
from penstock.core.remaking import SELECTIVE
from penstock.core.schedule import Kind
from penstock.trainer.clock import Taken, Timer
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.graphs import can_record, graph_bytes, pool_bytes
from penstock.trainer.memory import peak_tensor_bytes, release_unused, reset_peak, tensor_bytes
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.grid import Point
from penstock.trainer.profiling.parts import Part
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import NO_SHARDS, Pass, Shards, run_pass
from penstock.trainer.units.cross_entropy import Scale
from penstock.trainer.units.views import SlotViews, UnitViews, slot_views
from penstock.trainer.units.workspace import Workspace

SLOWEST_SHARE, FEWEST_TO_CUT = 20, 5

STEADY = 1.15
"""Largest time of a part of a steady round, as a multiple of its fastest round."""

_GRADIENT_SCALE = 1e-6

Key = tuple[UnitKind, Kind]
Samples = Sequence[tuple[Key, Taken]]
"""Times of the passes of one visit, in their order."""

_GIVEN = (SlotKind.INPUT, SlotKind.RECEIVED_GRADIENT, SlotKind.KEYS_VALUES)
_BODY = (UnitKind.ATTENTION, UnitKind.MLP)


@dataclass(frozen=True, slots=True)
class _Bench:
    """A one-unit stage and its slots at one point. ``earlier`` has the slots of earlier slices, if each slice has slots
    of its own. ``is_whole``: the slice is the whole sequence.
    """

    unit: Unit
    stage: Stage
    views: SlotViews
    earlier: Sequence[SlotViews]
    is_whole: bool


class UnitTimer:
    """Measures times and memory of the units of a part at any point of its workload.

    All points share one buffer. With several shards each process has one of them, ``shard``, and all processes visit
    the same points in the same order, since their passes communicate over ``shards``.
    """

    def __init__(
        self, part: Part, device: torch.device, timer: Timer, *, shards: Shards = NO_SHARDS, shard: int = 0
    ) -> None:
        self._load, self._device, self._timer = part.load, device, timer
        self._shards, self._shard = shards, shard
        workspace, self._prefix = Workspace(part.workspace_bytes, device), Workspace(part.prefix_bytes, device)
        self._part = part
        self._stages = {unit: self._stage(unit, workspace) for unit in part.units}
        self._memory = torch.zeros(part.slot_bytes, dtype=torch.uint8, device=device)
        self._scale: Scale = _GRADIENT_SCALE
        if device.type == "cuda":
            wide = accumulate_dtype(self._load.precision)
            self._scale = torch.full((), _GRADIENT_SCALE, dtype=wide, device=device)

    @property
    def tp(self) -> int:
        """Number of shards over which units are divided."""
        return self._load.sharding.tp

    @property
    def head_parts(self) -> int:
        """Number of units into which the head is divided."""
        return self._load.model.head_parts

    def _stage(self, unit: Unit, workspace: Workspace) -> Stage:
        place = (self._load.model, unit.index, unit.index + 1)
        parameters = StageParameters(
            *place,
            sharding=self._load.sharding,
            shard=self._shard,
            precision=self._load.precision,
            device=self._device,
            seed=0,
        )
        length = self._load.sequence_length
        return Stage(*place, parameters=parameters, workspace=workspace, sequence_length=length, prefix=self._prefix)

    def visit(self, point: Point) -> Callable[[], Samples]:
        """Return a function that times the passes of one slice at ``point``. Its first call warms up.

        F runs in order, I and W in reverse, and R of blocks in order. If only the dependence on the prefix matters,
        embedding, head, W and R are left out. The embedding has an I only if shards gather its gradient, the head has I
        and W only if it is divided. R comes last, so that it does not change the caches for the other passes.
        """
        benches = self._benches(self._part.units_at(point), point)
        body = [bench for bench in benches if bench.unit.kind in _BODY]
        forward = benches if point.whole else body
        weights = [bench for bench in forward if self._has_work(bench.unit, Kind.W)] if point.whole else []
        inputs = [bench for bench in forward if self._has_work(bench.unit, Kind.I)]
        ids, run = self._token_ids(point), self._run
        actions = [
            *(((b.unit.kind, Kind.F), partial(run, partial(_forward, b, point, ids, self._scale))) for b in forward),
            *(
                ((b.unit.kind, Kind.I), partial(run, partial(_backward_input, b, point, ids, self._scale)))
                for b in reversed(inputs)
            ),
            *(
                ((b.unit.kind, Kind.W), partial(run, partial(_backward_weight, b, point, ids, self._scale)))
                for b in reversed(weights)
            ),
            *(((b.unit.kind, Kind.R), partial(run, partial(_recompute, b, point))) for b in body if point.whole),
        ]
        keys, take = [key for key, _ in actions], self._timer([action for _, action in actions])
        return lambda: list(zip(keys, take(), strict=True))

    def transients(self, point: Point) -> Iterator[tuple[Key, int]]:
        """Bytes that F and I take beyond their slots: the declared workspace, allocations of kernels, and memory that
        shards on the host keep for their exchanges.

        Passes follow each other as in a step. The heap of the host keeps freed memory in blocks that may be too small
        for later passes. Recorded passes allocate from a pool. The F of an evaluation, which is not recorded, allocates
        outside of it.
        """
        ids = self._token_ids(point)
        passes = []
        for bench in self._benches(self._part.one_of_each, point):
            passes.append((bench, Kind.F, partial(_forward, bench, point, ids, self._scale)))
            if bench.unit.kind is not UnitKind.EMBEDDING and self._has_work(bench.unit, Kind.I):
                passes.append((bench, Kind.I, partial(_backward_input, bench, point, ids, self._scale)))
        if self.tp > 1 or self._device.type == "cuda":
            for _, _, make in passes:
                self._run(make)  # allocates the memory that exchanges and cuBLAS keep
        release_unused(self._device)
        before, forward = tensor_bytes(self._device), 0
        for bench, kind, make in passes:
            reset_peak(self._device)
            self._run(make)
            growth = max(peak_tensor_bytes(self._device) - before, 0)
            if self.tp == 1 and can_record(self._device):
                forward = growth if kind is Kind.F else forward
                growth = forward + pool_bytes(partial(self._run, make), self._device)
            kept = 0 if self._device.type == "cuda" else self._load.exchange_bytes(bench.unit, kind, point)
            yield (bench.unit.kind, kind), self._load.workspace_bytes(bench.unit, point) + kept + growth

    def graphs(self, point: Point) -> Iterator[tuple[Key, int]]:
        """Bytes of the graph of each F, I and W, in addition to the pool; nothing where actions are not recorded."""
        if self.tp > 1 or not can_record(self._device):
            return
        ids = self._token_ids(point)
        for bench in self._benches(self._part.one_of_each, point):
            for kind, run in _PASSES.items():
                if self._has_work(bench.unit, kind):
                    make = partial(run, bench, point, ids, self._scale)
                    yield (bench.unit.kind, kind), graph_bytes(partial(self._run, make), self._device)

    def _has_work(self, unit: Unit, kind: Kind) -> bool:
        if unit.kind is UnitKind.HEAD:
            return kind is Kind.F or self.head_parts > 1
        return unit.kind in _BODY or kind is not Kind.I or self._load.sharding.by_tokens

    def _run(self, make: Callable[[], Pass[object]]) -> None:
        """Create the pass and run it, waiting for the other shards."""
        run_pass(make(), self._shards)

    def _token_ids(self, point: Point) -> Tensor:
        return torch.randint(self._load.model.vocab, (point.batch, point.length), device=self._device)

    def _benches(self, units: Sequence[Unit], point: Point) -> list[_Bench]:
        """Stages with all slots at ``point``. Slots that are read before any action writes them have random numbers."""
        benches, offset = [], 0
        for unit in units:
            views: dict[SlotKind, UnitViews] = {}
            for slot in SlotKind:
                memory = self._memory[offset : offset + self._load.slot_bytes(unit, slot, point)]
                shape = self._load.slot_shape(unit, slot, point)
                views[slot] = slot_views(memory, self._load.model, self._load.precision, *shape)
                offset += len(memory)
            _fill(views[slot] for slot in _GIVEN)
            for tensors in views[SlotKind.KEYS_VALUES_GRADIENTS].values():
                for tensor in tensors.values():
                    tensor.zero_()
            earlier = _cut_prefix(views, self._load.slices_up_to(point))
            is_whole = point.length == self._load.sequence_length
            benches.append(_Bench(unit, self._stages[unit], views, earlier, is_whole))
        return benches


def _cut_prefix(views: dict[SlotKind, UnitViews], slices: Sequence[int]) -> Sequence[SlotViews]:
    """Cut the keys and values of a whole sequence, and their gradients, into those of ``slices``. ``views`` keeps those
    of the last slice, and those of the others are returned. A single slice finds its own by position: nothing is cut.
    """
    if len(slices) == 1:
        return ()
    cut: list[dict[SlotKind, UnitViews]] = [{} for _ in slices]
    for slot, axis in ((SlotKind.KEYS_VALUES, 2), (SlotKind.KEYS_VALUES_GRADIENTS, 1)):
        start = 0
        for own, length in zip(cut, slices, strict=True):
            own[slot] = {
                unit: {name: tensor.narrow(axis, start, length) for name, tensor in named.items()}
                for unit, named in views[slot].items()
            }
            start += length
    *earlier, last = cut
    views |= last
    return earlier


def _fill(slots: Iterator[Mapping[int, Mapping[str, Tensor]]]) -> None:
    for slot in slots:
        for tensors in slot.values():
            for tensor in tensors.values():
                tensor.normal_(std=0.1)


def _forward(bench: _Bench, point: Point, ids: Tensor, scale: Scale) -> Pass[object]:
    return bench.stage.forward(
        bench.views,
        point.prefix,
        point.prefix + point.length,
        earlier=bench.earlier,
        token_ids=ids,
        labels=ids,
        gradient_scale=scale,
    )


def _backward_input(bench: _Bench, point: Point, ids: Tensor, scale: Scale) -> Pass[object]:
    return bench.stage.backward_input(
        bench.views,
        point.prefix,
        point.prefix + point.length,
        fresh_dkv=bench.is_whole,
        earlier=bench.earlier,
        labels=ids,
        gradient_scale=scale,
    )


def _backward_weight(bench: _Bench, point: Point, ids: Tensor, scale: Scale) -> Pass[object]:
    return bench.stage.backward_weight(bench.views, point.prefix, token_ids=ids, labels=ids, gradient_scale=scale)


_PASSES = {Kind.F: _forward, Kind.I: _backward_input, Kind.W: _backward_weight}


def _recompute(bench: _Bench, point: Point) -> Pass[object]:
    tokens, remade = (point.prefix, point.prefix + point.length), (frozenset(SELECTIVE),)
    return bench.stage.recompute(bench.views, *tokens, remade, earlier=bench.earlier)


def steady_rounds(seconds: Sequence[Sequence[float]]) -> list[int]:
    """The rounds in which no part took much longer than in its fastest round, so that nothing else used the machine.

    ``seconds`` has the time of each part of each round, 0 for parts that are not measured.
    """
    fastest = [min(column) for column in zip(*seconds, strict=True)]
    return [
        number
        for number, row in enumerate(seconds)
        if all(part <= STEADY * least for part, least in zip(row, fastest, strict=True))
    ]


def mean_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """The mean without the slowest twentieth (at least one sample), and the interquartile range divided by it. Fewer
    than `FEWEST_TO_CUT` samples all count. Of fewer than four samples the whole range is taken.

    The mean, because the times of actions add up and medians do not.
    """
    ordered = sorted(samples)
    fewer = -(-len(ordered) // SLOWEST_SHARE) if len(ordered) >= FEWEST_TO_CUT else 0
    middle = statistics.fmean(ordered[: len(ordered) - fewer])
    if len(ordered) < 4:
        return middle, (ordered[-1] - ordered[0]) / middle
    low, _, high = statistics.quantiles(ordered, n=4)
    return middle, (high - low) / middle
