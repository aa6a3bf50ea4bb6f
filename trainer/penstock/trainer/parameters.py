"""A stage's trained tensors in flat buffers: master weights, gradients, and the copy used in products.

Of tensors that shards divide (`penstock.core.sharding`) a shard has its pieces, one after the other; names are global.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.layout import Parameter, Precision, declared_parameters
from penstock.core.model import ModelSpec
from penstock.core.sharding import WHOLE, Sharding
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
    """The parameters of units [first, stop) that one shard holds, by global name.

    ``master``, ``gradients`` and ``compute`` are views of the flat buffers: decayed tensors first, then the others,
    each in the units' order. ``declared`` says what they are parts of, and of which shape.
    """

    def __init__(
        self,
        spec: ModelSpec,
        first: int,
        stop: int,
        *,
        sharding: Sharding = WHOLE,
        shard: int = 0,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Initialised from (seed, name) alone, so that every partition starts from the same weights."""
        self.sharding, self.shard = sharding, shard
        self.declared = _in_flat_order(spec, first, stop)
        self._shapes = {name: p.shard_shape(sharding.tp, shard) for name, p in self.declared.items()}
        num_decayed = sum(math.prod(self._shapes[name]) for name, p in self.declared.items() if p.decay)
        total = sum(math.prod(shape) for shape in self._shapes.values())
        super().__init__(total, num_decayed, precision=precision, device=device)
        self.master = self.by_name(self.master_flat)
        self.gradients = self.by_name(self.gradient_flat)
        self.compute = self.master if self.compute_flat is self.master_flat else self.by_name(self.compute_flat)
        for name, parameter in self.declared.items():
            self.master[name].copy_(self._own_part(parameter, initial_value(spec, parameter, seed)))
        self.refresh_compute()

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer that is laid out like `master_flat`."""
        views, offset = {}, 0
        for name, shape in self._shapes.items():
            num_elements = math.prod(shape)
            views[name] = flat[offset : offset + num_elements].view(shape)
            offset += num_elements
        return views

    def load(self, tensors: Mapping[str, Tensor], where: str = "") -> None:
        """Copy the shard's part of the named tensors, which are whole, into the masters; ``tensors`` may hold more than
        this stage needs.

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
        for name, parameter in self.declared.items():
            self.master[name].copy_(self._own_part(parameter, tensors[name]))
        self.refresh_compute()

    def _own_part(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """The shard's pieces of a whole tensor, one after the other."""
        pieces = parameter.pieces(self.sharding.tp, self.shard)
        parts = [whole.narrow(parameter.axis, piece.start, piece.size) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=parameter.axis)

    @property
    def shared_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of which every shard has an addend, to be summed over all shards: with sequence parallelism those
        of tensors that are not divided, since each shard adds its own tokens.
        """
        if not self.sharding.by_tokens:
            return ()
        return tuple(self.gradients[name] for name, parameter in self.declared.items() if not parameter.blocks)

    @property
    def copied_gradients(self) -> tuple[Tensor, ...]:
        """Gradients to be summed over the `ModelSpec.kv_copies` neighbouring shards that hold the same key/value heads,
        since each adds what its own query heads give: views of the rows of k and of v.
        """
        tp = self.sharding.tp
        return tuple(
            part
            for name, parameter in self.declared.items()
            if parameter.blocks
            for part, block in zip(self._parts(name), parameter.blocks, strict=True)
            if block.copies(tp) > 1
        )

    def counted_gradients(self) -> list[tuple[str, Tensor]]:
        """Gradients that this shard counts in the model's norm, with their names, so that all stages and shards
        together count every element once: what it holds first of all shards.
        """
        counted = []
        for name, parameter in self.declared.items():
            if parameter.is_copy:
                continue
            pieces = parameter.pieces(self.sharding.tp, self.shard)
            if all(piece.is_owner for piece in pieces):
                counted.append((name, self.gradients[name]))
            else:
                parts = zip(self._parts(name), pieces, strict=True)
                counted += [(name, part) for part, piece in parts if piece.is_owner]
        return counted

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        """Views of a gradient's pieces."""
        parameter = self.declared[name]
        sizes = [piece.size for piece in parameter.pieces(self.sharding.tp, self.shard)]
        return torch.split(self.gradients[name], sizes, dim=parameter.axis)


def _in_flat_order(spec: ModelSpec, first: int, stop: int) -> dict[str, Parameter]:
    return dict(sorted(declared_parameters(spec, first, stop).items(), key=lambda item: not item[1].decay))


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
