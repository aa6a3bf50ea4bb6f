"""Norm, joint q/k/v projection, rotary positions, causal attention over the prefix, output projection, residual.

Shape letters: B sequences, N tokens of the slice, T = B N, S tokens of the whole sequence, A heads, G key/value heads,
D head dimension, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.core.model import ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.backends import AttentionBackend, Operands
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.linear import Linear
from penstock.trainer.units.norm import build_norm
from penstock.trainer.units.rotary import Rotary
from penstock.trainer.units.workspace import Workspace


class Attention:
    """The first half of a block."""

    def __init__(
        self,
        spec: ModelSpec,
        name: str,
        parameters: StageParameters,
        workspace: Workspace,
        backend: AttentionBackend,
        rotary: Rotary | None,
    ) -> None:
        self._spec = spec
        self._norm = build_norm(spec, parameters, f"{name}.norm", workspace)
        self._qkv = Linear(parameters, f"{name}.qkv")
        self._out = Linear(parameters, f"{name}.out")
        self._workspace = workspace
        self._backend = backend
        self._rotary = rotary

    def forward(self, frame: Frame, y_TH: Tensor | None) -> None:
        """F: fill ``a``, ``l`` and the slice's part of ``kv``; write the output unless ``y`` is none (R, last unit)."""
        self._workspace.reset()
        normed_TH, attended_TH = frame.l["normed"], frame.l["attended"]
        self._norm.forward(frame.x, frame.a, normed_TH)
        qkv = self._workspace.take(frame.x.shape[0], self._qkv.weight_OI.shape[0], dtype=frame.x.dtype)
        self._qkv.forward(normed_TH, qkv)
        self._place(frame, qkv)
        self._backend.forward(_operands(frame))
        if y_TH is not None:
            self._out.forward_onto(frame.x, attended_TH, y_TH)

    def _place(self, frame: Frame, qkv: Tensor) -> None:
        """Move q to its buffer and k, v to their positions, turned by their angles."""
        q_BNAD, k_BNGD, v_BNGD = self._parts(frame, qkv)
        own_k_BNGD, own_v_BNGD = (tensor[:, frame.start :] for tensor in _keys_values(frame))
        if self._rotary is None:
            frame.a["q"].copy_(q_BNAD)
            own_k_BNGD.copy_(k_BNGD)
        else:
            self._rotary.rotate(q_BNAD, frame.start, frame.a["q"])
            self._rotary.rotate(k_BNGD, frame.start, own_k_BNGD)
        own_v_BNGD.copy_(v_BNGD)

    def _parts(self, frame: Frame, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = self._spec.heads, self._spec.kv_heads
        parts = qkv.view(-1, frame.stop - frame.start, heads + 2 * groups, self._spec.head_dim)
        return parts[:, :, :heads], parts[:, :, heads : heads + groups], parts[:, :, heads + groups :]

    def backward_input(self, frame: Frame, dx_TH: Tensor, *, fresh_dkv: bool) -> None:
        """I: from ``w.dy`` the input's gradient and ``w.dqkv``; adds what the prefix gets to ``dkv``.

        Slices run backward in reverse, so this slice's own part of ``dkv`` is complete once its queries have added to
        it. ``fresh_dkv``: this is the micro-batch's first, and finds no content there.
        """
        self._workspace.reset()
        gradient_TH = self._workspace.take(*frame.x.shape, dtype=frame.x.dtype)
        self._out.backward_input(frame.w["dy"], gradient_TH)
        self._backward_attention(frame, gradient_TH, fresh_dkv=fresh_dkv)
        self._qkv.backward_input(frame.w["dqkv"], gradient_TH)
        self._norm.backward(gradient_TH, frame.x, frame.a, frame.w["dy"], dx_TH)

    def _backward_attention(self, frame: Frame, dattended_TH: Tensor, *, fresh_dkv: bool) -> None:
        operands, own = _operands(frame), slice(frame.start, frame.stop)
        q_shape, dk_BSGD, dv_BSGD = operands.q.shape, frame.dkv["dk"], frame.dkv["dv"]
        dq_BNAD, dk_BNGD, dv_BNGD = self._parts(frame, frame.w["dqkv"])
        dout_BNAD = dattended_TH.view(q_shape)
        if self._rotary is None and self._is_whole(frame):
            self._backend.backward(operands, dout_BNAD, dq_BNAD, dk_BNGD, dv_BNGD, fresh=True)
            return
        turned_BNAD = dq_BNAD if self._rotary is None else self._workspace.take(*q_shape, dtype=dq_BNAD.dtype)
        dkv_BSGD = dk_BSGD[:, : frame.stop], dv_BSGD[:, : frame.stop]
        self._backend.backward(operands, dout_BNAD, turned_BNAD, *dkv_BSGD, fresh=fresh_dkv)
        if self._rotary is None:
            dk_BNGD.copy_(dk_BSGD[:, own])
        else:
            self._rotary.rotate_back(turned_BNAD, frame.start, dq_BNAD)
            self._rotary.rotate_back(dk_BSGD[:, own], frame.start, dk_BNGD)
        dv_BNGD.copy_(dv_BSGD[:, own])

    @staticmethod
    def _is_whole(frame: Frame) -> bool:
        """Whether the slice is the sequence, so that no other adds to its keys' gradients and they need no buffer.

        Only where the buffer is no wider than what is kept of it, or blocks of queries would be summed in less.
        """
        dk_BSGD = frame.dkv["dk"]
        return frame.stop - frame.start == dk_BSGD.shape[1] and frame.w["dqkv"].dtype == dk_BSGD.dtype

    def backward_weight(self, l: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> None:  # noqa: E741
        """W: add the gradients of both matrices."""
        self._qkv.backward_weight(w["dqkv"], l["normed"])
        self._out.backward_weight(w["dy"], l["attended"])


def _operands(frame: Frame) -> Operands:
    q_BNAD, (k_BSGD, v_BSGD) = frame.a["q"], _keys_values(frame)
    return Operands(q=q_BNAD, k=k_BSGD, v=v_BSGD, out=frame.l["attended"].view(q_BNAD.shape), lse=frame.a["lse"])


def _keys_values(frame: Frame) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, G, D] up to the slice's end; heads are far apart in memory, tokens side by side."""
    return frame.kv["k"][:, :, : frame.stop].transpose(1, 2), frame.kv["v"][:, :, : frame.stop].transpose(1, 2)
