"""The baseline's model: gpt2 as plain modules with autograd and torch's fused attention, split into stages.

Shape letters: B sequences, S tokens, H hidden, A heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.model import ModelSpec


class Block(nn.Module):
    """One block of gpt2."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = spec.hidden
        self.heads = spec.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h, spec.norm_epsilon), nn.LayerNorm(h, spec.norm_epsilon)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, spec.ffn_hidden), nn.Linear(spec.ffn_hidden, h)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x_BSH)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.out(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up(self.mlp_norm(x_BSH)), approximate="tanh")
        output: Tensor = x_BSH + self.down(hidden)
        return output


class Part(nn.Module):
    """Blocks [first, stop), with the embedding before block 0 and the head after the last."""

    def __init__(self, spec: ModelSpec, first: int, stop: int) -> None:
        super().__init__()
        self.spec, self.first, self.stop = spec, first, stop
        self.blocks = nn.ModuleList(Block(spec) for _ in range(first, stop))
        if first == 0:
            self.embedding = nn.Embedding(spec.vocab, spec.hidden)
            self.position = nn.Parameter(torch.zeros(spec.positions, spec.hidden))
        if stop == spec.layers:
            self.norm = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
            self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first == 0:
            x = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.stop == self.spec.layers else x

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load penstock's weights by global name."""
        own = {name: weights[_global_name(name, self.first)] for name, _ in self.named_parameters()}
        self.load_state_dict(own)


def _global_name(name: str, first: int) -> str:
    fixed = {
        "embedding.weight": "embedding.weight",
        "position": "embedding.position",
        "head.weight": "embedding.weight",
        "norm.weight": "head.norm.weight",
        "norm.bias": "head.norm.bias",
    }
    if name in fixed:
        return fixed[name]
    _, number, module, kind = name.split(".")
    place = {
        "attention_norm": "attention.norm",
        "mlp_norm": "mlp.norm",
        "qkv": "attention.qkv",
        "out": "attention.out",
        "up": "mlp.up",
        "down": "mlp.down",
    }[module]
    return f"layers.{first + int(number)}.{place}.{kind}"


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy per token."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
