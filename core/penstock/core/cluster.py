"""Described hardware: devices and links, for planning without a measurement."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from penstock.core.errors import MOST_MISTAKES, UserError, raise_all
from penstock.core.limits import MOST_RANKS
from penstock.core.manifest import Manifest, require_all, require_limits
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
        require_all(self, self._check_efficiency)

    def _check_efficiency(self) -> None:
        tokens = [point[0] for point in self.efficiency]
        if tokens != sorted(set(tokens)):
            raise UserError(what="tokens must rise from point to point", where="efficiency", remedy="sort the points")


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
    """``num_nodes`` nodes of ``devices_per_node`` equal devices, links inside and between nodes, and exceptions."""

    name: str
    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    intra_node: LinkSpec
    inter_node: LinkSpec
    links: tuple[LinkOverride, ...] = ()

    def __post_init__(self) -> None:
        require_all(self, self._check_devices, self._check_links)

    def _check_devices(self) -> None:
        if self.num_devices > MOST_RANKS:
            raise UserError(
                what=f"{self.num_nodes} nodes of {self.devices_per_node} are more than {MOST_RANKS} devices",
                where="numNodes",
                remedy="describe fewer nodes",
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
        """All devices."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that holds ``device``; devices are numbered node by node."""
        return device // self.devices_per_node
