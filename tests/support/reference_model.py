"""The yardstick of the trainer: both families unsliced, in one process, written plainly and differentiated by autograd.

It shares with the trainer the global names of the parameters and nothing else.
Shape letters: B sequences, S tokens, H hidden, A heads, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.model import Family, ModelSpec

Weights = Mapping[str, Tensor]


def reference_logits(spec: ModelSpec, weights: Weights, ids_BS: Tensor) -> Tensor:
    """[B, S, V] for whole sequences."""
    x_BSH = weights["embedding.weight"][ids_BS]
    if spec.family is Family.GPT2:
        x_BSH = x_BSH + weights["embedding.position"][: ids_BS.shape[1]]
    for layer in range(spec.layers):
        x_BSH = x_BSH + _attention(spec, weights, f"layers.{layer}.attention", x_BSH)
        x_BSH = x_BSH + _mlp(spec, weights, f"layers.{layer}.mlp", x_BSH)
    matrix = weights["embedding.weight" if spec.family is Family.GPT2 else "head.weight"]
    return _norm(spec, weights, "head.norm", x_BSH) @ matrix.T


def reference_loss(spec: ModelSpec, weights: Weights, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """The sum of token losses; labels below 0 are left out."""
    logits = reference_logits(spec, weights, ids_BS).flatten(0, 1)
    labels = torch.where(labels_BS < 0, -100, labels_BS).flatten()
    return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def reference_gradients(
    spec: ModelSpec, weights: Weights, ids_BS: Tensor, labels_BS: Tensor, scale: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss, and the gradients of ``scale`` times it by global name; all sequences of the step at once."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        loss = reference_loss(spec, leaves, ids_BS, labels_BS)
        found = torch.autograd.grad(loss * scale, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, found, strict=True))


def _norm(spec: ModelSpec, weights: Weights, name: str, x: Tensor) -> Tensor:
    if spec.family is Family.GPT2:
        return functional.layer_norm(
            x, (spec.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], spec.norm_epsilon
        )
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.norm_epsilon) * weights[f"{name}.weight"]


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _attention(spec: ModelSpec, weights: Weights, name: str, x_BSH: Tensor) -> Tensor:
    batch, length, _ = x_BSH.shape
    heads, groups, width = spec.heads, spec.kv_heads, spec.head_dim
    joint = _linear(weights, f"{name}.qkv", _norm(spec, weights, f"{name}.norm", x_BSH))
    q, k, v = torch.split(joint, [heads * width, groups * width, groups * width], dim=-1)
    q_BASD = q.view(batch, length, heads, width).transpose(1, 2)
    k_BGSD, v_BGSD = (t.view(batch, length, groups, width).transpose(1, 2) for t in (k, v))
    if spec.family is Family.LLAMA:
        q_BASD, k_BGSD = _rotated(spec, q_BASD), _rotated(spec, k_BGSD)
    k_BASD, v_BASD = (t.repeat_interleave(heads // groups, dim=1) for t in (k_BGSD, v_BGSD))
    scores = q_BASD @ k_BASD.mT / width**0.5
    hidden_future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights_BASS = scores.masked_fill(hidden_future, float("-inf")).softmax(-1)
    return _linear(weights, f"{name}.out", (weights_BASS @ v_BASD).transpose(1, 2).flatten(2))


def _rotated(spec: ModelSpec, x_BASD: Tensor) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, turned by position x theta^(-2i/D)."""
    half = spec.head_dim // 2
    frequency = spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x_BASD.shape[2], dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.complex(x_BASD[..., :half].double(), x_BASD[..., half:].double()) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x_BASD.dtype)


def _mlp(spec: ModelSpec, weights: Weights, name: str, x: Tensor) -> Tensor:
    normed = _norm(spec, weights, f"{name}.norm", x)
    if spec.family is Family.GPT2:
        return _linear(
            weights, f"{name}.down", functional.gelu(_linear(weights, f"{name}.up", normed), approximate="tanh")
        )
    gate, up = _linear(weights, f"{name}.gate_up", normed).chunk(2, dim=-1)
    return _linear(weights, f"{name}.down", functional.silu(gate) * up)
