"""A pipeline of stages called by hand in one process, on slots that hold exactly what the layout declares.

Every slot starts its life filled with NaN between two guards, is filled with NaN again when it is freed, and is shown
only to actions that `penstock.core.roles` lets touch it. So a read of anything undeclared turns up as NaN or KeyError,
and a write outside as a broken guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.core.layout import NOTHING_REMADE, REMADE_SLOTS, Parameter, Precision, SlotKind, stage_slot_bytes
from penstock.core.model import ModelSpec
from penstock.core.remaking import Remakes, full_remakes, remade_of
from penstock.core.roles import PREFIX_KINDS, READS_AND_WRITES
from penstock.core.schedule import Kind
from penstock.core.scratch import scratch_bytes, segment_bytes
from penstock.core.sharding import WHOLE, Sharding
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stage import Stage
from penstock.trainer.units.backends import AttentionBackend
from penstock.trainer.units.collectives import NO_SHARDS, Shards, run_pass
from penstock.trainer.units.cross_entropy import Scale
from penstock.trainer.units.views import SlotViews, UnitViews, joined, scratch_views, segment_views, slot_views
from penstock.trainer.units.workspace import Workspace, workspace_bytes

CPU = torch.device("cpu")
_GUARD_BYTES, _GUARD, _NAN = 64, 0x5A, 0xFF

Views = dict[SlotKind, dict[int, dict[str, Tensor]]]

_KEPT_AS = {remade: kept for kept, remade in REMADE_SLOTS.items()}
"""Under which name a stage knows the buffers that R makes again."""

WeightOrder = Callable[[list[tuple[int, int, int]]], Iterable[tuple[int, int, int]]]


@dataclass
class _Slot:
    memory: Tensor
    views: dict[int, dict[str, Tensor]]

    def check(self) -> None:
        assert bool((self.memory[:_GUARD_BYTES] == _GUARD).all()), "written before the slot"
        assert bool((self.memory[-_GUARD_BYTES:] == _GUARD).all()), "written behind the slot"


def poisoned_workspace(num_bytes: int, device: torch.device) -> Workspace:
    """A workspace whose memory is NaN where nothing was written."""
    workspace = Workspace(num_bytes, device)
    workspace.take(num_bytes, dtype=torch.uint8).fill_(_NAN)
    workspace.peak_bytes = 0
    return workspace


@dataclass
class HandPipeline:
    """Stages with unit boundaries ``cuts``, slices with token boundaries ``bounds``; runs one step of micro-batches.

    ``recompute`` says what every stage runs again, all that can be if it is true: before its backward, or ``inside`` of
    its I or of its B, which runs in two parts. With ``sharding`` it is the ``shard`` of each stage that ``shards``
    joins with the others.
    """

    spec: ModelSpec
    cuts: Sequence[int]
    bounds: Sequence[int]
    batch: int = 1
    precision: Precision = Precision.FP64
    seed: int = 0
    recompute: bool | Sequence[Remakes] = False
    inside: Literal[Kind.B, Kind.I] | None = None
    backend: AttentionBackend | None = None
    device: torch.device = CPU
    sharding: Sharding = WHOLE
    shard: int = 0
    shards: Shards = NO_SHARDS
    stages: list[Stage] = field(init=False)
    workspaces: list[Workspace] = field(init=False)

    def __post_init__(self) -> None:
        longest = self.batch * max(stop - start for start, stop in pairwise(self.bounds))
        self.stages, self.workspaces = [], []
        for first, stop in pairwise(self.cuts):
            parameters = StageParameters(
                self.spec,
                first,
                stop,
                sharding=self.sharding,
                shard=self.shard,
                precision=self.precision,
                device=self.device,
                seed=self.seed,
            )
            needed = workspace_bytes(self.spec, self.precision, first, stop, longest, self.sharding)
            self.workspaces.append(poisoned_workspace(needed, self.device))
            self.stages.append(
                Stage(
                    self.spec,
                    first,
                    stop,
                    parameters=parameters,
                    workspace=self.workspaces[-1],
                    sequence_length=self.bounds[-1],
                    backend=self.backend,
                )
            )
        self._slots: dict[tuple[SlotKind, int, int, int], _Slot] = {}
        stages = list(pairwise(self.cuts))
        remakes = self.recompute
        if isinstance(remakes, bool):
            remakes = [full_remakes(self.spec, stage) if remakes else () for stage in stages]
        self.remade = [remade_of(self.spec, *each) for each in zip(stages, remakes, strict=True)]

    @property
    def weights(self) -> dict[str, Tensor]:
        """All master weights by global name."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, tensor in stage.parameters.master.items():
                fill_rows(stage.parameters.declared[name], found, tensor)
        return found

    @property
    def gradients(self) -> dict[str, Tensor]:
        """All gradients by global name, the copies of a tied matrix summed."""
        return joined_over_stages((s.parameters.declared, s.parameters.gradients) for s in self.stages)

    def step(self, ids: Tensor, labels: Tensor, scale: Scale, weight_order: WeightOrder | None = None) -> Tensor:
        """Forward and backward of all micro-batches of ``ids`` [M B, s]; the summed loss.

        ``weight_order`` permutes all (micro-batch, slice, stage) of W, run at the end; without it W follows its I.
        """
        groups = list(zip(torch.split(ids, self.batch), torch.split(labels, self.batch), strict=True))
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch, (some_ids, some_labels) in enumerate(groups):
            for part in range(len(self.bounds) - 1):
                loss += self._forward(microbatch, part, some_ids, some_labels, scale)
        deferred = []
        for microbatch, (some_ids, some_labels) in enumerate(groups):
            for part in reversed(range(len(self.bounds) - 1)):
                for index in reversed(range(len(self.stages))):
                    self._backward(microbatch, part, index, some_ids, some_labels, scale)
                    if self.inside is Kind.B:
                        continue
                    deferred.append((microbatch, part, index))
                    if weight_order is None:
                        self._backward_weight(*deferred.pop(), some_ids, some_labels, scale)
        for microbatch, part, index in weight_order(deferred) if weight_order else ():
            self._backward_weight(microbatch, part, index, *groups[microbatch], scale)
        assert not self._slots, f"never freed: {list(self._slots)}"
        return loss

    def _forward(self, microbatch: int, part: int, ids: Tensor, labels: Tensor, scale: Scale) -> float:
        start, stop = self.bounds[part], self.bounds[part + 1]
        loss = None
        for index, stage in enumerate(self.stages):
            views = self._views(Kind.F, index, microbatch, part)
            if index:
                sent = self._free(SlotKind.OUTPUT, index - 1, microbatch, part)
                pass_on(sent[stage.first - 1], views[SlotKind.INPUT][stage.first])
            forward = stage.forward(
                views,
                start,
                stop,
                token_ids=None if index else ids[:, start:stop],
                labels=labels[:, start:stop] if stage.needs_labels else None,
                gradient_scale=scale,
            )
            loss = run_pass(forward, self.shards)
        assert loss is not None
        return loss.item()

    def _backward(self, microbatch: int, part: int, index: int, ids: Tensor, labels: Tensor, scale: Scale) -> None:
        """I, or all of B."""
        stage, (start, stop) = self.stages[index], self.bounds[part : part + 2]
        own_labels = labels[:, start:stop] if stage.needs_labels else None
        token_ids = None if index else ids[:, start:stop]
        remade = self.remade[index]
        if remade and self.inside is None:
            views = self._views(Kind.R, index, microbatch, part)
            run_pass(stage.recompute(views, start, stop, remade, token_ids=token_ids, labels=own_labels), self.shards)
        views = self._views(self.inside or Kind.I, index, microbatch, part)
        if index < len(self.stages) - 1:
            sent = self._free(SlotKind.SENT_GRADIENT, index + 1, microbatch, part)
            pass_on(sent[stage.stop], views[SlotKind.RECEIVED_GRADIENT][stage.stop - 1])
        backward = partial(
            stage.backward if self.inside is Kind.B else stage.backward_input,
            views,
            start,
            stop,
            fresh_dkv=part == len(self.bounds) - 2,
            token_ids=token_ids,
            labels=own_labels,
            gradient_scale=scale,
            remade=remade if self.inside else NOTHING_REMADE,
        )
        for own in self._parts_of(stage):
            run_pass(backward(**own), self.shards)
        done = [SlotKind.INPUT, SlotKind.RECEIVED_GRADIENT, SlotKind.HEAD_GRADIENT]
        done += [SlotKind.ACTIVATIONS, SlotKind.REMADE_ACTIVATIONS]
        if self.inside is Kind.B:
            done += [SlotKind.LINEAR_INPUTS, SlotKind.REMADE_LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS]
        for kind in done + (list(PREFIX_KINDS) if part == 0 else []):
            self._free(kind, index, microbatch, part)

    def _parts_of(self, stage: Stage) -> list[dict[str, Any]]:
        """The units of every call of a backward: of a B two, unless the stage has only the head."""
        middle = min((stage.first + stage.stop) // 2, self.spec.first_head_unit)
        if self.inside is not Kind.B or middle <= stage.first:
            return [{}]
        return [{"units": range(middle, stage.stop)}, {"units": range(stage.first, middle)}]

    def _backward_weight(
        self, microbatch: int, part: int, index: int, ids: Tensor, labels: Tensor, scale: Scale
    ) -> None:
        stage, (start, stop) = self.stages[index], self.bounds[part : part + 2]
        views = self._views(Kind.W, index, microbatch, part)
        backward = stage.backward_weight(
            views,
            start,
            token_ids=None if index else ids[:, start:stop],
            labels=labels[:, start:stop] if stage.needs_labels else None,
            gradient_scale=scale,
        )
        run_pass(backward, self.shards)
        for kind in (SlotKind.LINEAR_INPUTS, SlotKind.REMADE_LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS):
            self._free(kind, index, microbatch, part)

    def _views(self, kind: Kind, index: int, microbatch: int, part: int) -> SlotViews:
        """What the action may touch; slots it is the first to touch start their lives."""
        slots = set[SlotKind]().union(*READS_AND_WRITES[kind])
        views: dict[SlotKind, UnitViews] = {}
        if self.remade[index] and kind in (Kind.F, self.inside):
            views.update(self._dropped(kind, index, part))
            slots -= {SlotKind.REMADE_ACTIVATIONS}
            slots -= {SlotKind.REMADE_LINEAR_INPUTS} if kind is Kind.B else set()
        for slot in slots:
            if not self._exists(slot, index):
                continue
            key = (slot, index, microbatch, 0 if slot in PREFIX_KINDS else part)
            if key not in self._slots:
                self._slots[key] = self._new(slot, index, part)
            name = _KEPT_AS.get(slot, slot)
            views[name] = joined(views.get(name, {}), self._slots[key].views)
        return views

    def _exists(self, slot: SlotKind, index: int) -> bool:
        if index == 0 and slot in (SlotKind.INPUT, SlotKind.SENT_GRADIENT):
            return False
        last = index == len(self.stages) - 1
        return slot not in ((SlotKind.OUTPUT, SlotKind.RECEIVED_GRADIENT) if last else (SlotKind.HEAD_GRADIENT,))

    def _new(self, slot: SlotKind, index: int, part: int) -> _Slot:
        stage = self.stages[index]
        tokens = self.bounds[-1] if slot in PREFIX_KINDS else self.bounds[part + 1] - self.bounds[part]
        place = (stage.first, stage.stop, slot, self.batch, tokens, self.sharding, self.remade[index])
        num_bytes = stage_slot_bytes(self.spec, self.precision, *place)
        memory = torch.full((num_bytes + 2 * _GUARD_BYTES,), _NAN, dtype=torch.uint8, device=self.device)
        memory[:_GUARD_BYTES] = memory[-_GUARD_BYTES:] = _GUARD
        inside = memory[_GUARD_BYTES:-_GUARD_BYTES]
        return _Slot(memory, slot_views(inside, self.spec, self.precision, *place))

    def _dropped(self, kind: Kind, index: int, part: int) -> Views:
        """What F gives up, or B or I recomputes inside."""
        stage, tokens = self.stages[index], self.bounds[part + 1] - self.bounds[part]
        place = (stage.first, stage.stop, self.batch, tokens, self.sharding, self.remade[index])
        if kind is not Kind.F:
            num_bytes = segment_bytes(self.spec, self.precision, *place, is_split=kind is Kind.I)
            memory = torch.full((num_bytes,), _NAN, dtype=torch.uint8, device=self.device)
            return segment_views(memory, self.spec, self.precision, *place, is_split=kind is Kind.I)
        num_bytes = scratch_bytes(self.spec, self.precision, *place)
        memory = torch.full((num_bytes,), _NAN, dtype=torch.uint8, device=self.device)
        return scratch_views(memory, self.spec, self.precision, *place)

    def _free(self, slot: SlotKind, index: int, microbatch: int, part: int) -> dict[int, dict[str, Tensor]]:
        """End a slot's life, if it has one; what it held is returned as copies."""
        found = self._slots.pop((slot, index, microbatch, 0 if slot in PREFIX_KINDS else part), None)
        if found is None:
            return {}
        found.check()
        copies = {u: {name: tensor.clone() for name, tensor in named.items()} for u, named in found.views.items()}
        found.memory.fill_(_NAN)
        return copies


def evaluate(pipeline: HandPipeline, ids: Tensor, labels: Tensor | None) -> list[Tensor | None]:
    """Per slice what the last stage returns without training: its loss, or without labels the logits that follow
    sequence 0, of all stages that have some. It is given scratch, hidden states in and out, keys and values, and
    nothing else.
    """
    batch = ids.shape[0]
    length = pipeline.bounds[-1]
    prefixes = [_new_views(pipeline, stage, SlotKind.KEYS_VALUES, batch, length) for stage in pipeline.stages]
    found: list[Tensor | None] = []
    for start, stop in pairwise(pipeline.bounds):
        sent = None
        results: list[Tensor] = []
        for stage, kv in zip(pipeline.stages, prefixes, strict=True):
            views = _evaluation_views(pipeline, stage, kv, batch, stop - start)
            if sent is not None:
                pass_on(sent, views[SlotKind.INPUT][stage.first])
            some_ids = ids[:, start:stop]
            if labels is None:
                forward = stage.logits_after(views, start, stop, position=stop - 1, token_ids=some_ids)
            else:
                forward = stage.evaluate(views, start, stop, token_ids=some_ids, labels=labels[:, start:stop])
            result = run_pass(forward, pipeline.shards)
            results += [] if result is None else [result.clone()]
            sent = views[SlotKind.OUTPUT][stage.stop - 1]
        found.append(torch.cat([each.reshape(-1) for each in results]).squeeze() if results else None)
    return found


def pass_on(sent: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """What a message does: tensors of a slot, to those of its neighbour's."""
    for one, other in zip(sent.values(), received.values(), strict=True):
        other.copy_(one)


def fill_rows(parameter: Parameter, found: dict[str, Tensor], tensor: Tensor) -> None:
    """Put a stage's rows into the whole tensor; what is there has to be equal in every bit."""
    whole = found.setdefault(parameter.name, tensor.new_full(parameter.shape, torch.nan))
    place = whole.narrow(parameter.axis, parameter.start, tensor.shape[parameter.axis])
    assert place.isnan().all() or torch.equal(place, tensor), f"the copies of {parameter.name} differ"
    place.copy_(tensor)


def joined_over_stages(stages: Iterable[tuple[Mapping[str, Parameter], Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors of all stages' rows by global name, the copies of a tied matrix summed."""
    total: dict[str, Tensor] = {}
    for declared, tensors in stages:
        for name, tensor in tensors.items():
            parameter = declared[name]
            whole = total.setdefault(name, tensor.new_zeros(parameter.shape))
            size = sum(piece.size for piece in parameter.pieces(1, 0))
            whole.narrow(parameter.axis, parameter.start, size).add_(tensor)
    return total


def _evaluation_views(
    pipeline: HandPipeline, stage: Stage, kv: dict[int, dict[str, Tensor]], batch: int, tokens: int
) -> Views:
    spec, precision, sharding = pipeline.spec, pipeline.precision, pipeline.sharding
    place = (stage.first, stage.stop, batch, tokens, sharding)
    memory = torch.full((scratch_bytes(spec, precision, *place),), _NAN, dtype=torch.uint8)
    views = scratch_views(memory, spec, precision, *place)
    for slot in (SlotKind.INPUT, SlotKind.OUTPUT):
        views[slot] = _new_views(pipeline, stage, slot, batch, tokens)
    views[SlotKind.KEYS_VALUES] = kv
    return views


def _new_views(
    pipeline: HandPipeline, stage: Stage, slot: SlotKind, batch: int, tokens: int
) -> dict[int, dict[str, Tensor]]:
    place = (stage.first, stage.stop, slot, batch, tokens, pipeline.sharding)
    memory = torch.full((stage_slot_bytes(pipeline.spec, pipeline.precision, *place),), _NAN, dtype=torch.uint8)
    return slot_views(memory, pipeline.spec, pipeline.precision, *place)


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error norm of a tensor relative to max(its gradient's norm, a thousandth of the global norm)."""
    assert found.keys() == expected.keys()
    total = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    if not total:  # no label counts: there is nothing to be relative to, and nothing may be found
        return max(float(gradient.norm()) for gradient in found.values())
    return max(
        float((found[name].double() - gradient).norm()) / max(float(gradient.norm()), 1e-3 * total)
        for name, gradient in expected.items()
    )
