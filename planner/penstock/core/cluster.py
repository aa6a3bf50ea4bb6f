"""Described hardware: devices and links, for planning without a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.ranges import require_not_negative, require_positive
from penstock.core.units import BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec(Manifest):
    """One kind of device.

    ``efficiency`` is the achieved share of ``peak_flops`` for matrix products over that many tokens at once, as
    (tokens, share) points, interpolated in log2(tokens); ``action_overhead_seconds`` is the fixed cost of one action.
    """

    name: str
    peak_flops: float
    memory_bytes: int = field(metadata=BYTES)
    efficiency: tuple[tuple[int, float], ...] = ((1, 0.02), (64, 0.2), (256, 0.4), (1024, 0.5), (4096, 0.55))
    memory_bandwidth: float = 1e12
    constant_bytes: int = field(default=0, metadata=BYTES)
    action_overhead_seconds: float = 20e-6
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.efficiency]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise UserError(what="tokens must rise from point to point", where="efficiency", remedy="sort the points")
        if not all(0 < share <= 1 for _, share in self.efficiency):
            raise UserError(what="a share is not in (0, 1]", where="efficiency", remedy="write shares such as 0.5")
        require_positive(self.peak_flops, "peakFlops")
        require_positive(self.memory_bandwidth, "memoryBandwidth")
        require_not_negative(self.action_overhead_seconds, "actionOverheadSeconds")
        require_not_negative(self.price_per_hour, "pricePerHour")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec(Manifest):
    """One class of link: seconds to the first byte, and bytes per second in each direction."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_positive(self.bytes_per_second, "bytesPerSecond")
        require_not_negative(self.latency_seconds, "latencySeconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOverride(Manifest):
    """A link between two nodes that differs from the cluster's ``inter_node``."""

    source: int
    target: int
    link: LinkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec(Manifest):
    """``num_nodes`` nodes of ``devices_per_node`` equal devices, links inside and between nodes, and exceptions."""

    name: str
    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    intra_node: LinkSpec
    inter_node: LinkSpec
    links: tuple[LinkOverride, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("numNodes", self.num_nodes), ("devicesPerNode", self.devices_per_node)):
            if value < 1:
                raise UserError(what=f"{value} is not positive", where=name, remedy="write at least 1")
        for i, link in enumerate(self.links):
            if not {link.source, link.target} <= set(range(self.num_nodes)):
                raise UserError(what="names a node that does not exist", where=f"links[{i}]")

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that holds ``device``; devices are numbered node by node."""
        return device // self.devices_per_node
