"""The trained tensors of a stage in flat buffers: master weights, gradients, and compute weights.

Of a tensor that shards divide (`penstock.core.sharding`), a shard has its pieces, one after the other. Names are
global.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.core.buckets import completed_by_units
from penstock.core.errors import UserError
from penstock.core.layout import Parameter, Precision, declared_parameters
from penstock.core.model import ModelSpec
from penstock.core.replicas import Section, replica_layout
from penstock.core.schedule import Part
from penstock.core.sharding import WHOLE, Sharding
from penstock.trainer.dtypes import accumulate_dtype, compute_dtype
from penstock.trainer.squared_norm import Stretch

_STD = 0.02
_POSITION_STD = 0.01
_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


class FlatParameters:
    """Flat buffers for an optimizer, in ``sections``.

    ``own`` has the range of each section that this ``replica`` updates. ``masters`` cover these ranges, and
    `own_gradients` their gradients; ``gradient_flat`` and ``compute_flat`` cover everything. Matrix products use
    ``compute_flat``: it is either the masters themselves, together with those of other replicas, or bf16 copies.
    `refresh_compute` updates this replica's copies after every change of its masters.
    """

    def __init__(
        self, sections: Sequence[Section], *, precision: Precision, device: torch.device, replica: int = 0
    ) -> None:
        wide, narrow = accumulate_dtype(precision), compute_dtype(precision)
        self.sections, total = tuple(sections), sections[-1].place.stop
        self.own = tuple(section.shard(replica) for section in sections)
        self.gradient_flat = torch.zeros(total, dtype=wide, device=device)
        self.compute_flat = torch.zeros(total, dtype=narrow, device=device)
        self.masters = tuple(self.compute_flat[own] for own in self.own)
        if narrow != wide:
            self.masters = tuple(torch.zeros_like(master, dtype=wide) for master in self.masters)

    @property
    def own_gradients(self) -> tuple[Tensor, ...]:
        """The gradients of the ranges that this replica updates."""
        return tuple(self.gradient_flat[own] for own in self.own)

    @property
    def own_decayed(self) -> tuple[int, ...]:
        """The number of elements of each master with weight decay, the first ones."""
        return tuple(
            min(max(section.start + section.num_decayed - own.start, 0), section.shard_elements)
            for section, own in zip(self.sections, self.own, strict=True)
        )

    @property
    def is_divided(self) -> bool:
        """Whether other replicas update parts of the buffers."""
        return any(section.shard_elements < section.total for section in self.sections)

    @property
    def has_copy(self) -> bool:
        """Whether compute weights are copies, of another type than the masters."""
        return self.compute_flat.dtype != self.gradient_flat.dtype

    def refresh_compute(self) -> None:
        """Update the compute copies of this replica's masters; nothing to do where they are the masters themselves."""
        for own, master in zip(self.own, self.masters, strict=True) if self.has_copy else ():
            self.compute_flat[own].copy_(master)


class StageParameters(FlatParameters):
    """The parameters of units [first, stop) that one shard holds, by global name.

    ``gradients`` and ``compute`` are views of the flat buffers: of each section the tensors with weight decay first,
    then the others, both in the order of units. ``declared`` describes the whole tensors that they are parts of.
    If ``dp`` replicas divide the optimizer state, this is ``replica``, and each of ``buckets``, ranges of units, is
    a section; by default there is one, which is not divided (`penstock.core.replicas`).

    ``master`` has the views with the masters' precision: of all tensors, unless compute weights are copies and other
    replicas have part of the masters. In that case it has the tensors without weight decay, norms and biases, which
    norms on the host use. These are views of ``wide_flat``, of which each replica updates its own part. On CUDA, norms
    use ``compute`` then, and ``master`` is empty.
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
        buckets: Sequence[Part] = (),
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Initial values depend on (seed, name) alone, so every partition starts from the same weights."""
        self.sharding, self.shard = sharding, shard
        self._completed = completed_by_units(spec, first, stop)
        self._buckets = tuple(buckets) or (Part(0, stop - first),)
        declared = declared_parameters(spec, first, stop)
        in_sections = [_in_flat_order(declared, self._completed_by(part)) for part in self._buckets]
        self.declared = {name: declared[name] for names in in_sections for name in names}
        self._section_of = {name: number for number, names in enumerate(in_sections) for name in names}
        self._shapes = {name: p.shard_shape(sharding.tp, shard) for name, p in self.declared.items()}
        self._offsets: dict[str, int] = {}
        sections = list(self._laid_out(in_sections, dp))
        super().__init__(sections, precision=precision, device=device, replica=replica)
        self.gradients = self.by_name(self.gradient_flat)
        self.compute = self.by_name(self.compute_flat)
        self.wide_flat, self.master = self._wide_views()
        for name, parameter in self.declared.items():
            self._set(name, initial_value(spec, parameter, seed))

    def _laid_out(self, in_sections: Sequence[Sequence[str]], dp: int) -> Iterator[Section]:
        """The sections with these tensors; sets `_offsets`."""
        start = 0
        for names in in_sections:
            layout = replica_layout([math.prod(self._shapes[name]) for name in names], dp)
            self._offsets.update((name, start + offset) for name, offset in zip(names, layout.offsets, strict=True))
            decayed_stops = [self._place(name).stop - start for name in names if self.declared[name].decay]
            yield Section(start, layout.total, max(decayed_stops, default=0), layout.shard_elements)
            start += layout.total

    def _wide_views(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not self.has_copy:
            return None, self.compute
        if not self.is_divided:
            return None, self.by_name(self.masters[0])
        if self.compute_flat.is_cuda:
            return None, {}
        wide_flat = self.gradient_flat.new_zeros(sum(stop - start for start, stop in self._undecayed()))
        views: dict[str, Tensor] = {}
        begin = 0
        for number, (start, stop) in enumerate(self._undecayed()):
            names = [name for name, own in self._section_of.items() if own == number]
            names = [name for name in names if not self.declared[name].decay]
            views |= {name: self._view(name, wide_flat, start - begin) for name in names}
            begin += stop - start
        return wide_flat, views

    def _undecayed(self) -> list[tuple[int, int]]:
        """Of every section the range of the flat buffers without weight decay."""
        return [(section.start + section.num_decayed, section.place.stop) for section in self.sections]

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

    def own_parts(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of buffers with the layout of `masters`: whole tensors or, if they are divided, flat parts of them that
        begin at element `starts`.
        """
        if not self.is_divided:
            (flat,) = flats
            return self.by_name(flat)
        parts = {}
        for name, part in self._own_places():
            number = self._section_of[name]
            start = self.own[number].start
            parts[name] = flats[number][part.start - start : part.stop - start]
        return parts

    @property
    def starts(self) -> dict[str, int]:
        """First elements of the parts of tensors that this replica updates; empty if it updates all of them."""
        places = self._own_places() if self.is_divided else ()
        return {name: part.start - self._offsets[name] for name, part in places}

    def _own_places(self) -> Iterator[tuple[str, slice]]:
        """The parts of tensors that this replica updates, as ranges of the flat buffers."""
        for name, number in self._section_of.items():
            place, own = self._place(name), self.own[number]
            part = slice(max(place.start, own.start), min(place.stop, own.stop))
            if part.start < part.stop:
                yield name, part

    def refresh_compute(self) -> None:
        """Update also the wide copy of norms and biases; it is zero outside of this replica's part, to be summed over
        replicas.
        """
        super().refresh_compute()
        if self.wide_flat is None:
            return
        self.wide_flat.zero_()
        begin = 0
        for (first, last), own, cut, master in zip(
            self._undecayed(), self.own, self.own_decayed, self.masters, strict=True
        ):
            start, stop = (begin + max(bound - first, 0) for bound in (own.start, own.stop))
            self.wide_flat[start:stop].copy_(master[cut:])
            begin += last - first

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
        value = self._own_part(self.declared[name], whole).to(self.gradient_flat.dtype)
        self.compute[name].copy_(value)
        if name in self.master:
            self.master[name].copy_(value)
        part = self.own_parts(self.masters).get(name)
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
        those of all units. If replicas divide them, they are a section.
        """
        if part is None:
            return [self.gradient_flat]
        if self.is_divided:
            return [self.gradient_flat[self.sections[self.section_of(part)].place]]
        stretches: list[slice] = []
        for name in self._names_of(part):
            place = self._place(name)
            if stretches and stretches[-1].stop == place.start:
                place = slice(stretches.pop().start, place.stop)
            stretches.append(place)
        return [self.gradient_flat[stretch] for stretch in stretches]

    def section_of(self, part: Part | None) -> int:
        """Number of the section of a bucket; 0 for the whole stage."""
        return 0 if part is None else self._buckets.index(part)

    def wide_section(self, number: int) -> Tensor | None:
        """The part of `wide_flat` that belongs to a section; None if there is none."""
        if self.wide_flat is None:
            return None
        sizes = [stop - start for start, stop in self._undecayed()]
        begin = sum(sizes[:number])
        return self.wide_flat[begin : begin + sizes[number]]

    def _names_of(self, part: Part | None) -> list[str]:
        """The parameters whose gradients some units complete, in the order of the flat buffers."""
        if part is None:
            return list(self.declared)
        completed = self._completed_by(part)
        return [name for name in self.declared if name in completed]

    def _completed_by(self, part: Part) -> set[str]:
        return {name for names in self._completed[part.first : part.stop] for name in names}

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


def _in_flat_order(declared: Mapping[str, Parameter], section: Collection[str]) -> list[str]:
    """The tensors of a section in the order of its part of the flat buffers."""
    return sorted((name for name in declared if name in section), key=lambda name: not declared[name].decay)


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
