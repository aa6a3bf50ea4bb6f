"""Norm, rising projection, activation, falling projection, residual.

Shape letters: T tokens, H hidden, F feed-forward width, R what rises (F, or 2 F for gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.activation import Activation
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.linear import Linear
from penstock.trainer.units.norm import build_norm
from penstock.trainer.units.workspace import Workspace


class Mlp:
    """The second half of a block."""

    def __init__(
        self, spec: ModelSpec, name: str, parameters: StageParameters, workspace: Workspace, activation: Activation
    ) -> None:
        self._risen = "gate_up" if spec.family is Family.LLAMA else "up"
        self._norm = build_norm(spec, parameters, f"{name}.norm", workspace)
        self._rise = Linear(parameters, f"{name}.{self._risen}")
        self._down = Linear(parameters, f"{name}.down")
        self._workspace = workspace
        self._activation = activation

    def forward(self, frame: Frame, y_TH: Tensor | None) -> None:
        """F: fill ``a`` and ``l``; write the output unless ``y`` is none (R, last unit)."""
        self._workspace.reset()
        normed_TH, activated_TF, risen_TR = frame.l["normed"], frame.l["activated"], frame.a[self._risen]
        self._norm.forward(frame.x, frame.a, normed_TH)
        self._rise.forward(normed_TH, risen_TR)
        self._activation.forward(risen_TR, activated_TF)
        if y_TH is not None:
            self._down.forward_onto(frame.x, activated_TF, y_TH)

    def backward_input(self, frame: Frame, dx_TH: Tensor) -> None:
        """I: from ``w.dy`` the input's gradient and the gradient of what rose."""
        self._workspace.reset()
        dy_TH, activated_TF, drisen_TR = frame.w["dy"], frame.l["activated"], frame.w[f"d{self._risen}"]
        dactivated_TF = self._workspace.take(*activated_TF.shape, dtype=activated_TF.dtype)
        self._down.backward_input(dy_TH, dactivated_TF)
        self._activation.backward(dactivated_TF, frame.a[self._risen], activated_TF, drisen_TR)
        dnormed_TH = self._workspace.take(*frame.x.shape, dtype=frame.x.dtype)
        self._rise.backward_input(drisen_TR, dnormed_TH)
        self._norm.backward(dnormed_TH, frame.x, frame.a, dy_TH, dx_TH)

    def backward_weight(self, l: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> None:  # noqa: E741
        """W: add the gradients of both matrices."""
        self._rise.backward_weight(w[f"d{self._risen}"], l["normed"])
        self._down.backward_weight(w["dy"], l["activated"])
