"""Described hardware: devices and links, for planning without a measurement."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from penstock.core.cost_table import CostRow
from penstock.core.errors import MOST_MISTAKES, UserError, raise_all
from penstock.core.layout import Precision
from penstock.core.limits import (
    ANY_BYTES,
    EXACT,
    MOST_COSTS,
    MOST_DEVICE_KINDS,
    MOST_DEVICES_PER_NODE,
    MOST_LINKS,
    MOST_NODES,
    MOST_RANKS,
    POSITIVE_SHARE,
    SHARE,
    above_zero,
    characters,
    list_of,
    one_to,
    up_to,
)
from penstock.core.manifest import Checked
from penstock.core.units import BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec(Checked):
    """How fast a device's kernels are by the shape of their work; `penstock.planner.kernels` has the formulas."""

    product_share: Annotated[
        float,
        POSITIVE_SHARE,
        "share of `peakFlops` that a matrix product reaches if it is large in every dimension",
    ]
    product_edge: Annotated[
        float,
        up_to(EXACT),
        "a product takes as long as an ideal one with this many more rows and columns",
    ] = 64.0
    product_depth: Annotated[
        float,
        up_to(EXACT),
        "a product takes as long as an ideal one with this much more depth",
    ] = 64.0
    product_memory_share: Annotated[
        float,
        POSITIVE_SHARE,
        "share of `memoryBandwidth` that the matrices of a product reach",
    ] = 0.85
    attention_share: Annotated[
        float,
        POSITIVE_SHARE,
        "share of `peakFlops` that the forward of fused attention reaches",
    ] = 0.6
    attention_backward_share: Annotated[
        float,
        POSITIVE_SHARE,
        "share of `peakFlops` that the backward of fused attention reaches",
    ] = 0.5
    attention_edge: Annotated[
        float,
        up_to(EXACT),
        "fused attention takes as long as ideal attention with this many more keys per query",
    ] = 225.0
    attention_depth: Annotated[
        float,
        up_to(EXACT),
        "fused attention takes as long as ideal attention with heads that are this much wider",
    ] = 16.0
    attention_rows: Annotated[
        float,
        up_to(EXACT),
        "fused attention takes as long as ideal attention with this many more rows of queries, over all heads",
    ] = 0.0
    stream_share: Annotated[float, POSITIVE_SHARE, "share of `memoryBandwidth` that elementwise kernels reach"] = 0.85
    row_share: Annotated[
        float,
        POSITIVE_SHARE,
        "share of `memoryBandwidth` that kernels reach that reduce rows: norms, softmax",
    ] = 0.65
    kernel_seconds: Annotated[float, up_to(1e12), "least time of any kernel"] = 5e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec(Checked):
    """One kind of device.

    With ``kernels``, costs go by the shape of every matrix product and by the bytes of everything else. Without them
    they go by ``efficiency``: the achieved share of ``peak_flops`` for matrix products over that many tokens at once,
    as (tokens, share) points, interpolated in log2(tokens). ``action_overhead_seconds`` is the fixed cost of an action.
    """

    name: Annotated[str, characters(), "for people"]
    peak_flops: Annotated[float, above_zero(1e30), "largest number of FLOPs per second"]
    memory_bytes: Annotated[
        int,
        ANY_BYTES,
        "memory of one device; if the job's `memoryPerRank` is smaller, that is the limit",
    ] = field(metadata=BYTES)
    efficiency: Annotated[
        tuple[tuple[int, float], ...],
        list_of(minItems=1, items={"prefixItems": [one_to(EXACT), POSITIVE_SHARE]}),
        (
            "pairs `[tokens, share]`: the share of `peakFlops` that is achieved with that many tokens in one pass; "
            "interpolated in log2(tokens)"
        ),
    ] = ((1, 0.02), (64, 0.2), (256, 0.4), (1024, 0.5), (4096, 0.55))
    memory_bandwidth: Annotated[float, above_zero(1e30), "bytes per second"] = 1e12
    constant_bytes: Annotated[
        int,
        ANY_BYTES,
        "memory of the process before any parameter",
    ] = field(default=0, metadata=BYTES)
    action_overhead_seconds: Annotated[float, up_to(1e12), "fixed cost of one action"] = 20e-6
    price_per_hour: Annotated[
        float,
        up_to(1e12),
        (
            "price of one device for an hour, from which plans state their cost; `objective: cost` minimizes this cost "
            "if devices have different prices, else the device time"
        ),
    ] = 0.0
    spot_price_per_hour: Annotated[
        float,
        up_to(1e12),
        "price of one device that may be taken away at any time, for jobs with `resources.spot`",
    ] = 0.0
    interruptions_per_hour: Annotated[
        float,
        up_to(1e12),
        "how often one spot device is taken away in an hour, on average",
    ] = 0.0
    kernels: Annotated[
        KernelSpec | None,
        "speed of kernels by the shape of their work; if given, `efficiency` is ignored",
    ] = None

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check the order of points."""
        return (cls._check_efficiency,)

    def _check_efficiency(self) -> None:
        tokens = [point[0] for point in self.efficiency]
        if tokens != sorted(set(tokens)):
            raise UserError(what="tokens must rise from point to point", where="efficiency", remedy="sort the points")


class AttentionKernel(enum.StrEnum):
    """How attention is computed: in one kernel that keeps no scores, or in products that keep them for backward."""

    FLASH = "flash"
    UNFUSED = "unfused"


class Fusion(enum.StrEnum):
    """How operations between matrix products become kernels.

    ``epilogue``: biases are added by the products, and no dropout is done. ``grouped``: bias and activation are one
    kernel, and so are bias, dropout and residual, and scaling, mask and softmax (Megatron-LM). ``none``: one kernel
    for each operation, as PyTorch's modules do.
    """

    EPILOGUE = "epilogue"
    GROUPED = "grouped"
    NONE = "none"


class Transfers(enum.StrEnum):
    """Behaviour of ranks while messages between stages are in flight.

    ``overlapped``: they compute. ``exchanged``: they send and receive at once, and wait for the slower (Megatron-LM's
    1F1B). ``blocking``: they do one after the other, and compute nothing meanwhile.
    """

    OVERLAPPED = "overlapped"
    EXCHANGED = "exchanged"
    BLOCKING = "blocking"


class GradientType(enum.StrEnum):
    """The type in which gradients are summed over micro-batches and replicas."""

    FP32 = "fp32"
    BF16 = "bf16"

    def num_bytes(self, precision: Precision) -> int:
        """Bytes of one element of an accumulated gradient; ``bf16`` is the type of computing."""
        return precision.accumulate_bytes if self is GradientType.FP32 else precision.compute_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareSpec(Checked):
    """Properties of a trainer that affect time and memory. The defaults describe penstock's trainer."""

    attention: Annotated[
        AttentionKernel,
        "`flash` keeps no scores, `unfused` keeps them for backward",
    ] = AttentionKernel.FLASH
    dropout: Annotated[bool, "whether hidden states and attention are masked"] = False
    fusion: Annotated[
        Fusion,
        (
            "`epilogue`: products add biases; `grouped`: one kernel each for (bias + activation), (bias + dropout + "
            "residual) and (scaling + mask + softmax); `none`: one kernel per operation"
        ),
    ] = Fusion.EPILOGUE
    fused_gradients: Annotated[
        bool,
        (
            "whether the matrix products of W accumulate into the gradients directly; otherwise further kernels add "
            "their results"
        ),
    ] = True
    gradient_type: Annotated[GradientType, "type in which gradients are summed: `fp32` or `bf16`"] = GradientType.FP32
    transfers: Annotated[
        Transfers,
        (
            "`overlapped`: ranks compute meanwhile; `exchanged`: they send and receive at once and wait; `blocking`: "
            "one after the other"
        ),
    ] = Transfers.OVERLAPPED
    optimizer_barrier: Annotated[
        bool,
        "whether all ranks wait for the norm of the gradients before the next step",
    ] = True
    allocator_slack: Annotated[float, SHARE, "share of activations' bytes that the allocator loses"] = 0.0
    launch_seconds: Annotated[float, up_to(1e12), "time of the host to launch one kernel"] = 5e-6
    head_in_forward: Annotated[bool, "whether the head's F does its whole backward"] = True
    overlapped_collectives: Annotated[
        bool,
        (
            "whether the tensor-parallel collectives of a backward overlap its matrix products, as in Megatron-LM; the"
            " gather of the output's gradient never does"
        ),
    ] = False
    recomputes_on_demand: Annotated[
        bool,
        (
            "whether recomputation runs inside the backward that needs it, after its gradient has arrived, as in "
            "PyTorch's checkpointing"
        ),
    ] = False


PENSTOCK = SoftwareSpec()
"""penstock's own trainer, whose buffers `penstock.core.layout` lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec(Checked):
    """One class of link: seconds to the first byte, and bytes per second in each direction."""

    latency_seconds: Annotated[float, up_to(1e12), "seconds to the first byte"]
    bytes_per_second: Annotated[float, above_zero(1e30), "in each direction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOverride(Checked):
    """A link between two nodes that differs from the cluster's ``inter_node``."""

    source: Annotated[int, up_to(MOST_NODES - 1), "number of one node"]
    target: Annotated[int, up_to(MOST_NODES - 1), "number of the other"]
    link: Annotated[LinkSpec, "the link between them"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDevices(Checked):
    """Nodes whose devices are of another kind than those of the first nodes."""

    device: Annotated[DeviceSpec, "the kind of device"]
    num_nodes: Annotated[int, one_to(MOST_NODES), "number of nodes that have it"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec(Checked):
    """``num_nodes`` nodes of ``devices_per_node`` devices, links inside and between nodes, and exceptions.

    The last nodes have ``other_devices``, in that order, and all others have ``device``. Devices of different kinds are
    assumed to differ by one factor in everything they compute (`penstock.planner.device_order`), and every rank may use
    as much memory as the smallest device has.

    With ``nics_per_node``, ``inter_node`` is one of a node's network cards: its devices share the cards evenly, and
    reductions use the algorithm that suits the topology (`penstock.planner.collectives`). Without it, all messages
    of a node share one card, and a reduction is one ring over single links. ``intra_node_peer`` is the link between two
    devices of a node where it is slower than ``intra_node``, the bandwidth of all links together that a collective
    gets. ``error`` is the share by which predicted times may be off. ``costs``, measured elsewhere, replace the
    description of the device's kernels.
    """

    name: Annotated[str, characters(), "for people"]
    device: Annotated[DeviceSpec, "the kind of device; with `otherDevices`, the kind in the first nodes"]
    num_nodes: Annotated[int, one_to(MOST_NODES), "number of nodes"]
    devices_per_node: Annotated[int, one_to(MOST_DEVICES_PER_NODE), "number of devices in each node"]
    intra_node: Annotated[
        LinkSpec,
        "link between devices of a node: the bandwidth of a device in a collective over all links of the node",
    ]
    inter_node: Annotated[LinkSpec, "link between nodes; with `nicsPerNode` one network card"]
    links: Annotated[
        tuple[LinkOverride, ...],
        list_of(MOST_LINKS),
        "exceptions: `{source, target, link}` between two nodes, by number",
    ] = ()
    nics_per_node: Annotated[
        int | None,
        one_to(MOST_DEVICES_PER_NODE),
        (
            "network cards of a node, which its devices share evenly; none: all messages of a node share one card, and"
            " a reduction is one ring over single links"
        ),
    ] = None
    intra_node_peer: Annotated[
        LinkSpec | None,
        "link of a message between two devices of a node, if it is slower than `intraNode`",
    ] = None
    software: Annotated[SoftwareSpec, "properties of the trainer; the defaults describe penstock's own"] = PENSTOCK
    error: Annotated[float, SHARE, "relative error of predicted times: the interval of predictions"] = 0.15
    costs: Annotated[
        tuple[CostRow, ...],
        list_of(MOST_COSTS),
        "rows measured elsewhere, which replace the device's kernels; `--costs` reads them from CSV",
    ] = ()
    other_devices: Annotated[
        tuple[OtherDevices, ...],
        list_of(MOST_DEVICE_KINDS),
        "kinds of devices in the last nodes: `{device, numNodes}` for each kind",
    ] = ()
    restart_seconds: Annotated[
        float,
        up_to(1e12),
        (
            "time from an interruption until training continues from the last checkpoint: to get a new device, start "
            "the ranks and read the checkpoint"
        ),
    ] = 300.0

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check numbers of devices, network cards and nodes."""
        return cls._check_devices, cls._check_nics, cls._check_links, cls._check_other_devices

    def _check_devices(self) -> None:
        if self.num_devices > MOST_RANKS:
            raise UserError(
                what=f"{self.num_nodes} nodes of {self.devices_per_node} are more than {MOST_RANKS} devices",
                where="numNodes",
                remedy="describe fewer nodes",
            )

    def _check_other_devices(self) -> None:
        others = sum(other.num_nodes for other in self.other_devices)
        if others >= self.num_nodes:
            raise UserError(
                what=f"have {others} of {self.num_nodes} nodes, which leaves none for device",
                where="otherDevices",
                remedy="raise numNodes, which counts all nodes",
            )
        if self.other_devices and self.costs:
            raise UserError(
                what="are of one kind of device, but the cluster has several",
                where="costs",
                remedy="describe one kind, or leave out the costs",
            )

    def _check_nics(self) -> None:
        if self.nics_per_node is not None and self.nics_per_node > self.devices_per_node:
            raise UserError(
                what=f"{self.nics_per_node} network cards are more than the {self.devices_per_node} devices of a node",
                where="nicsPerNode",
                remedy="write at most one card per device, with bytesPerSecond of those that a device has together",
            )

    def _check_links(self) -> None:
        wrong = (i for i, link in enumerate(self.links) if max(link.source, link.target) >= self.num_nodes)
        raise_all(
            [
                UserError(
                    what="names a node that does not exist",
                    where=f"links[{i}]",
                    remedy=f"write numbers from 0 to {self.num_nodes - 1}",
                )
                for i in itertools.islice(wrong, MOST_MISTAKES)
            ]
        )

    @property
    def num_devices(self) -> int:
        """Number of all devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def device_kinds(self) -> tuple[DeviceSpec, ...]:
        """All kinds of devices, the first nodes' first."""
        return (self.device, *(other.device for other in self.other_devices))

    def kinds_of(self, num_devices: int) -> tuple[int, ...]:
        """For each of the first ``num_devices`` devices, the index of its kind in `device_kinds`."""
        num_nodes = [other.num_nodes for other in self.other_devices]
        num_nodes = [self.num_nodes - sum(num_nodes), *num_nodes]
        kinds = (itertools.repeat(kind, count * self.devices_per_node) for kind, count in enumerate(num_nodes))
        return tuple(itertools.islice(itertools.chain.from_iterable(kinds), num_devices))

    def node_of(self, device: int) -> int:
        """The node that holds ``device``; devices are numbered node by node."""
        return device // self.devices_per_node

    def card_of(self, device: int) -> int:
        """The network card of ``device``, numbered over all nodes; a node's devices share its cards in order."""
        cards = self.nics_per_node or 1
        node, place = divmod(device, self.devices_per_node)
        return node * cards + place * cards // self.devices_per_node
