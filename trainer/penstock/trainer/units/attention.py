"""Norm, joint q/k/v projection, rotary positions, causal attention over the prefix, output projection, residual.

Shards divide the heads. Shape letters: B sequences, N tokens of the slice, T = B N, S tokens of the whole sequence, A
heads of the shard, G its key/value heads, D head dimension, E = A D, H hidden; P and R as in
`penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.core.layout import EVERY_OPERATION, Operation, Operations
from penstock.core.model import ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.backends import Pieces
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.linear import Linear, RowParallelLinear
from penstock.trainer.units.norm import BlockNorm, build_norm
from penstock.trainer.units.prefix import PrefixAttention
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
        attention: PrefixAttention,
        rotary: Rotary | None,
    ) -> None:
        sharding = division.sharding
        self._heads, self._kv_heads, self._head_dim = sharding.heads(spec), sharding.kv_heads(spec), spec.head_dim
        self._norm = BlockNorm(build_norm(spec, parameters, f"{name}.norm", workspace), division)
        self._qkv = Linear(parameters, f"{name}.qkv")
        self._out = RowParallelLinear(parameters, f"{name}.out", division)
        self._division = division
        self._workspace = workspace
        self._attention = attention
        self._rotary = rotary

    def forward(self, frame: Frame, y_RH: Tensor | None, operations: Operations = EVERY_OPERATION) -> Pass[None]:
        """F: fill ``a``, ``l`` and the slice's part of ``kv``, and write the output. R: run only ``operations``, and
        write the output unless ``y`` is None.
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
            q_BNAD = frame.a["q"]
            out_BNAD = attended_TE.view(q_BNAD.shape)
            self._attention.forward(q_BNAD, _up_to(frame, "k"), _up_to(frame, "v"), out_BNAD, frame.a["lse"])
        if y_RH is not None:
            self._workspace.reset()
            yield from self._out.forward_onto(frame.x, attended_TE, y_RH)

    def _place(self, frame: Frame, qkv: Tensor) -> None:
        """Move q to its buffer and k, v to their positions, turned by their angles."""
        q_BNAD, k_BNGD, v_BNGD = self._parts(frame, qkv)
        own = _own_keys(frame, [keys_values["k"].shape[2] for keys_values in frame.kv])
        own_k_BNGD, own_v_BNGD = (frame.kv[-1][name][:, :, own].transpose(1, 2) for name in ("k", "v"))
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
        """I: compute the input's gradient and ``w.dqkv`` from ``w.dy``, and add the prefix's gradient to ``dkv``.

        Slices run backward in reverse order, so this slice's own part of ``dkv`` is complete once its queries have
        added to it. ``fresh_dkv`` marks the first slice of a micro-batch, for which ``dkv`` has no content yet.
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
        q_BNAD, keys, values = frame.a["q"], _up_to(frame, "k"), _up_to(frame, "v")
        of_queries = q_BNAD, keys, values, frame.l["attended"].view(q_BNAD.shape), frame.a["lse"]
        dk, dv = _gradients_up_to(frame, "dk"), _gradients_up_to(frame, "dv")
        dq_BNAD, dk_BNGD, dv_BNGD = self._parts(frame, frame.w["dqkv"])
        dout_BNAD = dattended_TE.view(q_BNAD.shape)
        if self._rotary is None and fresh_dkv and frame.start == 0 and dk_BNGD.dtype == dk[-1].dtype:
            # No other slice adds to the gradients of these keys, so they are written to ``w`` directly. Where ``dkv``
            # has a wider type than ``w``, it is used all the same: blocks of queries are summed in it.
            self._attention.backward(*of_queries, (dout_BNAD, dq_BNAD, [dk_BNGD], [dv_BNGD]), fresh=True)
            return
        turned_BNAD = dq_BNAD if self._rotary is None else self._workspace.take(*q_BNAD.shape, dtype=dq_BNAD.dtype)
        self._attention.backward(*of_queries, (dout_BNAD, turned_BNAD, dk, dv), fresh=fresh_dkv)
        own = _own_keys(frame, [piece.shape[1] for piece in dk])
        if self._rotary is None:
            dk_BNGD.copy_(dk[-1][:, own])
        else:
            self._rotary.rotate_back(turned_BNAD, frame.start, dq_BNAD)
            self._rotary.rotate_back(dk[-1][:, own], frame.start, dk_BNGD)
        dv_BNGD.copy_(dv[-1][:, own])

    def backward_weight(self, l: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Pass[None]:  # noqa: E741
        """W: add the gradients of both matrices."""
        self._workspace.reset()
        attended_TE = l["attended"]
        normed_TH = yield from self._division.all_tokens(l["normed"], attended_TE.shape[0])
        self._qkv.backward_weight(w["dqkv"], normed_TH)
        self._out.backward_weight(w["dy"], attended_TE)


def _own_keys(frame: Frame, sizes: Sequence[int]) -> slice:
    """The range of the slice's own keys within the last slot; ``sizes`` has the number of keys of every slot."""
    before = sum(sizes[:-1])
    return slice(frame.start - before, frame.stop - before)


def _up_to(frame: Frame, name: str) -> Pieces:
    """Keys or values up to the slice's end, in pieces [B, G, n, D]."""
    *earlier, last = (keys_values[name] for keys_values in frame.kv)
    return *earlier, last[:, :, : frame.stop - sum(piece.shape[2] for piece in earlier)]


def _gradients_up_to(frame: Frame, name: str) -> Pieces:
    """The gradients of keys or values up to the slice's end, in pieces [B, n, G, D]."""
    *earlier, last = (gradients[name] for gradients in frame.dkv)
    return *earlier, last[:, : frame.stop - sum(piece.shape[1] for piece in earlier)]
