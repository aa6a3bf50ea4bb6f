"""What the compute actions of one rank do: they call stages on the arena's tensors.

Shape letters: M micro-batches, B sequences of one, N sequences of all, S tokens of a sequence, P slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from penstock.core.layout import Remade, SlotKind
from penstock.core.plan import Plan
from penstock.core.program import Instruction, RankProgram
from penstock.core.roles import G_IN, G_OUT, RA, RL, A, L, W, X, Y
from penstock.core.schedule import Action, Kind, Part
from penstock.core.scratch import scratch_bytes
from penstock.core.sharding import Sharding
from penstock.trainer.arena import Arena, SlotTensors
from penstock.trainer.closing import Closing
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.graphs import Graphs, Recordable, can_record
from penstock.trainer.interpreter import Operation, nothing
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import NO_SHARDS, Pass, Shards, Work, run_pair, run_pass
from penstock.trainer.units.cross_entropy import Scale
from penstock.trainer.units.views import SlotViews, joined, scratch_views

CPU = torch.device("cpu")

_Result = TypeVar("_Result")

_Steps = Callable[[], Pass[object]]
"""Makes the pass of an action, ready to run."""

_OF_STAGE = {RA: A, RL: L}
"""Under which name a stage knows the buffers of a slot, which has no need to know what R makes again."""


class StageExecutor:
    """`penstock.trainer.interpreter.Executor` on real tensors.

    ``stages`` holds this rank's stages by number, ``shards`` is its access to those with which it shares their units.
    Tokens and labels of the step stand in ``token_ids_NS`` and ``labels_NS``, micro-batch after micro-batch, summed
    losses of every slice in ``losses_MP``: places that never move, so that operations are bound to them once. On CUDA
    compute actions are recorded there in the warm-up, and replayed from then on (`penstock.trainer.graphs`).
    ``poison`` fills freed slots with NaN.
    """

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        stages: Mapping[int, Stage],
        closing: Closing,
        *,
        device: torch.device,
        shards: Shards = NO_SHARDS,
        poison: bool = False,
    ) -> None:
        self._shards = shards
        self._plan, self._stages, self._closing, self._poison = plan, stages, closing, poison
        self._program, self._slots = program, program.slots
        self._arena = Arena(program, plan, device)
        self._remade = plan.remade
        self._recomputed = {(i.action.stage, *_cell(i)) for i in program.instructions if i.action.kind is Kind.R}
        self._scratch = self._make_scratch(device)
        batch = (plan.num_sequences, plan.sequence_length)
        self.token_ids_NS = torch.zeros(batch, dtype=torch.int64, device=device)
        self.labels_NS = torch.zeros(batch, dtype=torch.int64, device=device)
        losses = (plan.num_microbatches, len(plan.slices))
        self.losses_MP = torch.zeros(losses, dtype=torch.float64, device=device)
        self._gradient_scale: Scale = 1.0
        if device.type == "cuda":
            self._gradient_scale = torch.ones((), dtype=accumulate_dtype(plan.precision), device=device)
        # Shards meet in the middle of a pass, through NCCL or the host: what they do is launched kernel by kernel
        self._graphs = Graphs(device) if plan.tp == 1 and can_record(device) else None
        self._recordable: dict[Action, Recordable] = {}

    def scale_gradients(self, scale: float) -> None:
        """Gradients are from now on those of ``scale`` times the summed loss."""
        if isinstance(self._gradient_scale, Tensor):
            self._gradient_scale.fill_(scale)
        else:
            self._gradient_scale = scale

    def _make_scratch(self, device: torch.device) -> Tensor:
        """Memory for what forwards give up because a recompute follows."""
        layouts = {self._scratch_layout(*cell) for cell in self._recomputed}
        needed = [scratch_bytes(self._plan.model, self._plan.precision, *layout) for layout in layouts]
        return torch.empty(max(needed, default=0), dtype=torch.uint8, device=device)

    def _scratch_layout(self, stage: int, microbatch: int, part: int) -> tuple[int, int, int, int, Sharding, Remade]:
        plan = self._plan
        shape = (plan.size_of(microbatch), plan.slices_of(microbatch)[part])
        return (*plan.stages[stage], *shape, plan.sharding, self._remade[stage])

    def compute(self, instruction: Instruction) -> Operation:
        if self._graphs is None:
            return self.launched(instruction)
        action = instruction.action
        if action not in self._recordable:
            size = max(self._num_tokens(each) for each in self._program.apart(instruction))
            self._recordable[action] = Recordable(self.launched(instruction), size)
        return self._recordable[action]

    def launched(self, instruction: Instruction) -> Operation:
        """The action, kernel by kernel."""
        if instruction.action.children:
            return self._pair(instruction)
        return self._run(self._steps(instruction))

    def _steps(self, instruction: Instruction) -> _Steps:
        return _COMPUTE[instruction.action.kind](self, instruction)

    def _pair(self, instruction: Instruction) -> Operation:
        """Both children in turns, each with a lane of the workspace that all stages share."""
        first, second = map(self._steps, self._program.apart(instruction))
        shards, enter = self._shards, self._stages[instruction.action.stage].workspace.enter
        return lambda: run_pair(first(), second(), shards, enter)

    def message(self, slot: int) -> Tensor:
        return self._arena.message(slot)

    def warm_up(self, instructions: Sequence[Instruction]) -> None:
        """Run the first action of every stage, kind, slice, part and size of micro-batches on whatever its slots hold:
        each shape once. Where actions can be recorded, record and replay all of them then.
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
        """Nothing to do, since a slot's place is the Program's affair; poisons when asked to."""
        return partial(self._arena.poison, instruction.frees) if self._poison else nothing

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """What starts a sum of the rank's gradients, or of what the norm is made of."""
        return self._closing.reduction(instruction.action, self.losses_MP)

    def step(self, instruction: Instruction) -> Operation:
        return self._closing.step

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        return self._closing.gather(instruction.action.stage)

    def evaluate(self, instruction: Instruction) -> Operation:
        """F without gradients, for the same instruction."""
        stage, views, (start, stop) = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        evaluate = partial(stage.evaluate, views, start, stop, token_ids=token_ids, labels=labels)
        return self._run(self._keeping_loss(instruction, evaluate))

    def logits_after(self, instruction: Instruction, position: Callable[[], int]) -> Callable[[], Tensor | None]:
        """F without gradients; the last stage's first shard gives the logits that follow ``position``, or its slice's
        last token.
        """
        stage, views, (start, stop) = self._place(instruction)
        forward = partial(stage.logits_after, views, start, stop, token_ids=self._token_ids(instruction))
        return self._run(lambda: forward(position=min(position(), stop - 1)))

    def logit_rows(self, instruction: Instruction) -> tuple[int, slice]:
        """The size of the vocabulary, and the rows of it that the instruction's stage has logits of."""
        rows = self._stages[instruction.action.stage].logit_rows
        return self._plan.model.vocab, slice(rows.start, rows.stop)

    def _forward(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop) = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        forward = partial(stage.forward, views, start, stop, token_ids=token_ids, labels=labels)
        return self._keeping_loss(instruction, lambda: forward(gradient_scale=self._gradient_scale))

    def _run(self, make: Callable[[], Pass[_Result]]) -> Callable[[], _Result]:
        """Make the pass and run it, waiting for the other shards."""
        shards = self._shards
        return lambda: run_pass(make(), shards)

    def _keeping_loss(self, instruction: Instruction, forward: Callable[[], Pass[Tensor | None]]) -> _Steps:
        if not self._stages[instruction.action.stage].returns_loss:
            return forward
        microbatch, part = _cell(instruction)
        place = self.losses_MP[microbatch, part]

        def keep() -> Pass[None]:
            loss = yield from forward()
            assert loss is not None, "the last stage gives a loss"
            place.copy_(loss)

        return keep

    def _recompute(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop) = self._place(instruction)
        part = instruction.action.part
        units = None if part is None else range(stage.first + part.first, stage.first + part.stop)
        recompute = partial(stage.recompute, views, start, stop, self._remade[instruction.action.stage], units=units)
        return partial(recompute, token_ids=self._token_ids(instruction), labels=self._labels(instruction))

    def _backward_input(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop) = self._place(instruction)
        fresh_dkv, labels = stop == self._plan.sequence_length, self._labels(instruction)
        backward = partial(stage.backward_input, views, start, stop, fresh_dkv=fresh_dkv, labels=labels)
        return lambda: backward(gradient_scale=self._gradient_scale)

    def _backward_weight(self, instruction: Instruction) -> _Steps:
        stage, views, (start, _) = self._place(instruction)
        token_ids, labels = self._token_ids(instruction), self._labels(instruction)
        backward = partial(stage.backward_weight, views, start, token_ids=token_ids, labels=labels)
        return lambda: backward(gradient_scale=self._gradient_scale)

    def _backward(self, instruction: Instruction) -> _Steps:
        stage, views, (start, stop) = self._place(instruction)
        fresh_dkv, token_ids, labels = (
            stop == self._plan.sequence_length,
            self._token_ids(instruction),
            self._labels(instruction),
        )
        backward = partial(stage.backward, views, start, stop, fresh_dkv=fresh_dkv, token_ids=token_ids, labels=labels)
        return lambda: backward(gradient_scale=self._gradient_scale)

    def _place(self, instruction: Instruction) -> tuple[Stage, SlotViews, tuple[int, int]]:
        """The stage, what the action may touch, and its tokens [start, stop)."""
        return self._stages[instruction.action.stage], self._views(instruction), self._range(instruction)

    def _num_tokens(self, instruction: Instruction) -> int:
        """Of all sequences of the micro-batch."""
        start, stop = self._range(instruction)
        return self._plan.size_of(_cell(instruction)[0]) * (stop - start)

    def _range(self, instruction: Instruction) -> tuple[int, int]:
        microbatch, part = _cell(instruction)
        slices = self._plan.slices_of(microbatch)
        start = sum(slices[:part])
        return start, start + slices[part]

    def rows_of(self, microbatch: int) -> slice:
        """Where the micro-batch's sequences are among those of all."""
        start = microbatch * self._plan.microbatch
        return slice(start, start + self._plan.size_of(microbatch))

    def _token_ids(self, instruction: Instruction) -> Tensor | None:
        """[B, n] for the first stage."""
        embeds = self._stages[instruction.action.stage].has_embedding
        return self._tokens_of(instruction, self.token_ids_NS) if embeds else None

    def _labels(self, instruction: Instruction) -> Tensor | None:
        """[B, n] for the last stage, or all that have a part of the head."""
        predicts = self._stages[instruction.action.stage].needs_labels
        return self._tokens_of(instruction, self.labels_NS) if predicts else None

    def _tokens_of(self, instruction: Instruction, tokens_NS: Tensor) -> Tensor:
        microbatch, _ = _cell(instruction)
        return tokens_NS[self.rows_of(microbatch), slice(*self._range(instruction))]

    def _views(self, instruction: Instruction) -> dict[SlotKind, SlotTensors]:
        """What the action may touch, under the names by which its own stage knows it."""
        action = instruction.action
        stage = self._stages[action.stage]
        views: dict[SlotKind, SlotTensors] = {A: {}, L: {}, W: {}}
        if action.kind is Kind.F and (action.stage, *_cell(instruction)) in self._recomputed:
            views |= self._scratch_views(action.stage, *_cell(instruction))
        for index in dict.fromkeys((*instruction.reads, *instruction.writes)):
            slot = self._slots[index]
            if slot.stage == action.stage:
                kind = _OF_STAGE.get(slot.kind, slot.kind)
                views[kind] = joined(views.get(kind, {}), self._arena.tensors(index))
            elif slot.kind is X:
                views[Y] = {stage.stop - 1: _renamed(self._arena.tensors(index), X, Y)}
            else:
                assert slot.kind is G_IN, f"{action} touches {slot} of another stage"
                views[G_OUT] = {stage.first: _renamed(self._arena.tensors(index), G_IN, G_OUT)}
        return views

    def _scratch_views(self, stage: int, microbatch: int, part: int) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
        layout = self._scratch_layout(stage, microbatch, part)
        return scratch_views(self._scratch, self._plan.model, self._plan.precision, *layout)


_COMPUTE: dict[Kind, Callable[[StageExecutor, Instruction], _Steps]] = {
    Kind.F: StageExecutor._forward,
    Kind.B: StageExecutor._backward,
    Kind.I: StageExecutor._backward_input,
    Kind.W: StageExecutor._backward_weight,
    Kind.R: StageExecutor._recompute,
}


class EvaluationExecutor:
    """The forwards of a `StageExecutor` without gradients, for Programs that hold nothing but these and transfers."""

    def __init__(self, training: StageExecutor) -> None:
        self._training = training
        self.message = training.message

    def compute(self, instruction: Instruction) -> Operation:
        return self._training.evaluate(instruction)

    def free(self, instruction: Instruction) -> Operation:
        """No part of evaluation."""
        raise _not_evaluated(instruction)

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """No part of evaluation."""
        raise _not_evaluated(instruction)

    def step(self, instruction: Instruction) -> Operation:
        """No part of evaluation."""
        raise _not_evaluated(instruction)

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        """No part of evaluation."""
        raise _not_evaluated(instruction)


class SamplingExecutor(EvaluationExecutor):
    """An evaluation that keeps logits in place of losses.

    After a pass, the first shard that holds the head has the ``logits`` [V] that it was for, on the CPU; one that holds
    some parts of it has theirs, and zeros for the others.
    """

    def __init__(self, training: StageExecutor) -> None:
        super().__init__(training)
        self._position = 0
        self.logits: Tensor | None = None

    def begin(self, position: int) -> None:
        """The next pass is for the logits after token ``position``."""
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


def _cell(instruction: Instruction) -> tuple[int, int]:
    """Micro-batch and slice."""
    action = instruction.action
    assert action.microbatch is not None, f"{action} names no micro-batch"
    assert action.slice is not None, f"{action} names no slice"
    return action.microbatch, action.slice


def _renamed(tensors: SlotTensors, own: SlotKind, other: SlotKind) -> Mapping[str, Tensor]:
    """What a slot of a neighbour's kind ``own`` holds, by the names that this stage's kind ``other`` has for it."""
    (named,) = tensors.values()
    return {other.value if name == own.value else name: tensor for name, tensor in named.items()}
