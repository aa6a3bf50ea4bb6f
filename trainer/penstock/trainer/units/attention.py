"""Norm, joint q/k/v projection, rotary positions, causal attention over the prefix, output projection, residual.

Shards divide the heads. Shape letters: B sequences, N tokens of the slice, T = B N, S tokens of the whole sequence, A
heads of the shard, G its key/value heads, D head dimension, E = A D, H hidden; P and R as in
`penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.core.layout import EVERY_OPERATION, Operation, Operations
from penstock.core.model import ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.backends import AttentionBackend, Operands
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.linear import Linear, RowParallelLinear
from penstock.trainer.units.norm import BlockNorm, build_norm
from penstock.trainer.units.rotary import Rotary
from penstock.trainer.units.workspace import Workspace


class Attention:
    """The first half of a block."""

    def __init__(
        self,
        spec: ModelSpec,
        name: str,
        parameters: StageParameters,
        division: Division,
        workspace: Workspace,
        backend: AttentionBackend,
        rotary: Rotary | None,
    ) -> None:
        sharding = division.sharding
        self._heads, self._kv_heads, self._head_dim = sharding.heads(spec), sharding.kv_heads(spec), spec.head_dim
        self._norm = BlockNorm(build_norm(spec, parameters, f"{name}.norm", workspace), division)
        self._qkv = Linear(parameters, f"{name}.qkv")
        self._out = RowParallelLinear(parameters, f"{name}.out", division)
        self._division = division
        self._workspace = workspace
        self._backend = backend
        self._rotary = rotary

    def forward(self, frame: Frame, y_RH: Tensor | None, operations: Operations = EVERY_OPERATION) -> Pass[None]:
        """F: fill ``a``, ``l`` and the slice's part of ``kv``; write the output. R: only what the ``operations`` make,
        and the output unless ``y`` is none.
        """
        self._workspace.reset()
        attended_TE = frame.l["attended"]
        num_tokens = attended_TE.shape[0]
        if Operation.NORM in operations:
            self._norm.forward(frame, num_tokens)
        if Operation.PROJECT in operations:
            normed_TH = yield from self._norm.all_tokens(frame, num_tokens)
            qkv = self._workspace.take(num_tokens, self._qkv.weight_OI.shape[0], dtype=frame.x.dtype)
            self._qkv.forward(normed_TH, qkv)
            self._place(frame, qkv)
        if Operation.ATTEND in operations:
            yield from self._division.turn()
            self._backend.forward(_operands(frame))
        if y_RH is not None:
            self._workspace.reset()
            yield from self._out.forward_onto(frame.x, attended_TE, y_RH)

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
        heads, groups = self._heads, self._kv_heads
        parts = qkv.view(-1, frame.stop - frame.start, heads + 2 * groups, self._head_dim)
        return parts[:, :, :heads], parts[:, :, heads : heads + groups], parts[:, :, heads + groups :]

    def backward_input(self, frame: Frame, dx_RH: Tensor, *, fresh_dkv: bool) -> Pass[None]:
        """I: from ``w.dy`` the input's gradient and ``w.dqkv``; adds what the prefix gets to ``dkv``.

        Slices run backward in reverse, so this slice's own part of ``dkv`` is complete once its queries have added to
        it. ``fresh_dkv``: this is the micro-batch's first, and finds no content there.
        """
        division, attended_TE, dy_PH = self._division, frame.l["attended"], frame.w["dy"]
        num_tokens = attended_TE.shape[0]
        yield from division.gather(dy_PH)
        self._workspace.reset()
        dattended_TE = self._workspace.take(*attended_TE.shape, dtype=dy_PH.dtype)
        self._out.backward_input(division.without_padding(dy_PH, num_tokens), dattended_TE)
        self._backward_attention(frame, dattended_TE, fresh_dkv=fresh_dkv)
        yield from division.turn()
        self._workspace.reset()
        dnormed_PH = division.take(num_tokens, dy_PH.shape[1], dy_PH.dtype)
        self._qkv.backward_input(frame.w["dqkv"], division.without_padding(dnormed_PH, num_tokens))
        yield from self._norm.backward(dnormed_PH, frame, dx_RH, num_tokens)

    def _backward_attention(self, frame: Frame, dattended_TE: Tensor, *, fresh_dkv: bool) -> None:
        operands, own = _operands(frame), slice(frame.start, frame.stop)
        q_shape, dk_BSGD, dv_BSGD = operands.q.shape, frame.dkv["dk"], frame.dkv["dv"]
        dq_BNAD, dk_BNGD, dv_BNGD = self._parts(frame, frame.w["dqkv"])
        dout_BNAD = dattended_TE.view(q_shape)
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

    def backward_weight(self, l: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Pass[None]:  # noqa: E741
        """W: add the gradients of both matrices."""
        self._workspace.reset()
        attended_TE = l["attended"]
        normed_TH = yield from self._division.all_tokens(l["normed"], attended_TE.shape[0])
        self._qkv.backward_weight(w["dqkv"], normed_TH)
        self._out.backward_weight(w["dy"], attended_TE)


def _operands(frame: Frame) -> Operands:
    q_BNAD, (k_BSGD, v_BSGD) = frame.a["q"], _keys_values(frame)
    return Operands(q=q_BNAD, k=k_BSGD, v=v_BSGD, out=frame.l["attended"].view(q_BNAD.shape), lse=frame.a["lse"])


def _keys_values(frame: Frame) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, G, D] up to the slice's end; heads are far apart in memory, tokens side by side."""
    return frame.kv["k"][:, :, : frame.stop].transpose(1, 2), frame.kv["v"][:, :, : frame.stop].transpose(1, 2)
