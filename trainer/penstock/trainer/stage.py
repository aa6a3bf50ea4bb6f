"""A stage: a contiguous range of units that one rank runs, action by action, in memory that the caller provides.

No tensor requires a gradient and autograd records nothing. Tensors that outlive an action are in the slots of
`penstock.core.program`, which the caller passes as views (`penstock.trainer.units.views`). Temporaries of an action are
in the workspace. Actions are passes (`penstock.trainer.units.collectives`): generators that yield whenever the shards
of a rank communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.core.layout import EVERY_OPERATION, NOTHING_REMADE, Operation, Operations, Remade, SlotKind
from penstock.core.model import ModelSpec, UnitKind
from penstock.core.scratch import segments
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
    """One shard of units [first, stop) of a model. Every action is a pass over tokens [start, stop) of every sequence
    of a micro-batch.

    ``parameters`` are those of the shard. ``workspace`` has `penstock.trainer.units.workspace.workspace_bytes` for the
    longest slice. The stages of one rank may share it, since their actions run one at a time, or two in two regions.
    ``prefix``, which they share too, has `penstock.core.layout.prefix_bytes` if every slice has its own ``kv`` and
    ``dkv``; ``earlier`` then has those of the earlier slices, in order. ``sequence_length`` bounds every position.
    ``backend`` replaces the default attention kernels of the device.

    Token ids and labels are [B, n] (int64). Hidden states are [rows, h] for B n tokens, all of sequence 0 first. The
    first stage needs token ids, the last one needs labels. Labels are already shifted, and the loss ignores labels
    below 0. Where the head is divided, every stage with a part needs the labels and the same gradient scale in all of
    its actions.
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
        prefix: Workspace | None = None,
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
            prefix=prefix or Workspace(0, parameters.compute_flat.device),
            sequence_length=sequence_length,
            backend=backend,
        )

    def forward(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
        units: range | None = None,
    ) -> Pass[Tensor | None]:
        """F: fill ``kv`` at [start, stop), ``a``, ``l`` and ``y``. With ``units`` only these units are run, after the
        earlier ones; the last units include all parts of a head.

        The last stage returns the sum of the slice's token losses, a scalar of the accumulate type. It is zero on all
        shards but the first, so that a sum over ranks counts it once. The last stage also writes ``gradient_scale``
        times the gradient of the sum to ``h``, and adds the gradient of the parameters of an undivided head. Other
        stages, and other units of the last stage, return None.
        """
        units = range(self.first, self.stop) if units is None else units
        yield from self._run_body(views, start, stop, earlier, token_ids, dict.fromkeys(units, EVERY_OPERATION))
        if units.stop < self.stop:
            return None
        if self._parts is not None:
            needed_labels = _needed(labels, "labels")
            return (yield from self._parts.forward(views, self._parts_input(views), needed_labels, gradient_scale))
        if self._head is None:
            return None
        gradient = views[SlotKind.HEAD_GRADIENT][self.stop - 1]["h"]
        x, needed_labels = self._input(views, self.stop - 1), _needed(labels, "labels")
        return (yield from self._head.forward(x, needed_labels, gradient_scale, gradient))

    def recompute(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        remade: Remade,
        *,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        units: range | None = None,
    ) -> Pass[None]:
        """R: run the operations of ``remade`` again and fill their buffers of ``a`` and ``l`` as F did, bit for bit.

        All other buffers still hold the results of F. The product of q, k and v overwrites the same keys and values.
        The output before an undivided head or at the end of the stage is left out, since no backward reads it. With
        ``units`` only these units are recomputed; earlier units must have been recomputed already.
        """
        operations = self._remade_operations(remade, range(self.first, self.stop) if units is None else units)
        yield from self._run_body(views, start, stop, earlier, token_ids, operations)
        if self._parts is not None and any(unit > self._last_body_unit for unit in operations):
            x = self._parts_input(views) if self._last_body_unit + 1 in operations else None
            yield from self._parts.recompute(views, x, _needed(labels, "labels"), operations)

    def _remade_operations(self, remade: Remade, units: range) -> dict[int, Operations]:
        """Operations to run again, by unit. Units without any are left out."""
        operations = {unit: own for unit, own in enumerate(remade, start=self.first) if unit in units}
        last = self._last_body_unit
        if self._parts is None and last in operations:
            operations[last] -= {Operation.EMBED, Operation.OUTPUT}
        return {unit: own for unit, own in operations.items() if own}

    def evaluate(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pass[Tensor | None]:
        """F without gradients. The last stage returns the sum of the slice's token losses, as F does, and needs no
        ``h``.
        """
        yield from self._run_body(views, start, stop, earlier, token_ids)
        if self._parts is not None:
            return (yield from self._parts.loss(views, self._parts_input(views), _needed(labels, "labels")))
        if self._head is None:
            return None
        return (yield from self._head.loss(self._input(views, self.stop - 1), _needed(labels, "labels")))

    def logits_after(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        position: int,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
    ) -> Pass[Tensor | None]:
        """F for generation. The first shard of a stage with a head returns logits of the token after ``position`` of
        sequence 0.

        They cover the stage's `logit_rows` and are valid until the next action. Others return None.
        """
        yield from self._run_body(views, start, stop, earlier, token_ids)
        if self._parts is not None:
            logits = yield from self._parts.logits_at(views, self._parts_input(views), row=position - start)
        elif self._head is not None:
            logits = yield from self._head.logits_at(self._input(views, self.stop - 1), row=position - start)
        else:
            return None
        return logits if self._division.shard == 0 else None

    @property
    def has_embedding(self) -> bool:
        """Whether the actions need token ids."""
        return self._embedding is not None

    @property
    def needs_labels(self) -> bool:
        """Whether the stage has a head or a part of it."""
        return self._head is not None or self._parts is not None

    @property
    def returns_loss(self) -> bool:
        """Whether the stage ends with the head."""
        return self.stop == self.spec.num_units

    @property
    def logit_rows(self) -> range:
        """The range of the vocabulary that `logits_after` covers."""
        return range(self.spec.vocab) if self._parts is None else self._parts.rows

    def backward_input(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        fresh_dkv: bool,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
        remade: Remade = NOTHING_REMADE,
    ) -> Pass[None]:
        """I: compute ``w`` and ``g_out`` from ``g_in`` (last stage: from ``h``), and add the prefix's gradient to
        ``dkv``.

        The slices of a micro-batch come in reverse order. ``fresh_dkv`` marks the first one, for which ``dkv`` has no
        content yet. I also adds the gradients of the norms' parameters. With ``remade`` it first runs these operations
        again, segment by segment (`penstock.core.scratch`); only then it may need token ids.
        """
        for segment in reversed(segments(self.spec, self.first, self.stop, remade)):
            yield from self._recompute_segment(views, start, stop, earlier, token_ids, labels, remade, segment)
            if segment.stop == self.stop:
                yield from self._take_gradient(views, labels, gradient_scale)
            for index in self._reversed_blocks(segment):
                frame = self._frame(views, index, start, stop, earlier)
                yield from self._block_input(index, frame, views, fresh_dkv=fresh_dkv)
        if self._embedding is not None:
            yield from self._embedding.backward_input(views[SlotKind.OUTPUT_GRADIENTS][self.first]["dy"])

    def backward(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        *,
        fresh_dkv: bool,
        earlier: Sequence[SlotViews] = (),
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        gradient_scale: Scale = 1.0,
        units: range | None = None,
        remade: Remade = NOTHING_REMADE,
    ) -> Pass[None]:
        """B: I and W of each unit, from the last unit to the first, with the same bits as I followed by W.

        This order spreads the collectives of I over the whole pass, where a second action can run during them. With
        ``units`` only these units are run, after the later ones; the last units include all parts of a head. With
        ``remade`` it runs these operations again, as I does: a segment as a whole, before its last unit. So where
        ``units`` end within a segment, the next call finds what this one left in the memory of the segment.
        """
        inputs, gradients = views.get(SlotKind.LINEAR_INPUTS, {}), views[SlotKind.OUTPUT_GRADIENTS]
        units = range(self.first, self.stop) if units is None else units
        for segment in reversed(segments(self.spec, self.first, self.stop, remade)):
            if segment.stop - 1 in units:
                yield from self._recompute_segment(views, start, stop, earlier, token_ids, labels, remade, segment)
            if segment.stop == units.stop == self.stop:
                yield from self._take_gradient(views, labels, gradient_scale)
                if self._parts is not None:
                    yield from self._parts.backward_weight(views, _needed(labels, "labels"), gradient_scale)
            for index in self._reversed_blocks(segment, units):
                frame = self._frame(views, index, start, stop, earlier)
                yield from self._block_input(index, frame, views, fresh_dkv=fresh_dkv)
                yield from self._blocks[index].backward_weight(inputs[index], gradients[index])
        if self._embedding is not None and self.first in units:
            yield from self._embedding.backward_input(gradients[self.first]["dy"])
            ids = _needed(token_ids, "token ids")
            self._embedding.backward_weight(ids, start, gradients[self.first]["dy"])

    def _reversed_blocks(self, segment: range, units: range | None = None) -> list[int]:
        """The blocks of the segment that are among the ``units``, the last one first."""
        return [index for index in reversed(segment) if index in self._blocks and (units is None or index in units)]

    def _recompute_segment(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        earlier: Sequence[SlotViews],
        token_ids: Tensor | None,
        labels: Tensor | None,
        remade: Remade,
        segment: range,
    ) -> Pass[None]:
        if remade:
            yield from self.recompute(
                views, start, stop, remade, earlier=earlier, token_ids=token_ids, labels=labels, units=segment
            )

    def _take_gradient(self, views: SlotViews, labels: Tensor | None, gradient_scale: Scale) -> Pass[None]:
        """Make the received gradient, or that of the stage's head, the gradient of the last block's output."""
        if self._parts is None:
            received = SlotKind.RECEIVED_GRADIENT if self._head is None else SlotKind.HEAD_GRADIENT
            self._output_gradient(views, self._last_body_unit).copy_(views[received][self.stop - 1][received.value])
            return
        below = self._output_gradient(views, self._last_body_unit) if self._parts.has_first else None
        needed_labels = _needed(labels, "labels")
        yield from self._parts.backward_input(views, self._parts_input(views), needed_labels, gradient_scale, below)

    def _block_input(self, index: int, frame: Frame, views: SlotViews, *, fresh_dkv: bool) -> Pass[None]:
        """I of one block."""
        block, below = self._blocks[index], self._output_gradient(views, index - 1)
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
        units: range | None = None,
    ) -> Pass[None]:
        """W: add the gradients of matrices and biases from ``l`` and ``w`` alone, at any time after I. With ``units``
        only those of these units; the last units include all parts of a head.
        """
        inputs, gradients = views.get(SlotKind.LINEAR_INPUTS, {}), views[SlotKind.OUTPUT_GRADIENTS]
        units = range(self.first, self.stop) if units is None else units
        for index, block in self._blocks.items():
            if index in units:
                yield from block.backward_weight(inputs[index], gradients[index])
        if self._parts is not None and units.stop == self.stop:
            yield from self._parts.backward_weight(views, _needed(labels, "labels"), gradient_scale)
        if self._embedding is not None and self.first in units:
            ids = _needed(token_ids, "token ids")
            self._embedding.backward_weight(ids, start, gradients[self.first]["dy"])

    def _run_body(
        self,
        views: SlotViews,
        start: int,
        stop: int,
        earlier: Sequence[SlotViews],
        token_ids: Tensor | None,
        operations: Mapping[int, Operations] | None = None,
    ) -> Pass[None]:
        """Run the forward of all units but the head, or only ``operations`` of it, by unit."""
        if operations is None:
            operations = dict.fromkeys(range(self.first, self.stop), EVERY_OPERATION)
        if self._embedding is not None and Operation.EMBED in operations.get(self.first, ()):
            ids = _needed(token_ids, "token ids")
            yield from self._embedding.forward(ids, start, self._output(views, self.first))
        for index, block in self._blocks.items():
            if index in operations:
                y = self._output(views, index) if Operation.OUTPUT in operations[index] else None
                frame = self._frame(views, index, start, stop, earlier)
                yield from block.forward(frame, y, operations[index])

    def _frame(self, views: SlotViews, index: int, start: int, stop: int, earlier: Sequence[SlotViews]) -> Frame:
        def of(slot: SlotKind, own: SlotViews = views) -> Mapping[str, Tensor]:
            return own.get(slot, {}).get(index, _NOTHING)

        return Frame(
            start=start,
            stop=stop,
            x=self._input(views, index),
            a=of(SlotKind.ACTIVATIONS),
            l=of(SlotKind.LINEAR_INPUTS),
            w=of(SlotKind.OUTPUT_GRADIENTS),
            kv=[of(SlotKind.KEYS_VALUES, own) for own in (*earlier, views)],
            dkv=[of(SlotKind.KEYS_VALUES_GRADIENTS, own) for own in (*earlier, views)],
        )

    def _input(self, views: SlotViews, index: int) -> Tensor:
        return views[SlotKind.INPUT][index]["x"] if index == self.first else self._output(views, index - 1)

    def _parts_input(self, views: SlotViews) -> Tensor | None:
        """The input of the first part of a divided head; None if the stage has only other parts."""
        assert self._parts is not None
        return self._input(views, self._last_body_unit + 1) if self._parts.has_first else None

    def _output(self, views: SlotViews, index: int) -> Tensor:
        slot = SlotKind.OUTPUT if index == self.stop - 1 else SlotKind.ACTIVATIONS
        return views[slot][index]["y"]

    def _output_gradient(self, views: SlotViews, index: int) -> Tensor:
        """Buffer for the gradient of a unit's output [rows, h]: the shard's block of the unit's ``w.dy``, or ``g_out``
        for the input of the stage.
        """
        if index < self.first:
            return views[SlotKind.SENT_GRADIENT][self.first]["g_out"]
        return self._division.block(views[SlotKind.OUTPUT_GRADIENTS][index]["dy"])


def _needed(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this action of this stage needs {what}")
    return tensor
