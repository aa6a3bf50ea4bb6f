"""Times units' F, I and W as whole actions of one-unit stages, in the order and with the neighbours of a step.

Several blocks with weights and buffers of their own take turns, so that a unit finds the caches as cold as in training.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.core.layout import Precision, SlotKind, stage_slot_bytes
from penstock.core.model import ModelSpec, Unit, UnitKind
from penstock.core.schedule import Kind
from penstock.trainer.clock import Clock
from penstock.trainer.memory import peak_bytes, reset_peak, resident_bytes
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.grid import Point
from penstock.trainer.stage import Stage
from penstock.trainer.units.views import slot_views
from penstock.trainer.units.workspace import Workspace, workspace_bytes

MOST_BLOCKS = 4

Key = tuple[UnitKind, Kind]
Samples = dict[Key, list[float]]

_PER_SLICE = (
    SlotKind.INPUT,
    SlotKind.OUTPUT,
    SlotKind.ACTIVATIONS,
    SlotKind.LINEAR_INPUTS,
    SlotKind.OUTPUT_GRADIENTS,
    SlotKind.SENT_GRADIENT,
    SlotKind.RECEIVED_GRADIENT,
    SlotKind.HEAD_GRADIENT,
)
_PER_SEQUENCE = (SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS)


@dataclass(frozen=True, slots=True)
class _Bench:
    """A one-unit stage and its slots at one point."""

    unit: Unit
    stage: Stage
    views: dict[SlotKind, dict[int, dict[str, Tensor]]]


class UnitTimer:
    """Embedding, a few blocks and head, ready to be timed at any point of the grid."""

    def __init__(
        self, spec: ModelSpec, precision: Precision, sequence_length: int, device: torch.device, clock: Clock
    ) -> None:
        self._spec, self._precision, self._length = spec, precision, sequence_length
        self._device, self._clock = device, clock
        blocks = min(spec.layers, MOST_BLOCKS)
        self._units = (*spec.units[: 1 + 2 * blocks], spec.units[-1])
        self._parameters = [
            StageParameters(spec, u.index, u.index + 1, precision=precision, device=device, seed=0) for u in self._units
        ]

    def measure(self, point: Point, repeats: int) -> Samples:
        """Seconds of every pass of every unit at ``point``, one warm-up apart."""
        benches = self._benches(point)
        ids = torch.randint(self._spec.vocab, (point.batch, point.length), device=self._device)
        samples: Samples = defaultdict(list)
        for repeat in range(repeats + 1):
            taken = self._once(benches, point, ids)
            if repeat:
                for key, seconds in taken:
                    samples[key].append(seconds)
        return samples

    def _once(self, benches: list[_Bench], point: Point, ids: Tensor) -> list[tuple[Key, float]]:
        """F in order, I and W in reverse: one slice's visit to a rank."""
        start, stop = point.prefix, point.prefix + point.length
        taken = [self._timed(b, Kind.F, partial(_forward, b, start, stop, ids)) for b in benches]
        for bench in reversed(benches):
            if bench.unit.kind in (UnitKind.ATTENTION, UnitKind.MLP):
                back = partial(bench.stage.backward_input, bench.views, start, stop, fresh_dkv=False)
                taken.append(self._timed(bench, Kind.I, back))
        for bench in reversed(benches):
            if bench.unit.kind is not UnitKind.HEAD:
                back = partial(bench.stage.backward_weight, bench.views, start, token_ids=ids)
                taken.append(self._timed(bench, Kind.W, back))
        return taken

    def _timed(self, bench: _Bench, kind: Kind, action: Callable[[], object]) -> tuple[Key, float]:
        begin = self._clock()
        action()
        return (bench.unit.kind, kind), self._clock() - begin

    def transients(self, point: Point) -> dict[Key, int]:
        """Bytes each pass takes beyond its slots: the declared workspace and what the kernels allocate themselves."""
        benches = {bench.unit.kind: bench for bench in self._benches(point)}
        ids = torch.randint(self._spec.vocab, (point.batch, point.length), device=self._device)
        start, stop = point.prefix, point.prefix + point.length
        found: dict[Key, int] = {}
        for kind, bench in benches.items():
            declared = self._workspace_bytes(bench.unit, point)
            found[kind, Kind.F] = declared + self._growth(partial(_forward, bench, start, stop, ids))
            if kind in (UnitKind.ATTENTION, UnitKind.MLP):
                back = partial(bench.stage.backward_input, bench.views, start, stop, fresh_dkv=False)
                found[kind, Kind.I] = declared + self._growth(back)
        return found

    def _growth(self, action: Callable[[], object]) -> int:
        action()
        reset_peak(self._device)
        before = resident_bytes() if self._device.type == "cpu" else torch.cuda.memory_allocated(self._device)
        action()
        return max(peak_bytes(self._device) - before, 0)

    def _workspace_bytes(self, unit: Unit, point: Point) -> int:
        return workspace_bytes(self._spec, self._precision, unit.index, unit.index + 1, point.tokens)

    def _benches(self, point: Point) -> list[_Bench]:
        size = max(self._workspace_bytes(unit, point) for unit in self._units)
        workspace = Workspace(size, self._device)
        return [self._bench(u, p, workspace, point) for u, p in zip(self._units, self._parameters, strict=True)]

    def _bench(self, unit: Unit, parameters: StageParameters, workspace: Workspace, point: Point) -> _Bench:
        first, stop = unit.index, unit.index + 1
        stage = Stage(self._spec, first, stop, parameters=parameters, workspace=workspace, sequence_length=self._length)
        views = {slot: self._slot(first, stop, slot, point.batch, point.length) for slot in _PER_SLICE}
        views |= {slot: self._slot(first, stop, slot, point.batch, self._length) for slot in _PER_SEQUENCE}
        return _Bench(unit, stage, views)

    def _slot(self, first: int, stop: int, slot: SlotKind, batch: int, tokens: int) -> dict[int, dict[str, Tensor]]:
        num_bytes = stage_slot_bytes(self._spec, self._precision, first, stop, slot, batch, tokens)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        views = slot_views(memory, self._spec, self._precision, first, stop, slot, batch, tokens)
        for tensors in views.values():
            for tensor in tensors.values():
                tensor.normal_(std=0.1) if tensor.is_floating_point() else tensor.zero_()
        return views


def _forward(bench: _Bench, start: int, stop: int, ids: Tensor) -> None:
    kind = bench.unit.kind
    bench.stage.forward(
        bench.views,
        start,
        stop,
        token_ids=ids if kind is UnitKind.EMBEDDING else None,
        labels=ids if kind is UnitKind.HEAD else None,
        gradient_scale=1e-6,
    )


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    """The median, and the interquartile range over it."""
    middle = statistics.median(samples)
    if len(samples) < 4:
        return middle, (max(samples) - min(samples)) / middle
    low, _, high = statistics.quantiles(samples, n=4)
    return middle, (high - low) / middle
