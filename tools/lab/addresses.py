"""Addresses and interface names of a lab, which follow from its slot and the numbers of its nodes.

Labs use 198.18.0.0/15, which RFC 2544 reserves for tests, so no network of the host uses it. The subnet of each lab is
a sixteenth of this range, its slot. It has one /24 for machines, one for services, and one for the pods of each node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network

RANGE = IPv4Network("198.18.0.0/15")
SLOTS = tuple(RANGE.subnets(new_prefix=19))
MAX_NODES = 29
POD_PREFIX = 24
APISERVER_PORT = 6443


@dataclass(frozen=True)
class Addresses:
    """The addresses of the lab in ``slot``, a number below `len(SLOTS)`; nodes are numbered from 1."""

    slot: int

    @property
    def network(self) -> IPv4Network:
        return SLOTS[self.slot]

    @cached_property
    def _parts(self) -> list[IPv4Network]:
        return list(self.network.subnets(new_prefix=POD_PREFIX))

    @property
    def machines(self) -> IPv4Network:
        """Subnet of the host, the control plane and the nodes."""
        return self._parts[0]

    @property
    def services(self) -> IPv4Network:
        return self._parts[1]

    def pods(self, node: int) -> IPv4Network:
        """Return the subnet of that node's pods."""
        return self._parts[1 + node]

    @property
    def host(self) -> IPv4Address:
        """Address of the bridge, by which the machines of the lab reach the host."""
        return self.machines[1]

    @property
    def control_plane(self) -> IPv4Address:
        return self.machines[2]

    def node(self, node: int) -> IPv4Address:
        return self.machines[10 + node]

    @property
    def apiserver(self) -> str:
        """URL of the apiserver."""
        return f"https://{self.control_plane}:{APISERVER_PORT}"

    @property
    def bridge(self) -> str:
        return f"pslab{self.slot}"

    def port(self, name: str) -> str:
        """Return the name of the bridge's port to the machine ``name``. The kernel allows at most 15 characters."""
        return f"pslab{self.slot}{name.replace('node', 'n').replace('control-plane', 'cp')}"


def slots_by_preference(name: str) -> Iterator[int]:
    """Return all slots, starting with the one that follows from a hash of the lab's name."""
    first = hashlib.sha256(name.encode()).digest()[0]
    for step in range(len(SLOTS)):
        yield (first + step) % len(SLOTS)


def free_slot(name: str, destinations: Iterable[str]) -> int | None:
    """Return the first slot that no route of the host overlaps, or None if all are in use.

    ``destinations`` are those of `ip route`; its destination `default` is ignored.
    """
    networks = [IPv4Network(destination, strict=False) for destination in destinations if destination != "default"]
    for slot in slots_by_preference(name):
        if not any(SLOTS[slot].overlaps(network) for network in networks):
            return slot
    return None
