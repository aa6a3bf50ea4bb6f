"""Builds the units of one stage from its parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.core.layout import KEYS_AT_ONCE
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.activation import build_activation
from penstock.trainer.units.attention import Attention
from penstock.trainer.units.backends import AttentionBackend, build_backend
from penstock.trainer.units.division import Division
from penstock.trainer.units.mlp import Mlp
from penstock.trainer.units.prefix import PrefixAttention
from penstock.trainer.units.rotary import Rotary
from penstock.trainer.units.workspace import Workspace


def build_blocks(
    spec: ModelSpec,
    first: int,
    stop: int,
    *,
    parameters: StageParameters,
    division: Division,
    workspace: Workspace,
    prefix: Workspace,
    sequence_length: int,
    backend: AttentionBackend | None = None,
) -> Mapping[int, Attention | Mlp]:
    """The attention and MLP units of [first, stop) by index, in ascending order. They share tables, kernels and
    workspace.
    """
    dtype, device = parameters.compute_flat.dtype, parameters.compute_flat.device
    backend = backend or build_backend(device, dtype, spec.head_dim, sequence_length)
    attention = PrefixAttention(backend, prefix, KEYS_AT_ONCE)
    rotary = _rotary(spec, sequence_length, dtype, device)
    activation = build_activation(spec, dtype, device)
    blocks: dict[int, Attention | Mlp] = {}
    for unit in spec.units[first:stop]:
        if unit.kind is UnitKind.ATTENTION:
            blocks[unit.index] = Attention(spec, unit.name, parameters, division, workspace, attention, rotary)
        elif unit.kind is UnitKind.MLP:
            blocks[unit.index] = Mlp(spec, unit.name, parameters, division, workspace, activation)
    return blocks


def _rotary(spec: ModelSpec, sequence_length: int, dtype: torch.dtype, device: torch.device) -> Rotary | None:
    if spec.family is Family.GPT2:
        return None
    return Rotary(spec.head_dim, spec.rope_theta, sequence_length, dtype, device)
