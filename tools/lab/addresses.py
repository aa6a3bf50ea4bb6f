"""Addresses and interface names of a lab, all of them following from its slot and the numbers of its nodes.

Labs lie in 198.18.0.0/15, which RFC 2544 sets aside for tests: no network that a machine is part of uses it. Each has a
sixteenth of it: one /24 for its machines, one for services, and one for the pods of each node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network

RANGE = IPv4Network("198.18.0.0/15")
SLOTS = tuple(RANGE.subnets(new_prefix=19))
MOST_NODES = 29
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
        """Where the host, the control plane and the nodes are."""
        return self._parts[0]

    @property
    def services(self) -> IPv4Network:
        return self._parts[1]

    def pods(self, node: int) -> IPv4Network:
        """Where the pods of that node are."""
        return self._parts[1 + node]

    @property
    def host(self) -> IPv4Address:
        """The bridge, which is this machine as the lab sees it."""
        return self.machines[1]

    @property
    def control_plane(self) -> IPv4Address:
        return self.machines[2]

    def node(self, node: int) -> IPv4Address:
        return self.machines[10 + node]

    @property
    def apiserver(self) -> str:
        """The URL of the apiserver."""
        return f"https://{self.control_plane}:{APISERVER_PORT}"

    @property
    def bridge(self) -> str:
        return f"pslab{self.slot}"

    def port(self, machine: str) -> str:
        """The bridge's end of the cable to one of the lab's machines, a name of at most 15 characters."""
        return f"pslab{self.slot}{machine.replace('node', 'n').replace('control-plane', 'cp')}"


def slots_by_preference(name: str) -> Iterator[int]:
    """Every slot, the one that follows from the lab's name first."""
    first = hashlib.sha256(name.encode()).digest()[0]
    for step in range(len(SLOTS)):
        yield (first + step) % len(SLOTS)


def free_slot(name: str, routed: Iterable[str]) -> int | None:
    """The first slot that no route of this machine leads to; none when all are taken.

    ``routed`` are destinations as `ip route` prints them; its word `default` takes nothing.
    """
    networks = [IPv4Network(each, strict=False) for each in routed if each != "default"]
    for slot in slots_by_preference(name):
        if not any(SLOTS[slot].overlaps(network) for network in networks):
            return slot
    return None
