"""Norm, up projection, activation, down projection, residual.

Shape letters: T tokens, H hidden, F feed-forward width of the shard, G width of the up projection (F, or 2 F for gate
and up); P and R as in `penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.core.layout import EVERY_OPERATION, Operation, Operations
from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.activation import Activation
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.linear import Linear, RowParallelLinear
from penstock.trainer.units.norm import BlockNorm, build_norm
from penstock.trainer.units.workspace import Workspace


class Mlp:
    """The second half of a block."""

    def __init__(
        self,
        spec: ModelSpec,
        name: str,
        parameters: StageParameters,
        division: Division,
        workspace: Workspace,
        activation: Activation,
    ) -> None:
        self._projection = "gate_up" if spec.family is Family.LLAMA else "up"
        self._norm = BlockNorm(build_norm(spec, parameters, f"{name}.norm", workspace), division)
        self._up = Linear(parameters, f"{name}.{self._projection}")
        self._down = RowParallelLinear(parameters, f"{name}.down", division)
        self._division = division
        self._workspace = workspace
        self._activation = activation

    def forward(self, frame: Frame, y_RH: Tensor | None, operations: Operations = EVERY_OPERATION) -> Pass[None]:
        """F: fill ``a`` and ``l``, and write the output. R: run only ``operations``, and write the output unless ``y``
        is None.
        """
        self._workspace.reset()
        activated_TF, projected_TG = frame.l["activated"], frame.a[self._projection]
        if Operation.NORM in operations:
            self._norm.forward(frame, activated_TF.shape[0])
        if Operation.PROJECT in operations:
            normed_TH = yield from self._norm.all_tokens(frame, activated_TF.shape[0])
            self._up.forward(normed_TH, projected_TG)
        if Operation.ACTIVATE in operations:
            self._activation.forward(projected_TG, activated_TF)
            yield from self._division.turn()
        if y_RH is not None:
            self._workspace.reset()
            yield from self._down.forward_onto(frame.x, activated_TF, y_RH)

    def backward_input(self, frame: Frame, dx_RH: Tensor) -> Pass[None]:
        """I: compute the gradients of the up projection's output and of the input from ``w.dy``."""
        division, activated_TF = self._division, frame.l["activated"]
        dy_PH, dprojected_TG = frame.w["dy"], frame.w[f"d{self._projection}"]
        num_tokens = activated_TF.shape[0]
        yield from division.gather(dy_PH)
        self._workspace.reset()
        dactivated_TF = self._workspace.take(*activated_TF.shape, dtype=activated_TF.dtype)
        self._down.backward_input(division.without_padding(dy_PH, num_tokens), dactivated_TF)
        self._activation.backward(dactivated_TF, frame.a[self._projection], activated_TF, dprojected_TG)
        yield from division.turn()
        self._workspace.reset()
        dnormed_PH = division.take(num_tokens, dy_PH.shape[1], dy_PH.dtype)
        self._up.backward_input(dprojected_TG, division.without_padding(dnormed_PH, num_tokens))
        yield from self._norm.backward(dnormed_PH, frame, dx_RH, num_tokens)

    def backward_weight(self, l: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Pass[None]:  # noqa: E741
        """W: add the gradients of both matrices."""
        self._workspace.reset()
        activated_TF = l["activated"]
        normed_TH = yield from self._division.all_tokens(l["normed"], activated_TF.shape[0])
        self._up.backward_weight(w[f"d{self._projection}"], normed_TH)
        self._down.backward_weight(w["dy"], activated_TF)
