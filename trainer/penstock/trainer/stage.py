"""A stage: a contiguous range of units that one rank runs, action by action, on memory it is given.

No tensor requires a gradient and no graph is recorded. What outlives an action lies in the slots of
`penstock.core.program`, handed in as views (`penstock.trainer.units.views`); what does not lies in the workspace.
Actions are passes (`penstock.trainer.units.collectives`), since the shards of a rank meet in the middle of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.core.layout import EVERY_OPERATION, Operation, Operations, Remade, SlotKind
from penstock.core.model import ModelSpec, UnitKind
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.attention import Attention
from penstock.trainer.units.backends import AttentionBackend
from penstock.trainer.units.build import build_blocks
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.cross_entropy import Scale
from penstock.trainer.units.division import Division
from penstock.trainer.units.embedding import Embedding
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.head import Head
from penstock.trainer.units.head_parts import HeadParts
from penstock.trainer.units.views import SlotViews
from penstock.trainer.units.workspace import Workspace

_NOTHING: Mapping[str, Tensor] = {}


class Stage:
    """One shard of units [first, stop) of a model, the one of ``parameters``; every method is a pass over tokens
    [start, stop) of every sequence of a micro-batch.

    ``workspace`` holds `penstock.trainer.units.workspace.workspace_bytes` for the longest slice; stages of one rank may
    share it, since their actions run one at a time, or two in its two lanes. ``sequence_length`` bounds every position.
    ``backend`` replaces the attention kernels that suit the device. Token ids and labels are [B, n] (int64), hidden
    states [rows, h] of B n tokens with all of sequence 0 first. The first stage needs the token ids, the last the
    labels, which are shifted already; a label below 0 counts for nothing. Of a divided head every stage that has a part
    needs the labels and the same gradient scale in all its actions.
    """

    def __init__(
        self,
        spec: ModelSpec,
        first: int,
        stop: int,
        *,
        parameters: StageParameters,
        workspace: Workspace,
        sequence_length: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.spec, self.first, self.stop = spec, first, stop
        self.parameters, self.workspace = parameters, workspace
        self._division = division = Division(parameters.sharding, parameters.shard, workspace)
        kinds = {unit.kind for unit in spec.units[first:stop]}
        self._embedding = Embedding(parameters, division, workspace) if UnitKind.EMBEDDING in kinds else None
        heads = [unit for unit in spec.units[first:stop] if unit.kind is UnitKind.HEAD]
        self._head = Head(spec, parameters, division, workspace) if heads and not spec.is_divided else None
        self._parts = HeadParts(spec, heads, parameters, division, workspace) if heads and spec.is_divided else None
        self._last_body_unit = stop - 1 - len(heads)
        self._blocks = build_blocks(
            spec,
            first,
            stop,
            parameters=parameters,
            division=division,
            workspace=workspace,
            sequence_length=sequence_length,
            backend=backend,
        )

    def forward(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
    ) -> Pass[Tensor | None]:
        """F: fill ``kv`` at [start, stop), ``a``, ``l`` and ``y``.

        The last stage returns the sum of the slice's token losses (a scalar of the accumulate type; on all shards but
        the first zero, so that a sum over ranks counts it once), leaves ``gradient_scale`` times the sum's gradient in
        ``h`` and adds that of a whole head's parameters. Others return none.
        """
        yield from self._run_body(views, start, stop, token_ids)
        if self._parts is not None:
            wanted = _needed(labels, "labels")
            return (yield from self._parts.forward(views, self._parts_input(views), wanted, gradient_scale))
        if self._head is None:
            return None
        gradient = views[SlotKind.HEAD_GRADIENT][self.stop - 1]["h"]
        x, wanted = self._input(views, self.stop - 1), _needed(labels, "labels")
        return (yield from self._head.forward(x, wanted, gradient_scale, gradient))

    def recompute(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        remade: Remade,
        *,
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        units: range | None = None,
    ) -> Pass[None]:
        """R: run the operations of ``remade`` again and fill their buffers of ``a`` and ``l`` as F did, bit for bit.

        All others hold what F left there. A product of q, k and v writes keys and values where they were. Leaves out
        what no backward reads: the last output before a whole head or before the stage's end. With ``units`` only those
        of these; the units before them have to be recomputed already.
        """
        operations = self._remade_operations(remade, range(self.first, self.stop) if units is None else units)
        yield from self._run_body(views, start, stop, token_ids, operations)
        if self._parts is not None and any(unit > self._last_body_unit for unit in operations):
            x = self._parts_input(views) if self._last_body_unit + 1 in operations else None
            yield from self._parts.recompute(views, x, _needed(labels, "labels"), operations)

    def _remade_operations(self, remade: Remade, units: range) -> dict[int, Operations]:
        """What each of the units runs again, for those that run anything."""
        operations = {unit: own for unit, own in enumerate(remade, start=self.first) if unit in units}
        last = self._last_body_unit
        if self._parts is None and last in operations:
            operations[last] -= {Operation.EMBED, Operation.OUTPUT}
        return {unit: own for unit, own in operations.items() if own}

    def evaluate(
        self, views: SlotViews, start: int, stop: int, *, token_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Pass[Tensor | None]:
        """F without gradients: the last stage returns the sum of the slice's token losses, as F does, and needs no
        ``h``.
        """
        yield from self._run_body(views, start, stop, token_ids)
        if self._parts is not None:
            return (yield from self._parts.loss(views, self._parts_input(views), _needed(labels, "labels")))
        if self._head is None:
            return None
        return (yield from self._head.loss(self._input(views, self.stop - 1), _needed(labels, "labels")))

    def logits_after(
        self, views: SlotViews, start: int, stop: int, *, position: int, token_ids: Tensor | None = None
    ) -> Pass[Tensor | None]:
        """F for generation: the first shard of a stage with a head returns the logits of what follows token
        ``position`` of sequence 0, of the ``logit_rows`` that the stage has.

        They are valid until the next action.
        """
        yield from self._run_body(views, start, stop, token_ids)
        if self._parts is not None:
            logits = yield from self._parts.logits_at(views, self._parts_input(views), row=position - start)
        elif self._head is not None:
            logits = yield from self._head.logits_at(self._input(views, self.stop - 1), row=position - start)
        else:
            return None
        return logits if self._division.shard == 0 else None

    @property
    def has_embedding(self) -> bool:
        """Whether its actions need the token ids."""
        return self._embedding is not None

    @property
    def needs_labels(self) -> bool:
        """Whether it has a head, or a part of it."""
        return self._head is not None or self._parts is not None

    @property
    def returns_loss(self) -> bool:
        """Whether it ends with the head."""
        return self.stop == self.spec.num_units

    @property
    def logit_rows(self) -> range:
        """The rows of the vocabulary that `logits_after` is of."""
        return range(self.spec.vocab) if self._parts is None else self._parts.rows

    def backward_input(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        fresh_dkv: bool,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
    ) -> Pass[None]:
        """I: from ``g_in`` (the last stage: ``h``) fill ``w`` and ``g_out``; add what the prefix gets to ``dkv``.

        A micro-batch's slices come in reverse order. ``fresh_dkv`` marks the first of them, which finds nothing in
        ``dkv``. The gradients of the norms are added here.
        """
        yield from self._take_gradient(views, labels, gradient_scale)
        for index in sorted(self._blocks, reverse=True):
            yield from self._block_input(views, index, start, stop, fresh_dkv=fresh_dkv)
        if self._embedding is not None:
            yield from self._embedding.backward_input(views[SlotKind.OUTPUT_GRADIENTS][self.first]["dy"])

    def backward(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        fresh_dkv: bool,
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
    ) -> Pass[None]:
        """B: I and W, unit by unit from the last, with the same results to the last bit.

        So the collectives of both are spread over the whole pass, and in a pair over all of the other one's.
        """
        inputs, gradients = views.get(SlotKind.LINEAR_INPUTS, {}), views[SlotKind.OUTPUT_GRADIENTS]
        yield from self._take_gradient(views, labels, gradient_scale)
        if self._parts is not None:
            yield from self._parts.backward_weight(views, _needed(labels, "labels"), gradient_scale)
        for index in sorted(self._blocks, reverse=True):
            yield from self._block_input(views, index, start, stop, fresh_dkv=fresh_dkv)
            yield from self._blocks[index].backward_weight(inputs[index], gradients[index])
        if self._embedding is not None:
            yield from self._embedding.backward_input(gradients[self.first]["dy"])
            ids = _needed(token_ids, "token ids")
            self._embedding.backward_weight(ids, start, gradients[self.first]["dy"])

    def _take_gradient(self, views: SlotViews, labels: Tensor | None, gradient_scale: Scale) -> Pass[None]:
        """The gradient that came to the stage, or of its head, is that of its last block's output."""
        if self._parts is None:
            received = SlotKind.RECEIVED_GRADIENT if self._head is None else SlotKind.HEAD_GRADIENT
            self._output_gradient(views, self._last_body_unit).copy_(views[received][self.stop - 1][received.value])
            return
        below = self._output_gradient(views, self._last_body_unit) if self._parts.has_first else None
        wanted = _needed(labels, "labels")
        yield from self._parts.backward_input(views, self._parts_input(views), wanted, gradient_scale, below)

    def _block_input(self, views: SlotViews, index: int, start: int, stop: int, *, fresh_dkv: bool) -> Pass[None]:
        """I of one block."""
        block, frame = self._blocks[index], self._frame(views, index, start, stop)
        below = self._output_gradient(views, index - 1)
        if isinstance(block, Attention):
            yield from block.backward_input(frame, below, fresh_dkv=fresh_dkv)
        else:
            yield from block.backward_input(frame, below)

    def backward_weight(
        self,
        views: SlotViews,
        start: int,
        *,
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
    ) -> Pass[None]:
        """W: add the gradients of the matrices and biases, from ``l`` and ``w`` alone, at any time after I."""
        inputs, gradients = views.get(SlotKind.LINEAR_INPUTS, {}), views[SlotKind.OUTPUT_GRADIENTS]
        for index, block in self._blocks.items():
            yield from block.backward_weight(inputs[index], gradients[index])
        if self._parts is not None:
            yield from self._parts.backward_weight(views, _needed(labels, "labels"), gradient_scale)
        if self._embedding is not None:
            ids = _needed(token_ids, "token ids")
            self._embedding.backward_weight(ids, start, gradients[self.first]["dy"])

    def _run_body(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        token_ids: Tensor | None,
        operations: Mapping[int, Operations] | None = None,
    ) -> Pass[None]:
        """Forward through all units but the head, or only these ``operations``, by unit."""
        if operations is None:
            operations = dict.fromkeys(range(self.first, self.stop), EVERY_OPERATION)
        if self._embedding is not None and Operation.EMBED in operations.get(self.first, ()):
            ids = _needed(token_ids, "token ids")
            yield from self._embedding.forward(ids, start, self._output(views, self.first))
        for index, block in self._blocks.items():
            if index in operations:
                y = self._output(views, index) if Operation.OUTPUT in operations[index] else None
                yield from block.forward(self._frame(views, index, start, stop), y, operations[index])

    def _frame(self, views: SlotViews, index: int, start: int, stop: int) -> Frame:
        def of(slot: SlotKind) -> Mapping[str, Tensor]:
            return views.get(slot, {}).get(index, _NOTHING)

        return Frame(
            start=start,
            stop=stop,
            x=self._input(views, index),
            a=of(SlotKind.ACTIVATIONS),
            l=of(SlotKind.LINEAR_INPUTS),
            w=of(SlotKind.OUTPUT_GRADIENTS),
            kv=of(SlotKind.KEYS_VALUES),
            dkv=of(SlotKind.KEYS_VALUES_GRADIENTS),
        )

    def _input(self, views: SlotViews, index: int) -> Tensor:
        return views[SlotKind.INPUT][index]["x"] if index == self.first else self._output(views, index - 1)

    def _parts_input(self, views: SlotViews) -> Tensor | None:
        """The hidden state before the first part of a divided head; none for a stage with other parts."""
        assert self._parts is not None
        return self._input(views, self._last_body_unit + 1) if self._parts.has_first else None

    def _output(self, views: SlotViews, index: int) -> Tensor:
        slot = SlotKind.OUTPUT if index == self.stop - 1 else SlotKind.ACTIVATIONS
        return views[slot][index]["y"]

    def _output_gradient(self, views: SlotViews, index: int) -> Tensor:
        """Where the gradient of a unit's output belongs [rows, h]: the shard's block of the unit's ``w.dy``; ``g_out``
        for what came into the stage.
        """
        if index < self.first:
            return views[SlotKind.SENT_GRADIENT][self.first]["g_out"]
        return self._division.block(views[SlotKind.OUTPUT_GRADIENTS][index]["dy"])


def _needed(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this action of this stage needs {what}")
    return tensor
