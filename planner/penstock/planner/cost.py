"""Seconds of every kind of work, from a Profile's measurements or from a described device.

All models have the same interface, vectorised over slices: seconds of F, I or W of a unit for given numbers of tokens
and attended pairs on a rank's device, alone and while the other ranks of its host compute. Only attention depends on
the pairs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.cluster import PENSTOCK, ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.layout import HEAD_CHUNK_TOKENS, Operation, Precision
from penstock.core.model import Family, ModelSpec, UnitKind, attention_flops
from penstock.core.moments import MomentType
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.core.sharding import WHOLE, Collective, Sharding, unit_collectives
from penstock.planner.collectives import RING_PASSES, GroupTopology, Link
from penstock.planner.cost_table import table_times
from penstock.planner.kernels import BACKWARD_FLOPS, KernelTimes, has_work
from penstock.planner.work import MOST_BYTES, Floats, Work, flops_share, head_rows, rows_of

Devices = npt.ArrayLike

MOST_GROUPS = 512
"""Groups of devices whose links are kept."""

COLLECTIVES_OF = {
    Operation.PROJECT: (Collective.GATHER,),
    Operation.OUTPUT: (Collective.SCATTER, Collective.SUM),
}
"""Collectives of a block's F by operation: the gather before the product, and the reduction after it."""


class CostModel(Protocol):
    """Costs of a rank's device and its links, in seconds and bytes; arrays have the shape of the work."""

    @property
    def action_overhead_seconds(self) -> float:
        """Fixed cost of starting any compute action."""
        ...

    @property
    def constant_bytes(self) -> int:
        """Bytes of a rank's process before any parameter."""
        ...

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of one unit's F, I or W while other ranks are idle."""
        ...

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of the host to launch one unit's F, I or W kernel by kernel; 0 where that is unknown or immediate."""
        ...

    @property
    def most_graph_bytes(self) -> int | None:
        """Bytes that the CUDA graphs of a rank's actions may take; None if no action has one."""
        ...

    def graph_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """Bytes that one unit's pass adds to the graph of an action."""
        ...

    def operation_seconds(self, spec: ModelSpec, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """Seconds of one operation of the F of an attention unit or an MLP of ``spec``: a part of `unit_seconds`."""
        ...

    def collective_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """The part of `unit_seconds` in which the device only waits for `unit_collectives`."""
        ...

    def slowdown(self, unit: UnitKind, kind: Kind) -> float:
        """How many times longer the unit takes while all ranks of its host compute; at least 1."""
        ...

    def transient_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """Bytes the unit's action takes beyond its slots."""
        ...

    def transfer(self, source: Devices, target: Devices) -> tuple[Floats, Floats]:
        """(latency seconds, seconds per byte) of messages between devices, elementwise."""
        ...

    def all_reduce_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds of a sum over ``devices``."""
        ...

    def reduce_scatter_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds of a sum over ``devices`` of which each gets its part."""
        ...

    def gradient_sum_seconds(self, num_bytes: int, devices: Sequence[int], *, scattered: bool) -> float:
        """Seconds of a sum of gradients of so many bytes over replicas, in the type in which they exchange them, with
        the conversions; ``scattered``: each gets its part.
        """
        ...

    def all_gather_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds until all ``devices`` have all ``num_bytes``, starting with one part each."""
        ...

    def optimizer_seconds(self, num_parameters: int) -> float:
        """Seconds of clipping and updating ``num_parameters`` elements."""
        ...


class UnitTimes(Protocol):
    """Seconds of a model's units on one device, without collectives."""

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of one unit's F, I or W."""
        ...


class OperationTimes(UnitTimes, Protocol):
    """Seconds of a model's units by a description of the device."""

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of the host to launch one unit's F, I or W."""
        ...

    def operation_seconds(self, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """Seconds of one operation of the F of a block's unit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedCost:
    """Costs of a described cluster: its device's times of a shard of each unit, and the collectives inside its passes.

    These are `penstock.core.sharding.unit_collectives`, and for the head one gather per chunk for the softmax over the
    whole vocabulary. The devices of a rank are adjacent, on one node or on whole nodes. If nodes have different links,
    the slowest group counts, wherever a rank is placed. ``copies_prefix`` is as for `KernelTimes`.
    """

    model: ModelSpec
    cluster: ClusterSpec
    precision: Precision
    sharding: Sharding = WHOLE
    copies_prefix: bool = False
    moment_type: MomentType = MomentType.FP32
    reduction_type: ReductionType = ReductionType.FP32
    _links: _Links = field(init=False, repr=False, compare=False)
    _units: UnitTimes = field(init=False, repr=False, compare=False)
    _device: OperationTimes = field(init=False, repr=False, compare=False)
    _groups: tuple[GroupTopology, ...] = field(init=False, repr=False, compare=False)
    """Groups of one rank's shards: one for each distinct set of links."""
    _topology_of: Callable[[tuple[int, ...]], GroupTopology] = field(init=False, repr=False, compare=False)
    _slowest_of: Callable[[tuple[int, ...]], Link] = field(init=False, repr=False, compare=False)
    """`topology` and `_slowest_link`; those of recent groups are kept, since every candidate reduces over the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_topology_of", functools.lru_cache(MOST_GROUPS)(self.topology))
        object.__setattr__(self, "_slowest_of", functools.lru_cache(MOST_GROUPS)(self._slowest_link))
        object.__setattr__(self, "_links", _Links.of(self.cluster))
        object.__setattr__(self, "_device", self._device_times())
        object.__setattr__(self, "_units", table_times(self.cluster.costs) if self.cluster.costs else self._device)
        object.__setattr__(self, "_groups", tuple(map(self._group, self._first_devices())))

    def _device_times(self) -> OperationTimes:
        device, kernels = self.cluster.device, self.cluster.device.kernels
        if kernels is None:
            return TokenTimes.of(self.model, device, self.precision, self.sharding)
        return KernelTimes(
            model=self.model,
            device=device,
            kernels=kernels,
            software=self.cluster.software,
            precision=self.precision,
            sharding=self.sharding,
            copies_prefix=self.copies_prefix,
        )

    @property
    def action_overhead_seconds(self) -> float:
        """The device's fixed cost."""
        return self.cluster.device.action_overhead_seconds

    @property
    def constant_bytes(self) -> int:
        """The device's fixed bytes."""
        return self.cluster.device.constant_bytes

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """The device's seconds plus those of the collectives inside the pass; a cost table already includes them."""
        seconds = self._units.unit_seconds(unit, kind, work)
        if self.sharding.tp == 1 or self.cluster.costs:
            return seconds
        exposed, hidden = self._collectives(unit, kind), tuple[Collective, ...]()
        if self.cluster.software.overlapped_collectives and unit in (UnitKind.ATTENTION, UnitKind.MLP):
            exposed, hidden = _next_to_products(kind, self.sharding)
        tokens, places = work.distinct_tokens
        num_bytes = self.model.hidden * self.precision.compute_bytes * self._padded_rows(tokens)
        if hidden:
            seconds = np.maximum(seconds, self._collective_seconds(hidden, num_bytes)[places])
        if exposed:
            seconds = seconds + self._collective_seconds(exposed, num_bytes)[places]
        if unit is UnitKind.HEAD and kind is Kind.F:
            seconds = seconds + self._statistics_seconds(work.tokens)
        return seconds

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """The software's launches; none with a cost table, which was measured with them."""
        return np.zeros(work.tokens.shape) if self.cluster.costs else self._device.launch_seconds(unit, kind, work)

    @property
    def most_graph_bytes(self) -> None:
        """None: descriptions do not state the memory of graphs, and trainers without them launch each kernel."""
        return

    def graph_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """No graphs."""
        return 0

    def operation_seconds(self, spec: ModelSpec, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """The device's seconds, plus those of the operation's collectives; from a cost table the share of the FLOPs.

        A collective counts as the difference that it makes to the pass's collectives up to it, because if a rank's
        devices may have different links, all collectives of a pass have to count for the same devices.
        """
        if self.cluster.costs:
            return self.unit_seconds(unit, Kind.F, work) * flops_share(spec, unit, operation, work)
        seconds = self._device.operation_seconds(unit, operation, work)
        num_bytes = self.model.hidden * self.precision.compute_bytes * self._padded_rows(work.tokens)
        collectives = unit_collectives(unit, Kind.F, self.sharding)
        for place, collective in enumerate(collectives):
            if collective in COLLECTIVES_OF.get(operation, ()):
                with_it, before = (
                    self._collective_seconds(collectives[:stop], num_bytes) for stop in (place + 1, place)
                )
                seconds = seconds + (with_it - before)
        return seconds

    def collective_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Collectives of penstock's own passes; 0 with a cost table, which does not separate them."""
        collectives = self._collectives(unit, kind)
        if not collectives or self.cluster.costs or self.cluster.software.overlapped_collectives:
            return np.zeros(work.tokens.shape)
        num_bytes = self.model.hidden * self.precision.compute_bytes * self._padded_rows(work.tokens)
        return self._collective_seconds(collectives, num_bytes)

    def _collectives(self, unit: UnitKind, kind: Kind) -> tuple[Collective, ...]:
        """`unit_collectives`, and for a head whose I and W are separate passes those of its one product, which is
        divided like a block's first product.
        """
        if unit is UnitKind.HEAD and self.model.head_parts > 1:
            return unit_collectives(unit, kind, self.sharding, head_parts=self.model.head_parts)
        if unit is not UnitKind.HEAD or self.cluster.software.head_in_forward:
            return unit_collectives(unit, kind, self.sharding)
        block_collectives = unit_collectives(UnitKind.MLP, kind, self.sharding)
        return {Kind.F: block_collectives[:-1], Kind.I: block_collectives[-1:]}.get(kind, block_collectives)

    def _padded_rows(self, tokens: Floats) -> Floats:
        """`Sharding.padded_rows`, elementwise."""
        return rows_of(self.sharding, tokens) * self.sharding.tp if self.sharding.by_tokens else tokens

    def _statistics_seconds(self, tokens: Floats) -> Floats:
        """The head's gathers of every shard's maximum, sum of exponentials and target, one per chunk of tokens."""
        in_chunks = self.cluster.software.head_in_forward
        chunks = np.ceil(tokens / HEAD_CHUNK_TOKENS) if in_chunks else np.ones(tokens.shape)
        num_bytes = 3 * self.precision.accumulate_bytes * self.sharding.tp * tokens / chunks
        return chunks * self._collective_seconds((Collective.GATHER,), num_bytes)

    def _collective_seconds(self, collectives: Sequence[Collective], num_bytes: Floats) -> Floats:
        seconds: Floats = np.max([group.seconds(collectives, num_bytes) for group in self._groups], axis=0)
        return seconds

    def _first_devices(self) -> list[int]:
        """First devices of tensor-parallel groups with different links: of every group with an override, and of one
        without.
        """
        nodes = self.sharding.tp // self.cluster.devices_per_node
        if nodes < 2:
            return [0]
        groups = {link.source // nodes for link in self.cluster.links if link.source // nodes == link.target // nodes}
        usual = (group for group in range(self.cluster.num_nodes // nodes) if group not in groups)
        return [group * self.sharding.tp for group in sorted({*groups, *itertools.islice(usual, 1)})]

    def _group(self, first: int) -> GroupTopology:
        """The shards from device ``first`` on; without network cards a ring at the speed of its slowest link."""
        tp, per_node = self.sharding.tp, self.cluster.devices_per_node
        if self.cluster.nics_per_node is not None:
            return self.topology(range(first, first + tp))
        nodes = np.unique(np.arange(first, first + tp) // per_node)
        links = np.stack(self._links.between(nodes, np.roll(nodes, -1))) if len(nodes) > 1 else np.zeros((2, 1))
        if tp > len(nodes):
            links = np.maximum(links, _link(self.cluster.intra_node)[:, None])
        latency, per_byte = links.max(axis=1).tolist()
        slowest = Link(latency=latency, per_byte=per_byte)
        return GroupTopology(inside=slowest, between=slowest, group_sizes=(tp,))

    def slowdown(self, unit: UnitKind, kind: Kind) -> float:
        """Devices of a described cluster do not slow each other."""
        return 1.0

    def transient_bytes(self, unit: UnitKind, kind: Kind, batch: int, length: int, prefix: int) -> int:
        """The head's logits in compute and accumulation type, and the buffers that shards gather and scatter; other
        units work in place.

        A head that leaves its backward to I keeps the logits of all tokens. The I of a part of the head only passes
        gradients on.
        """
        tokens = batch * length
        gathered = self._num_gathered(unit, kind) * self.sharding.padded_rows(tokens)
        num_bytes = gathered * self.model.hidden * self.precision.compute_bytes
        parts, software = self.model.head_parts, self.cluster.software
        is_passed_on = parts > 1 and kind is Kind.I
        if unit is not UnitKind.HEAD or is_passed_on or not has_work(unit, kind, software, parts):
            return min(num_bytes, MOST_BYTES)
        if software.head_in_forward or parts > 1:
            tokens = min(tokens, HEAD_CHUNK_TOKENS)
        width = self.precision.compute_bytes + self.precision.accumulate_bytes
        return min(num_bytes + tokens * head_rows(self.model, self.sharding) * width, MOST_BYTES)

    def _num_gathered(self, unit: UnitKind, kind: Kind) -> int:
        """Number of gathered hidden states that the pass holds beyond its slots: the gathered input, later replaced by
        the addend to be scattered. The head's whole pass holds both. ``dy`` is gathered in its slot.
        """
        if not self.sharding.by_tokens or (unit, kind) == (UnitKind.EMBEDDING, Kind.I):
            return 0
        is_whole_head = unit is UnitKind.HEAD and (self.cluster.software.head_in_forward or self.model.head_parts > 1)
        return min(len(self._collectives(unit, kind)), 2 if is_whole_head else 1)

    def transfer(self, source: Devices, target: Devices) -> tuple[Floats, Floats]:
        """The link between the devices' nodes, an override if there is one."""
        per_node = self.cluster.devices_per_node
        return self._links.between(np.asarray(source) // per_node, np.asarray(target) // per_node)

    def all_reduce_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds by the topology of network cards; without cards, of a ring over ``devices`` at its slowest link."""
        return self._group_seconds(Collective.SUM, num_bytes, devices)

    def reduce_scatter_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds by the same model as `all_reduce_seconds`."""
        return self._group_seconds(Collective.SCATTER, num_bytes, devices)

    def all_gather_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Seconds by the same model as `all_reduce_seconds`."""
        return self._group_seconds(Collective.GATHER, num_bytes, devices)

    def gradient_sum_seconds(self, num_bytes: int, devices: Sequence[int], *, scattered: bool) -> float:
        """Seconds by the same model as `all_reduce_seconds`. In bf16 half the bytes of fp32 travel; memory traffic
        reads all of fp32 and writes half of it before the sum, and the reverse after it, for one part if ``scattered``.
        Gradients that are kept in bf16 are not converted.
        """
        collective = Collective.SCATTER if scattered else Collective.SUM
        if not self._narrows or len(devices) < 2:
            return self._group_seconds(collective, num_bytes, devices)
        widened = num_bytes / len(devices) if scattered else num_bytes
        return self._group_seconds(collective, num_bytes // 2, devices) + self._traffic_seconds(
            1.5 * (num_bytes + widened)
        )

    @property
    def _narrows(self) -> bool:
        """Whether gradients are kept in a wider type than replicas exchange them in."""
        kept_bytes = self.cluster.software.gradient_type.num_bytes(self.precision)
        return self.reduction_type.is_narrow and kept_bytes > 2

    def _group_seconds(self, collective: Collective, num_bytes: int, devices: Sequence[int]) -> float:
        num_devices = len(devices)
        if num_devices < 2:
            return 0.0
        if self.cluster.nics_per_node is not None:
            return float(self._topology_of(tuple(devices)).seconds((collective,), num_bytes))
        slowest = self._slowest_of(tuple(devices))
        return (
            RING_PASSES[collective] * (num_devices - 1) * (slowest.latency + num_bytes / num_devices * slowest.per_byte)
        )

    def _slowest_link(self, devices: tuple[int, ...]) -> Link:
        """The latency and the bandwidth of the slowest links of a ring over ``devices``."""
        latency, per_byte = self.transfer(devices, [*devices[1:], devices[0]])
        return Link(latency=float(latency.max()), per_byte=float(per_byte.max()))

    def topology(self, devices: Sequence[int]) -> GroupTopology:
        """Distribution of ``devices`` over nodes, and their links: between nodes the slowest link of a ring."""
        nodes, sizes = np.unique(np.asarray(devices) // self.cluster.devices_per_node, return_counts=True)
        latency, per_byte = self._links.between(nodes, np.roll(nodes, -1))
        cards = self.cluster.nics_per_node or 1
        inside = self.cluster.intra_node
        return GroupTopology(
            inside=Link(latency=inside.latency_seconds, per_byte=1.0 / inside.bytes_per_second),
            between=Link(
                latency=float(latency.max()), per_byte=float(per_byte.max()) * self.cluster.devices_per_node / cards
            ),
            group_sizes=tuple(sizes.tolist()),
        )

    def optimizer_seconds(self, num_parameters: int) -> float:
        """Memory traffic: master weights and both moments are read and written, gradients are read, and in bf16 a copy
        of the weights is written.
        """
        wide = self.precision.accumulate_bytes
        copied = self.precision.compute_bytes if self.precision is Precision.BF16 else 0
        traffic = num_parameters * (3 * wide + 4 * self.moment_type.num_bytes(self.precision) + copied)
        return self._traffic_seconds(traffic)

    def _traffic_seconds(self, num_bytes: float) -> float:
        """Seconds in which a device reads or writes so many bytes of its memory, one after the other."""
        device = self.cluster.device
        share = device.kernels.stream_share if device.kernels is not None else 1.0
        return num_bytes / (share * device.memory_bandwidth)


def _next_to_products(kind: Kind, sharding: Sharding) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The collectives of a block's unit that a pass waits for, and those that run concurrently with its products.

    Megatron-LM gathers the norm's output again next to the product of its gradient, and sums or scatters that gradient
    next to the product of the weights' gradients (arXiv 2205.05198, sections 4.2.2 and 6.2).
    """
    if kind is Kind.F:
        return unit_collectives(UnitKind.MLP, kind, sharding), ()
    if not sharding.by_tokens:
        return (), (Collective.SUM,) if kind is Kind.W else ()
    gather = (Collective.GATHER,)
    return (gather, gather) if kind is Kind.I else ((), (Collective.SCATTER,))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTimes:
    """Times by an efficiency curve over token counts, for devices whose kernels are not described.

    A unit's time is its matrices' FLOPs at the efficiency of its token count, its attention FLOPs at the best
    efficiency, and the traffic of its hidden states, of which a shard has its rows, at memory bandwidth.
    """

    model: ModelSpec
    device: DeviceSpec
    precision: Precision
    sharding: Sharding
    curve: Floats
    """[log2 of tokens or share, points]."""

    @classmethod
    def of(cls, model: ModelSpec, device: DeviceSpec, precision: Precision, sharding: Sharding) -> TokenTimes:
        """Times with the device's efficiency curve."""
        tokens, shares = zip(*device.efficiency, strict=True)
        curve = np.array([np.log2(tokens), shares])
        return cls(model=model, device=device, precision=precision, sharding=sharding, curve=curve)

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """The F of a whole head includes its backward, so its I and W are free, as is the embedding's I."""
        parts = self.model.head_parts
        if not has_work(unit, kind, PENSTOCK, parts):
            return np.zeros(work.tokens.shape)
        tokens, places = work.distinct_tokens
        passes = _passes(unit, kind, parts)
        peak = self.device.peak_flops
        linear = passes * tokens * self._linear_flops(unit)
        efficiency = np.interp(np.log2(np.maximum(tokens, 1)), *self.curve)
        seconds: Floats = (linear / (peak * efficiency) + self._memory_seconds(unit, kind, tokens))[places]
        if unit is UnitKind.ATTENTION and kind is not Kind.W:
            flops = attention_flops(self.model, 1) * work.pairs * (BACKWARD_FLOPS if kind is Kind.I else 1.0)
            flops = flops / self.sharding.tp
            seconds = seconds + flops / (peak * self.device.efficiency[-1][1])
        return seconds

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """None: an efficiency curve includes launches."""
        return np.zeros(work.tokens.shape)

    def operation_seconds(self, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """Products and attention count with their operations; the norm, the residual and the operation between the
        products each count a third of the traffic.
        """
        tokens, peak = work.tokens, self.device.peak_flops
        if operation is Operation.ATTEND:
            flops = attention_flops(self.model, 1) * work.pairs / self.sharding.tp
            return flops / (peak * self.device.efficiency[-1][1])
        width = self.sharding.hidden(self.model) if unit is UnitKind.ATTENTION else self.sharding.ffn_hidden(self.model)
        falling = 2 * self.model.hidden * width
        linear = {Operation.PROJECT: self._linear_flops(unit) - falling, Operation.OUTPUT: falling}.get(operation, 0)
        efficiency = np.interp(np.log2(np.maximum(tokens, 1)), *self.curve)
        seconds: Floats = tokens * linear / (peak * efficiency)
        between = Operation.PROJECT if unit is UnitKind.ATTENTION else Operation.ACTIVATE
        if operation in (Operation.NORM, between, Operation.OUTPUT):
            seconds = seconds + self._memory_seconds(unit, Kind.F, tokens) / 3
        return seconds

    def _linear_flops(self, unit: UnitKind) -> int:
        """FLOPs of one token's forward products on one shard: 2 per weight."""
        spec, sharding = self.model, self.sharding
        widths = {
            UnitKind.ATTENTION: 2 * (sharding.hidden(spec) + sharding.kv_hidden(spec)),
            UnitKind.MLP: sharding.ffn_hidden(spec) * (3 if spec.family is Family.LLAMA else 2),
            UnitKind.HEAD: head_rows(spec, sharding),
        }
        return 2 * spec.hidden * widths.get(unit, 0)

    def _memory_seconds(self, unit: UnitKind, kind: Kind, tokens: Floats) -> Floats:
        """Seconds of memory traffic. An embedding reads all tokens on every shard. A part of the head reads and writes
        the state of the chain of parts in F, and in I the gradient that it passes on.
        """
        width = self.model.hidden * self.precision.compute_bytes
        hidden_states = 6
        if unit is UnitKind.HEAD and self.model.head_parts > 1:
            hidden_states = {Kind.F: 12, Kind.I: 2}.get(kind, 6)
        traffic = tokens * width
        if unit is not UnitKind.EMBEDDING:
            traffic = hidden_states * rows_of(self.sharding, tokens) * width
        seconds: Floats = traffic / self.device.memory_bandwidth
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Links:
    """The links between a cluster's nodes, stored as overrides: a table of all pairs of 65,536 nodes would take 64 GiB.

    ``pairs`` are the ascending numbers of the ordered pairs of nodes with a link of their own, ``others`` their
    [latency seconds, seconds per byte].
    """

    num_nodes: int
    inside: Floats
    between_nodes: Floats
    pairs: npt.NDArray[np.int64]
    others: Floats

    @classmethod
    def of(cls, cluster: ClusterSpec) -> _Links:
        """The first of several overrides of a pair counts, in either direction; overrides of a node with itself are
        ignored.
        """
        overrides: dict[int, Floats] = {}
        for link in cluster.links:
            for source, target in ((link.source, link.target), (link.target, link.source)):
                if source != target:
                    overrides.setdefault(source * cluster.num_nodes + target, _link(link.link))
        pairs = sorted(overrides)
        return cls(
            num_nodes=cluster.num_nodes,
            inside=_link(cluster.intra_node_peer or cluster.intra_node),
            between_nodes=_link(cluster.inter_node),
            pairs=np.array(pairs, dtype=np.int64),
            others=np.array([overrides[pair] for pair in pairs]).reshape(-1, 2),
        )

    def between(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """(latency seconds, seconds per byte) between nodes, elementwise."""
        is_inside = source == target
        latency, per_byte = (np.where(is_inside, *both) for both in zip(self.inside, self.between_nodes, strict=True))
        if len(self.pairs):
            requested_pairs = source.astype(np.int64) * self.num_nodes + target
            place = np.minimum(np.searchsorted(self.pairs, requested_pairs), len(self.pairs) - 1)
            has_own = self.pairs[place] == requested_pairs
            latency = np.where(has_own, self.others[place, 0], latency)
            per_byte = np.where(has_own, self.others[place, 1], per_byte)
        return latency, per_byte


def _link(link: LinkSpec) -> Floats:
    return np.array([link.latency_seconds, 1.0 / link.bytes_per_second])


def _passes(unit: UnitKind, kind: Kind, head_parts: int) -> int:
    """Ratio of a pass's matrix work to the forward's, for passes with any work."""
    if unit is UnitKind.HEAD:
        return 3 if head_parts == 1 else {Kind.F: 2, Kind.I: 0}.get(kind, 1)
    return 1
