"""The compute actions of one rank: each calls its stage on tensors of the arena.

Shape letters: M micro-batches, B sequences of one micro-batch, N sequences of all, S tokens of a sequence, P slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from penstock.core.layout import NOTHING_REMADE, Remade, SlotKind
from penstock.core.plan import Plan
from penstock.core.program import Instruction, RankProgram
from penstock.core.roles import G_IN, G_OUT, PREFIX_KINDS, RA, RL, A, L, SlotName, W, X, Y
from penstock.core.schedule import Action, Kind, Part
from penstock.core.scratch import scratch_bytes, segment_bytes
from penstock.core.sharding import Sharding
from penstock.trainer.arena import Arena, SlotTensors
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.graphs import Graphs, Recordable, can_record
from penstock.trainer.interpreter import Operation, nothing
from penstock.trainer.optimizer_step import OptimizerStep
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import NO_SHARDS, Pass, Shards, Work, run_pair, run_pass
from penstock.trainer.units.cross_entropy import Scale
from penstock.trainer.units.views import SlotViews, joined, scratch_views, segment_views

CPU = torch.device("cpu")

_Result = TypeVar("_Result")

_Steps = Callable[[], Pass[object]]
"""Creates the pass of an action, ready to run."""

_Layout = tuple[int, int, int, int, Sharding, Remade]
"""Units [first, stop), sequences, tokens, sharding, and the operations that units run again: the shape of the buffers
that a forward does not keep.
"""

_OF_STAGE = {RA: A, RL: L}
"""Slot kinds that a stage knows by another name: it does not distinguish buffers that R recomputes."""


class StageExecutor:
    """`penstock.trainer.interpreter.Executor` on real tensors.

    ``stages`` holds this rank's stages by number. ``shards`` is the access to the shards that share their units.
    ``token_ids_NS`` and ``labels_NS`` hold the step's tokens and labels, one micro-batch after the other, and
    ``losses_MP`` the summed loss of every slice. These tensors never move, so operations are bound to them once. On
    CUDA compute actions are recorded in the warm-up and replayed from then on (`penstock.trainer.graphs`). ``poison``
    fills freed slots with NaN.
    """

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        stages: Mapping[int, Stage],
        optimizer_step: OptimizerStep,
        *,
        device: torch.device,
        shards: Shards = NO_SHARDS,
        poison: bool = False,
    ) -> None:
        self._shards = shards
        self._plan, self._stages, self._optimizer_step, self._poison = plan, stages, optimizer_step, poison
        self._program, self._slots = program, program.slots
        self._index_of: dict[SlotName, int] = {
            (s.kind, s.stage, s.microbatch, s.slice): index for index, s in enumerate(program.slots)
        }
        self._arena = Arena(program, plan, device)
        self._remade = plan.remade
        self._with_r = {(i.action.stage, *_cell(i)) for i in program.instructions if i.action.kind is Kind.R}
        self._scratch = self._make_scratch(device)
        batch_shape = (plan.num_sequences, plan.sequence_length)
        self.token_ids_NS = torch.zeros(batch_shape, dtype=torch.int64, device=device)
        self.labels_NS = torch.zeros(batch_shape, dtype=torch.int64, device=device)
        losses_shape = (plan.num_microbatches, len(plan.slices))
        self.losses_MP = torch.zeros(losses_shape, dtype=torch.float64, device=device)
        self._gradient_scale: Scale = 1.0
        if device.type == "cuda":
            self._gradient_scale = torch.ones((), dtype=accumulate_dtype(plan.precision), device=device)
        # Shards communicate in the middle of a pass, through NCCL or the host: such passes are launched kernel by
        # kernel
        self._graphs = Graphs(device) if plan.tp == 1 and can_record(device) else None
        self._recordable: dict[Action, Recordable] = {}

    def scale_gradients(self, scale: float) -> None:
        """Scale gradients of the following actions: they are those of ``scale`` times the summed loss."""
        if isinstance(self._gradient_scale, Tensor):
            self._gradient_scale.fill_(scale)
        else:
            self._gradient_scale = scale

    def _make_scratch(self, device: torch.device) -> Tensor:
        """Memory for buffers that a forward does not keep, and for those that a backward recomputes itself."""
        model, precision = self._plan.model, self._plan.precision
        instructions = itertools.chain.from_iterable(map(self._program.apart, self._program.instructions))
        layouts = {self._dropped_layout(instruction) for instruction in instructions if instruction.action.is_compute}
        needed_bytes = [
            scratch_bytes(model, precision, *layout)
            if kind is Kind.F
            else segment_bytes(model, precision, *layout, is_split=kind is Kind.I)
            for kind, layout in filter(None, layouts)
        ]
        return torch.empty(max(needed_bytes, default=0), dtype=torch.uint8, device=device)

    def _dropped_layout(self, instruction: Instruction) -> tuple[Kind, _Layout] | None:
        """The kind of an action that needs scratch memory for buffers that its slice does not keep, with their shape;
        None for other actions. A backward needs that memory unless an R comes before it.
        """
        plan, stage, kind = self._plan, instruction.action.stage, instruction.action.kind
        if not self._remade[stage] or kind not in (Kind.F, Kind.B, Kind.I):
            return None
        microbatch, part = _cell(instruction)
        if kind is not Kind.F and (stage, microbatch, part) in self._with_r:
            return None
        shape = (plan.size_of(microbatch), plan.slices_of(microbatch)[part])
        return kind, (*plan.stages[stage], *shape, plan.sharding, self._remade[stage])

    def _remade_inside(self, instruction: Instruction) -> Remade:
        """The operations that a backward runs again itself."""
        return NOTHING_REMADE if self._dropped_layout(instruction) is None else self._remade[instruction.action.stage]

    def compute(self, instruction: Instruction) -> Operation:
        if self._graphs is None:
            return self.launched(instruction)
        action = instruction.action
        if action not in self._recordable:
            num_tokens = max(self._num_tokens(part) for part in self._program.apart(instruction))
            self._recordable[action] = Recordable(self.launched(instruction), num_tokens)
        return self._recordable[action]

    def launched(self, instruction: Instruction) -> Operation:
        """The action, launched kernel by kernel."""
        if instruction.action.children:
            return self._pair(instruction)
        return self._run(self._steps(instruction))

    def _steps(self, instruction: Instruction) -> _Steps:
        return _COMPUTE[instruction.action.kind](self, instruction)

    def _pair(self, instruction: Instruction) -> Operation:
        """Both children of a pair in turns, each in its own region of the workspace that all stages share."""
        first, second = map(self._steps, self._program.apart(instruction))
        shards, enter = self._shards, self._stages[instruction.action.stage].workspace.enter
        return lambda: run_pair(first(), second(), shards, enter)

    def message(self, slot: int) -> Tensor:
        return self._arena.message(slot)

    def warm_up(self, instructions: Sequence[Instruction]) -> None:
        """Run one action of each stage, kind, slice, part and micro-batch size on whatever its slots hold, so that
        every shape runs once. If actions can be recorded, record and replay as many as `Graphs.record_all` allows.
        """
        first: dict[tuple[Kind, int, int, Part | None, bool], Instruction] = {}
        for instruction in itertools.chain.from_iterable(map(self._program.apart, instructions)):
            action = instruction.action
            if action.kind in _COMPUTE:
                microbatch, part = _cell(instruction)
                shape = (part, action.part, self._plan.is_remainder(microbatch))
                first.setdefault((action.kind, action.stage, *shape), instruction)
        for instruction in first.values():
            launched = self.launched(instruction)
            if self._graphs is None:
                launched()
            else:
                self._graphs.warm_up(launched)
        if self._graphs is not None:
            self._graphs.record_all(self._recordable.values())
        self.losses_MP.zero_()

    def free(self, instruction: Instruction) -> Operation:
        """The Program manages slots, so there is nothing to do unless slots are poisoned."""
        return partial(self._arena.poison, instruction.frees) if self._poison else nothing

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """Return a function that starts a reduction: of gradients, or of the vector with the norm."""
        return self._optimizer_step.reduction(instruction.action, self.losses_MP)

    def step(self, instruction: Instruction) -> Operation:
        return self._optimizer_step.step

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        return self._optimizer_step.gather(instruction.action)

    def evaluate(self, instruction: Instruction) -> Operation:
        """F without gradients."""
        stage, views, (start, stop), earlier = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        evaluate = partial(stage.evaluate, views, start, stop, earlier=earlier, token_ids=token_ids, labels=labels)
        return self._run(self._keeping_loss(instruction, evaluate))

    def logits_after(self, instruction: Instruction, position: Callable[[], int]) -> Callable[[], Tensor | None]:
        """F without gradients. On the first shard of a stage with the head or a part of it, it returns the logits that
        follow ``position``, or those that follow the slice's last token if that comes first.
        """
        stage, views, (start, stop), earlier = self._place(instruction)
        token_ids = self._token_ids(instruction)
        forward = partial(stage.logits_after, views, start, stop, earlier=earlier, token_ids=token_ids)
        return self._run(lambda: forward(position=min(position(), stop - 1)))

    def logit_rows(self, instruction: Instruction) -> tuple[int, slice]:
        """The size of the vocabulary, and the rows of it that the instruction's stage computes logits for."""
        rows = self._stages[instruction.action.stage].logit_rows
        return self._plan.model.vocab, slice(rows.start, rows.stop)

    def _forward(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop), earlier = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        units = _units(stage, instruction)
        forward = partial(stage.forward, views, start, stop, earlier=earlier, token_ids=token_ids, labels=labels)
        return self._keeping_loss(instruction, lambda: forward(gradient_scale=self._gradient_scale, units=units))

    def _run(self, make: Callable[[], Pass[_Result]]) -> Callable[[], _Result]:
        """Create the pass and run it, waiting for the other shards."""
        shards = self._shards
        return lambda: run_pass(make(), shards)

    def _keeping_loss(self, instruction: Instruction, forward: Callable[[], Pass[Tensor | None]]) -> _Steps:
        stage = self._stages[instruction.action.stage]
        units = _units(stage, instruction)
        if not stage.returns_loss or (units is not None and units.stop < stage.stop):
            return forward
        microbatch, part = _cell(instruction)
        slice_loss = self.losses_MP[microbatch, part]

        def keep() -> Pass[None]:
            loss = yield from forward()
            assert loss is not None, "the last stage gives a loss"
            slice_loss.copy_(loss)

        return keep

    def _recompute(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop), earlier = self._place(instruction)
        units, remade = _units(stage, instruction), self._remade[instruction.action.stage]
        recompute = partial(stage.recompute, views, start, stop, remade, earlier=earlier, units=units)
        return partial(recompute, token_ids=self._token_ids(instruction), labels=self._labels(instruction))

    def _backward_input(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop), earlier = self._place(instruction)
        backward = partial(
            stage.backward_input,
            views,
            start,
            stop,
            fresh_dkv=stop == self._plan.sequence_length,
            earlier=earlier,
            token_ids=self._token_ids(instruction),
            labels=self._labels(instruction),
            remade=self._remade_inside(instruction),
        )
        return lambda: backward(gradient_scale=self._gradient_scale)

    def _backward_weight(self, instruction: Instruction) -> _Steps:
        stage, views, (start, _), _ = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        units = _units(stage, instruction)
        backward = partial(stage.backward_weight, views, start, token_ids=token_ids, labels=labels, units=units)
        return lambda: backward(gradient_scale=self._gradient_scale)

    def _backward(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop), earlier = self._place(instruction)
        backward = partial(
            stage.backward,
            views,
            start,
            stop,
            fresh_dkv=stop == self._plan.sequence_length,
            earlier=earlier,
            token_ids=self._token_ids(instruction),
            labels=self._labels(instruction),
            remade=self._remade_inside(instruction),
        )
        return lambda: backward(gradient_scale=self._gradient_scale, units=_units(stage, instruction))

    def _place(self, instruction: Instruction) -> tuple[Stage, SlotViews, tuple[int, int], Sequence[SlotViews]]:
        """The stage, its views for the action, the slice's tokens [start, stop), and the views of earlier slices."""
        views, earlier = self._views(instruction), self._earlier(instruction)
        return self._stages[instruction.action.stage], views, self._range(instruction), earlier

    def _earlier(self, instruction: Instruction) -> Sequence[SlotViews]:
        """The keys and values of earlier slices that have slots of their own, and their gradients (`core.roles`)."""
        if not self._plan.prefix_by_slice:
            return ()
        stage, (microbatch, part) = instruction.action.stage, _cell(instruction)
        return [
            {
                kind: self._arena.tensors(self._index_of[kind, stage, microbatch, before])
                for kind in PREFIX_KINDS
                if (kind, stage, microbatch, before) in self._index_of
            }
            for before in range(part)
        ]

    def _num_tokens(self, instruction: Instruction) -> int:
        """Number of the slice's tokens, in all sequences of the micro-batch."""
        start, stop = self._range(instruction)
        return self._plan.size_of(_cell(instruction)[0]) * (stop - start)

    def _range(self, instruction: Instruction) -> tuple[int, int]:
        microbatch, part = _cell(instruction)
        slices = self._plan.slices_of(microbatch)
        start = sum(slices[:part])
        return start, start + slices[part]

    def rows_of(self, microbatch: int) -> slice:
        """The range of the micro-batch's sequences among all sequences."""
        start = microbatch * self._plan.microbatch
        return slice(start, start + self._plan.size_of(microbatch))

    def _token_ids(self, instruction: Instruction) -> Tensor | None:
        """Token ids [B, n] on the first stage, else None."""
        has_embedding = self._stages[instruction.action.stage].has_embedding
        return self._tokens_of(instruction, self.token_ids_NS) if has_embedding else None

    def _labels(self, instruction: Instruction) -> Tensor | None:
        """Labels [B, n] on the last stage and on all stages with a part of the head, else None."""
        needs_labels = self._stages[instruction.action.stage].needs_labels
        return self._tokens_of(instruction, self.labels_NS) if needs_labels else None

    def _tokens_of(self, instruction: Instruction, tokens_NS: Tensor) -> Tensor:
        microbatch, _ = _cell(instruction)
        return tokens_NS[self.rows_of(microbatch), slice(*self._range(instruction))]

    def _views(self, instruction: Instruction) -> dict[SlotKind, SlotTensors]:
        """The tensors that the action may access, under the slot names of its own stage."""
        action = instruction.action
        stage = self._stages[action.stage]
        views: dict[SlotKind, SlotTensors] = {A: {}, L: {}, W: {}}
        views |= self._dropped_views(instruction)
        for index in dict.fromkeys((*instruction.reads, *instruction.writes)):
            slot = self._slots[index]
            if slot.kind in PREFIX_KINDS and slot.slice not in (None, action.slice):
                continue  # the action only begins its live range, and `_earlier` returns its views
            if slot.stage == action.stage:
                kind = _OF_STAGE.get(slot.kind, slot.kind)
                views[kind] = joined(views.get(kind, {}), self._arena.tensors(index))
            elif slot.kind is X:
                views[Y] = {stage.stop - 1: _renamed(self._arena.tensors(index), X, Y)}
            else:
                assert slot.kind is G_IN, f"{action} touches {slot} of another stage"
                views[G_OUT] = {stage.first: _renamed(self._arena.tensors(index), G_IN, G_OUT)}
        return views

    def _dropped_views(self, instruction: Instruction) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
        dropped, model, precision = self._dropped_layout(instruction), self._plan.model, self._plan.precision
        if dropped is None:
            return {}
        kind, layout = dropped
        if kind is Kind.F:
            return scratch_views(self._scratch, model, precision, *layout)
        return segment_views(self._scratch, model, precision, *layout, is_split=kind is Kind.I)


_COMPUTE: dict[Kind, Callable[[StageExecutor, Instruction], _Steps]] = {
    Kind.F: StageExecutor._forward,
    Kind.B: StageExecutor._backward,
    Kind.I: StageExecutor._backward_input,
    Kind.W: StageExecutor._backward_weight,
    Kind.R: StageExecutor._recompute,
}


class EvaluationExecutor:
    """The forwards of a `StageExecutor` without gradients, for Programs with forwards and transfers only."""

    def __init__(self, training: StageExecutor) -> None:
        self._training = training
        self.message = training.message

    def compute(self, instruction: Instruction) -> Operation:
        return self._training.evaluate(instruction)

    def free(self, instruction: Instruction) -> Operation:
        """Evaluation has no such action."""
        raise _not_evaluated(instruction)

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """Evaluation has no such action."""
        raise _not_evaluated(instruction)

    def step(self, instruction: Instruction) -> Operation:
        """Evaluation has no such action."""
        raise _not_evaluated(instruction)

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        """Evaluation has no such action."""
        raise _not_evaluated(instruction)


class SamplingExecutor(EvaluationExecutor):
    """An evaluation that computes logits instead of losses.

    After a pass, the first shard with the head holds the ``logits`` [V] of the requested position on the CPU. A shard
    with some parts of the head holds their logits, and zeros for the other parts.
    """

    def __init__(self, training: StageExecutor) -> None:
        super().__init__(training)
        self._position = 0
        self.logits: Tensor | None = None

    def begin(self, position: int) -> None:
        """Request the logits after token ``position`` from the next pass."""
        self._position, self.logits = position, None

    def compute(self, instruction: Instruction) -> Operation:
        forward = self._training.logits_after(instruction, lambda: self._position)
        vocab, rows = self._training.logit_rows(instruction)

        def keep() -> None:
            logits = forward()
            if logits is not None:
                self.logits = logits.new_zeros(vocab, device=CPU) if self.logits is None else self.logits
                self.logits[rows].copy_(logits)

        return keep


def _not_evaluated(instruction: Instruction) -> ValueError:
    return ValueError(f"{instruction.action} is no part of evaluation")


def _units(stage: Stage, instruction: Instruction) -> range | None:
    """The units that the instruction is for; None for all."""
    part = instruction.action.part
    return None if part is None else range(stage.first + part.first, stage.first + part.stop)


def _cell(instruction: Instruction) -> tuple[int, int]:
    """Micro-batch and slice of an instruction."""
    action = instruction.action
    assert action.microbatch is not None, f"{action} names no micro-batch"
    assert action.slice is not None, f"{action} names no slice"
    return action.microbatch, action.slice


def _renamed(tensors: SlotTensors, own: SlotKind, other: SlotKind) -> Mapping[str, Tensor]:
    """The tensors of a neighbour's slot of kind ``own``, with the buffer renamed to this stage's kind ``other``."""
    (named,) = tensors.values()
    return {other.value if name == own.value else name: tensor for name, tensor in named.items()}
