"""The trained tensors of a stage in flat buffers: master weights, gradients, and compute weights.

Of a tensor that shards divide (`penstock.core.sharding`), a shard has its pieces, one after the other. Names are
global.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.core.buckets import completed_by_units
from penstock.core.errors import UserError
from penstock.core.layout import Parameter, Precision, declared_parameters
from penstock.core.model import ModelSpec
from penstock.core.replicas import replica_layout
from penstock.core.schedule import Part
from penstock.core.sharding import WHOLE, Sharding
from penstock.trainer.dtypes import accumulate_dtype, compute_dtype
from penstock.trainer.squared_norm import Stretch

_STD = 0.02
_POSITION_STD = 0.01
_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


class FlatParameters:
    """Flat buffers for an optimizer: ``total`` elements, of which the first ``num_decayed`` have weight decay.

    ``own`` is the range that this replica updates, by default everything. ``master_flat`` covers that range, and
    `own_gradient_flat` its gradients; ``gradient_flat`` and ``compute_flat`` cover everything. Matrix products use
    ``compute_flat``: it is either the masters themselves, together with those of other replicas, or bf16 copies.
    `refresh_compute` updates this replica's copies after every change of its masters.
    """

    def __init__(
        self, total: int, num_decayed: int, *, precision: Precision, device: torch.device, own: slice | None = None
    ) -> None:
        wide, narrow = accumulate_dtype(precision), compute_dtype(precision)
        self.num_decayed, self.own = num_decayed, slice(0, total) if own is None else own
        self.gradient_flat = torch.zeros(total, dtype=wide, device=device)
        self.compute_flat = torch.zeros(total, dtype=narrow, device=device)
        if narrow != wide:
            self.master_flat = torch.zeros(self.own.stop - self.own.start, dtype=wide, device=device)
        else:
            self.master_flat = self.compute_flat if own is None else self.compute_flat[own]

    @property
    def own_gradient_flat(self) -> Tensor:
        """The gradients of the range that this replica updates."""
        return self.gradient_flat[self.own]

    @property
    def own_decayed(self) -> int:
        """The number of elements with weight decay, the first of the masters."""
        return min(max(self.num_decayed - self.own.start, 0), self.own.stop - self.own.start)

    @property
    def is_divided(self) -> bool:
        """Whether other replicas update parts of the buffers."""
        return len(self.master_flat) < len(self.gradient_flat)

    @property
    def has_copy(self) -> bool:
        """Whether compute weights are copies, of another type than the masters."""
        return self.compute_flat.dtype != self.master_flat.dtype

    def refresh_compute(self) -> None:
        """Update the compute copies of this replica's masters; nothing to do where they are the masters themselves."""
        if self.has_copy:
            self.compute_flat[self.own].copy_(self.master_flat)


class StageParameters(FlatParameters):
    """The parameters of units [first, stop) that one shard holds, by global name.

    ``gradients`` and ``compute`` are views of the flat buffers: tensors with weight decay first, then the others, each
    in the order of units. ``declared`` has their shapes and the whole tensors that they are parts of. If ``dp``
    replicas divide the optimizer state, this is ``replica``; by default it is not divided (`penstock.core.replicas`).

    ``master`` has the views with the masters' precision: of all tensors, unless compute weights are copies and other
    replicas have part of the masters. In that case it has the tensors without weight decay, norms and biases, which
    norms on the host use. These are views of ``wide_flat``, of which each replica updates its own part. On CUDA norms
    use ``compute``, and ``master`` is empty.
    """

    def __init__(
        self,
        spec: ModelSpec,
        first: int,
        stop: int,
        *,
        sharding: Sharding = WHOLE,
        shard: int = 0,
        dp: int = 1,
        replica: int = 0,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Initial values depend on (seed, name) alone, so every partition starts from the same weights."""
        self.sharding, self.shard = sharding, shard
        self._completed = completed_by_units(spec, first, stop)
        self.declared = _in_flat_order(spec, first, stop)
        self._shapes = {name: p.shard_shape(sharding.tp, shard) for name, p in self.declared.items()}
        layout = replica_layout([math.prod(shape) for shape in self._shapes.values()], dp)
        self._offsets = dict(zip(self._shapes, layout.offsets, strict=True))
        num_decayed = max((self._place(name).stop for name, p in self.declared.items() if p.decay), default=0)
        own = layout.shard(replica)
        super().__init__(layout.total, num_decayed, precision=precision, device=device, own=own)
        self.gradients = self.by_name(self.gradient_flat)
        self.compute = self.by_name(self.compute_flat)
        self.wide_flat, self.master = self._wide_views()
        for name, parameter in self.declared.items():
            self._set(name, initial_value(spec, parameter, seed))

    def _wide_views(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not self.has_copy:
            return None, self.compute
        if not self.is_divided:
            return None, self.by_name(self.master_flat)
        if self.master_flat.is_cuda:
            return None, {}
        start = self.num_decayed
        wide_flat = self.master_flat.new_zeros(len(self.compute_flat) - start)
        names = [name for name, parameter in self.declared.items() if not parameter.decay]
        return wide_flat, {name: self._view(name, wide_flat, start) for name in names}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer with the layout of `gradient_flat`."""
        return {name: self._view(name, flat) for name in self._shapes}

    def _view(self, name: str, flat: Tensor, start: int = 0) -> Tensor:
        """The view of a tensor in a buffer that begins at element ``start`` of the layout."""
        place = self._place(name)
        return flat[place.start - start : place.stop - start].view(self._shapes[name])

    def _place(self, name: str) -> slice:
        offset = self._offsets[name]
        return slice(offset, offset + math.prod(self._shapes[name]))

    def own_parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer with the layout of `master_flat`: whole tensors or, if it is divided, flat parts of them
        that begin at element `starts`.
        """
        if not self.is_divided:
            return self.by_name(flat)
        return {
            name: flat[part.start - self.own.start : part.stop - self.own.start] for name, part in self._own_places()
        }

    @property
    def starts(self) -> dict[str, int]:
        """First elements of the parts of tensors that this replica updates; empty if it updates all of them."""
        places = self._own_places() if self.is_divided else ()
        return {name: part.start - self._offsets[name] for name, part in places}

    def _own_places(self) -> Iterator[tuple[str, slice]]:
        """The parts of tensors that this replica updates, as ranges of the flat buffers."""
        for name in self._shapes:
            place = self._place(name)
            part = slice(max(place.start, self.own.start), min(place.stop, self.own.stop))
            if part.start < part.stop:
                yield name, part

    def refresh_compute(self) -> None:
        """Update also the wide copy of norms and biases; it is zero outside of this replica's part, to be summed over
        replicas.
        """
        super().refresh_compute()
        if self.wide_flat is not None:
            start, stop = (max(bound - self.num_decayed, 0) for bound in (self.own.start, self.own.stop))
            self.wide_flat.zero_()
            self.wide_flat[start:stop].copy_(self.master_flat[self.own_decayed :])

    def load(self, tensors: Mapping[str, Tensor], where: str = "") -> None:
        """Copy the shard's part of the named whole tensors to masters and copies; ``tensors`` may hold more than this
        stage needs.

        Raises UserError, before anything is changed, for a missing name or a wrong shape.
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
            self._set(name, tensors[name])

    def _set(self, name: str, whole: Tensor) -> None:
        """Copy the shard's part of a whole tensor to every buffer that has it."""
        value = self._own_part(self.declared[name], whole).to(self.master_flat.dtype)
        self.compute[name].copy_(value)
        if name in self.master:
            self.master[name].copy_(value)
        part = self.own_parts(self.master_flat).get(name)
        if part is not None:
            start = self.starts.get(name, 0)
            part.view(-1).copy_(value.reshape(-1)[start : start + part.numel()])

    def _own_part(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """The shard's pieces of a whole tensor, one after the other."""
        pieces = parameter.pieces(self.sharding.tp, self.shard)
        parts = [whole.narrow(parameter.axis, piece.start, piece.size) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=parameter.axis)

    def bucket(self, part: Part | None) -> list[Tensor]:
        """The gradients that the backward of some units of the stage completes, in contiguous stretches; by default
        those of all units.
        """
        if part is None:
            return [self.gradient_flat]
        stretches: list[slice] = []
        for name in self._names_of(part):
            place = self._place(name)
            if stretches and stretches[-1].stop == place.start:
                place = slice(stretches.pop().start, place.stop)
            stretches.append(place)
        return [self.gradient_flat[stretch] for stretch in stretches]

    def _names_of(self, part: Part | None) -> list[str]:
        """The parameters whose gradients some units complete, in the order of the flat buffers."""
        if part is None:
            return list(self.declared)
        completed = {name for names in self._completed[part.first : part.stop] for name in names}
        return [name for name in self.declared if name in completed]

    def shared_gradients(self, part: Part | None = None) -> tuple[Tensor, ...]:
        """Gradients to be summed over all shards: with sequence parallelism those of undivided tensors, since each
        shard adds only the terms of its own tokens. With ``part`` only those that these units complete.
        """
        if not self.sharding.by_tokens:
            return ()
        return tuple(self.gradients[name] for name in self._names_of(part) if not self.declared[name].blocks)

    def copied_gradients(self, part: Part | None = None) -> tuple[Tensor, ...]:
        """Gradients to be summed over the `ModelSpec.kv_copies` adjacent shards with the same key/value heads: views of
        the rows of k and v. Each shard adds only the terms of its own query heads. With ``part`` only those that these
        units complete.
        """
        tp = self.sharding.tp
        return tuple(
            view
            for name in self._names_of(part)
            if self.declared[name].blocks
            for view, block in zip(self._parts(name), self.declared[name].blocks, strict=True)
            if block.copies(tp) > 1
        )

    def counted_stretches(self) -> Iterator[Stretch]:
        """The gradients that this shard counts in the model's norm, among those for which this replica has the sums.

        All stages, shards and dividing replicas together count every element once: the first shard that holds an
        element counts it.
        """
        for name, part in self._own_places():
            for counted in self._counted(name):
                start, stop = max(part.start, counted.start), min(part.stop, counted.stop)
                if start < stop:
                    yield Stretch(self.gradient_flat, self._offsets[name], start, stop)

    def _counted(self, name: str) -> Iterator[slice]:
        """The parts of a tensor that this shard counts, as ranges of the flat buffers. If other shards hold some of its
        pieces too, it is counted piece by piece, by rows.
        """
        parameter, place = self.declared[name], self._place(name)
        if parameter.is_copy:
            return
        pieces = parameter.pieces(self.sharding.tp, self.shard)
        if all(piece.is_owner for piece in pieces):
            yield place
            return
        start, row = place.start, math.prod(self._shapes[name][1:])
        for piece in pieces:
            stop = start + piece.size * row
            if piece.is_owner:
                yield slice(start, stop)
            start = stop

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        """Views of the pieces of a gradient."""
        parameter = self.declared[name]
        sizes = [piece.size for piece in parameter.pieces(self.sharding.tp, self.shard)]
        return torch.split(self.gradients[name], sizes, dim=parameter.axis)


def _in_flat_order(spec: ModelSpec, first: int, stop: int) -> dict[str, Parameter]:
    return dict(sorted(declared_parameters(spec, first, stop).items(), key=lambda item: not item[1].decay))


def initial_value(spec: ModelSpec, parameter: Parameter, seed: int) -> Tensor:
    """The initial value of one parameter, fp32 on the CPU, the same in every precision and on every device.

    Matrices are normal with standard deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 layers),
    learned positions 0.01. Norms are 1 and biases 0 (GPT-2, Radford et al. 2019, section 2.3, and its released code).
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
