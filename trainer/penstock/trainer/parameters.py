"""A stage's trained tensors in flat buffers: master weights, gradients, and the copy used in products."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.layout import Parameter, Precision, parameters
from penstock.core.model import ModelSpec
from penstock.trainer.dtypes import accumulate_dtype, compute_dtype

_STD = 0.02
_POSITION_STD = 0.01
_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


class FlatParameters:
    """What an optimizer steps: flat buffers of ``total`` elements, of which weight decay applies to the first
    ``num_decayed``.

    ``compute_flat`` is what products use: ``master_flat`` itself, or its bf16 copy, renewed by `refresh_compute` after
    every change of the masters.
    """

    def __init__(self, total: int, num_decayed: int, *, precision: Precision, device: torch.device) -> None:
        wide, narrow = accumulate_dtype(precision), compute_dtype(precision)
        self.num_decayed = num_decayed
        self.master_flat = torch.empty(total, dtype=wide, device=device)
        self.gradient_flat = torch.zeros(total, dtype=wide, device=device)
        self.compute_flat = self.master_flat if narrow == wide else torch.empty(total, dtype=narrow, device=device)

    def refresh_compute(self) -> None:
        """Renew the copy used in products; nothing to do where it is the master itself."""
        if self.compute_flat is not self.master_flat:
            self.compute_flat.copy_(self.master_flat)


class StageParameters(FlatParameters):
    """The parameters of units [first, stop), by global name.

    ``master``, ``gradients`` and ``compute`` are views of the flat buffers: decayed tensors first, then the others,
    each in the units' order.
    """

    def __init__(
        self, spec: ModelSpec, first: int, stop: int, *, precision: Precision, device: torch.device, seed: int
    ) -> None:
        """Initialised from (seed, name) alone, so that every partition starts from the same weights."""
        self.declared = _in_flat_order(spec, first, stop)
        num_decayed = sum(p.num_elements for p in self.declared.values() if p.decay)
        total = sum(p.num_elements for p in self.declared.values())
        super().__init__(total, num_decayed, precision=precision, device=device)
        self.master = self.by_name(self.master_flat)
        self.gradients = self.by_name(self.gradient_flat)
        self.compute = self.master if self.compute_flat is self.master_flat else self.by_name(self.compute_flat)
        for name, parameter in self.declared.items():
            self.master[name].copy_(initial_value(spec, parameter, seed))
        self.refresh_compute()

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer that is laid out like `master_flat`."""
        views, offset = {}, 0
        for name, parameter in self.declared.items():
            views[name] = flat[offset : offset + parameter.num_elements].view(parameter.shape)
            offset += parameter.num_elements
        return views

    def load(self, tensors: Mapping[str, Tensor], where: str = "") -> None:
        """Copy the named tensors into the masters; ``tensors`` may hold more than this stage needs.

        Raises UserError, before anything is changed, for a missing name or another shape.
        """
        for name, parameter in self.declared.items():
            if name not in tensors:
                raise UserError(
                    what=f"{name} is missing", where=where, remedy="choose weights made for this model's dimensions"
                )
            if tuple(tensors[name].shape) != parameter.shape:
                raise UserError(
                    what=f"{name} has shape {list(tensors[name].shape)}, the model needs {list(parameter.shape)}",
                    where=where,
                    remedy="make spec.model match the weights",
                )
        for name in self.declared:
            self.master[name].copy_(tensors[name])
        self.refresh_compute()


def _in_flat_order(spec: ModelSpec, first: int, stop: int) -> dict[str, Parameter]:
    unique = {p.name: p for unit in spec.units[first:stop] for p in parameters(spec, unit)}
    return dict(sorted(unique.items(), key=lambda item: not item[1].decay))


def initial_value(spec: ModelSpec, parameter: Parameter, seed: int) -> Tensor:
    """The starting value of one parameter, fp32 on the CPU, the same in every precision and on every device.

    Matrices are normal with deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 layers), learned
    positions 0.01, norms 1 and biases 0 (GPT-2, Radford et al. 2019, section 2.3, and its released code).
    """
    if parameter.name.endswith(".bias"):
        return torch.zeros(parameter.shape)
    if parameter.name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    std = _STD
    if parameter.name.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.layers)
    elif parameter.name.endswith(".position"):
        std = _POSITION_STD
    digest = hashlib.sha256(f"{seed}:{parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(parameter.shape).normal_(std=std, generator=generator)
