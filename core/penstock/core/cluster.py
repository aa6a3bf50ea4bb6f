"""Described hardware: devices and links, for planning without a measurement."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from penstock.core.cost_table import CostRow
from penstock.core.errors import MOST_MISTAKES, UserError, raise_all
from penstock.core.limits import MOST_RANKS
from penstock.core.manifest import Manifest, require_all, require_limits
from penstock.core.units import BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec(Manifest):
    """How fast a device's kernels are by the shape of their work; `penstock.planner.kernels` has the formulas.

    A product of m x k by k x n takes as long as one of m + ``product_edge`` rows, n + ``product_edge`` columns and
    a depth of k + ``product_depth`` at ``product_share`` of the peak; its matrices are read and written at
    ``product_memory_share`` of the memory's bandwidth. Fused attention takes ``attention_edge`` more
    keys per query, ``attention_rows`` more rows of queries, and a head ``attention_depth`` wider. Kernels that stream
    through memory reach ``stream_share`` of its bandwidth, those that reduce rows (norms, softmax) ``row_share``.
    ``kernel_seconds`` is the least time of any kernel.
    """

    product_share: float
    product_edge: float = 64.0
    product_depth: float = 64.0
    product_memory_share: float = 0.85
    attention_share: float = 0.6
    attention_backward_share: float = 0.5
    attention_edge: float = 225.0
    attention_depth: float = 16.0
    attention_rows: float = 0.0
    stream_share: float = 0.85
    row_share: float = 0.65
    kernel_seconds: float = 5e-6

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec(Manifest):
    """One kind of device.

    With ``kernels``, costs go by the shape of every matrix product and by the bytes of everything else. Without them
    they go by ``efficiency``: the achieved share of ``peak_flops`` for matrix products over that many tokens at once,
    as (tokens, share) points, interpolated in log2(tokens). ``action_overhead_seconds`` is the fixed cost of an action.
    """

    name: str
    peak_flops: float
    memory_bytes: int = field(metadata=BYTES)
    efficiency: tuple[tuple[int, float], ...] = ((1, 0.02), (64, 0.2), (256, 0.4), (1024, 0.5), (4096, 0.55))
    memory_bandwidth: float = 1e12
    constant_bytes: int = field(default=0, metadata=BYTES)
    action_overhead_seconds: float = 20e-6
    price_per_hour: float = 0.0
    kernels: KernelSpec | None = None

    def __post_init__(self) -> None:
        require_all(self, self._check_efficiency)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareSpec(Manifest):
    """Properties of a trainer that affect time and memory. The defaults describe penstock's trainer.

    ``dropout`` masks hidden states and attention. ``fused_gradients``: the product of W adds to the gradient itself,
    else a further kernel does. ``optimizer_barrier``: no rank begins the next step before all have the norm of
    the gradients. ``allocator_slack`` is the share of activations' bytes that is lost to the allocator.
    ``launch_seconds`` is the host's time to launch a kernel. ``head_in_forward``: the head's F does its whole
    backward, else I and W do their parts. ``overlapped_collectives``: in the backward of a block's unit, what shards
    do together for the first product of the forward runs next to products. ``recomputes_on_demand``: what is made again
    runs inside of the backward that needs it, after its gradient has come.
    """

    attention: AttentionKernel = AttentionKernel.FLASH
    dropout: bool = False
    fusion: Fusion = Fusion.EPILOGUE
    fused_gradients: bool = True
    gradient_type: GradientType = GradientType.FP32
    transfers: Transfers = Transfers.OVERLAPPED
    optimizer_barrier: bool = True
    allocator_slack: float = 0.0
    launch_seconds: float = 5e-6
    head_in_forward: bool = True
    overlapped_collectives: bool = False
    recomputes_on_demand: bool = False

    def __post_init__(self) -> None:
        require_limits(self)


PENSTOCK = SoftwareSpec()
"""penstock's own trainer, whose buffers `penstock.core.layout` lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec(Manifest):
    """One class of link: seconds to the first byte, and bytes per second in each direction."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOverride(Manifest):
    """A link between two nodes that differs from the cluster's ``inter_node``."""

    source: int
    target: int
    link: LinkSpec

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec(Manifest):
    """``num_nodes`` nodes of ``devices_per_node`` equal devices, links inside and between nodes, and exceptions.

    With ``nics_per_node``, ``inter_node`` is one of a node's network cards: its devices share the cards evenly, and
    reductions use the algorithm that suits the topology (`penstock.planner.collectives`). Without it, all messages
    of a node share one card, and a reduction is one ring over single links. ``intra_node_peer`` is the link between two
    devices of a node where it is slower than ``intra_node``, the bandwidth of all links together that a collective
    gets. ``error`` is the share by which predicted times may be off. ``costs``, measured elsewhere, replace the
    description of the device's kernels.
    """

    name: str
    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    intra_node: LinkSpec
    inter_node: LinkSpec
    links: tuple[LinkOverride, ...] = ()
    nics_per_node: int | None = None
    intra_node_peer: LinkSpec | None = None
    software: SoftwareSpec = PENSTOCK
    error: float = 0.15
    costs: tuple[CostRow, ...] = ()

    def __post_init__(self) -> None:
        require_all(self, self._check_devices, self._check_nics, self._check_links)

    def _check_devices(self) -> None:
        if self.num_devices > MOST_RANKS:
            raise UserError(
                what=f"{self.num_nodes} nodes of {self.devices_per_node} are more than {MOST_RANKS} devices",
                where="numNodes",
                remedy="describe fewer nodes",
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

    def node_of(self, device: int) -> int:
        """The node that holds ``device``; devices are numbered node by node."""
        return device // self.devices_per_node

    def card_of(self, device: int) -> int:
        """The network card of ``device``, numbered over all nodes; a node's devices share its cards in order."""
        cards = self.nics_per_node or 1
        node, place = divmod(device, self.devices_per_node)
        return node * cards + place * cards // self.devices_per_node
