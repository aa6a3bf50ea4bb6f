"""The lab's network on the host: a bridge, a veth pair from it to each machine, and routes to pods and services.

The host neither forwards nor filters packets for the lab; pods of different nodes reach each other over the bridge.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import urllib.parse
from collections.abc import Sequence
from ipaddress import IPv4Address

from tools.lab.addresses import Addresses
from tools.lab.console import LabError, run
from tools.lab.machines import Machine

INTERFACE = "eth0"
"""Name of the interface of a machine, which is one end of its veth pair."""

MIN_BURST_BYTES = 64_000  # a whole TCP segment, as the kernel hands them to an interface
BURST_SECONDS = 0.001
QUEUE_SECONDS = 0.05
QUANTUM_BYTES = 60_000
LENGTH_OFFSET = 2
"""Offset of the total length in the IPv4 header, in bytes (RFC 791)."""

LARGE_PACKET_MASK = 0xFF00
"""Bits of the length that are zero for every packet of less than 256 bytes."""

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])(?:bit)?(?:/s)?", re.IGNORECASE)
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9}


def route_destinations() -> list[str]:
    """Return the destinations of all IPv4 routes of the host."""
    return [route["dst"] for route in json.loads(run("ip", "-json", "-4", "route"))]


def create_bridge(addresses: Addresses) -> None:
    run("ip", "link", "add", addresses.bridge, "type", "bridge")
    run("ip", "address", "add", f"{addresses.host}/{addresses.machines.prefixlen}", "dev", addresses.bridge)
    run("ip", "link", "set", addresses.bridge, "up")


def connect(machine: Machine, address: IPv4Address, addresses: Addresses) -> None:
    """Create the veth pair between the bridge and a machine; it is removed when either of them is."""
    port = addresses.port(machine.name)
    run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(machine.init.pid))
    run("ip", "link", "set", port, "master", addresses.bridge, "up")
    machine.run("ip", "address", "add", f"{address}/{addresses.machines.prefixlen}", "dev", INTERFACE)
    machine.run("ip", "link", "set", INTERFACE, "up")
    machine.run("ip", "route", "add", "default", "via", str(addresses.host))


def pod_routes(addresses: Addresses, num_nodes: int, exclude: int = 0) -> list[list[str]]:
    """Return routes to the pods of all nodes but ``exclude``, as arguments of `ip route add`."""
    nodes = [number for number in range(1, num_nodes + 1) if number != exclude]
    return [[str(addresses.pods(number)), "via", str(addresses.node(number))] for number in nodes]


def add_host_routes(addresses: Addresses, num_nodes: int) -> None:
    """Add the host's routes to pods, and to services by the first node, since only nodes resolve service addresses."""
    for words in [*pod_routes(addresses, num_nodes), [str(addresses.services), "via", str(addresses.node(1))]]:
        run("ip", "route", "add", *words)


def add_machine_routes(machine: Machine, routes: Sequence[Sequence[str]]) -> None:
    """Add a machine's routes to pods, and let it forward the packets of its own pods."""
    machine.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    for words in routes:
        machine.run("ip", "route", "add", *words)


def remove_bridge(addresses: Addresses) -> None:
    """Remove the bridge and any remaining ports, as far as they exist; routes of the bridge are removed with it."""
    links = [link["ifname"] for link in json.loads(run("ip", "-json", "link"))]
    for link in sorted(links, reverse=True):
        if link.startswith((f"{addresses.bridge}n", f"{addresses.bridge}cp")) or link == addresses.bridge:
            with contextlib.suppress(LabError):  # the kernel may just have removed it together with its machine
                run("ip", "link", "delete", link)


def bits_per_second(text: str) -> int:
    """Parse a rate such as `100mbit` or `1G`; raises `LabError` for anything else."""
    match = RATE.fullmatch(text.strip())
    rate = round(float(match[1]) * FACTORS[match[2].lower()]) if match else 0
    if rate <= 0:
        raise LabError(f"'{text}' is not a rate: write for example 100mbit or 1gbit, or none for no limit")
    return rate


def shaping_commands(device: str, rate: int) -> str:
    """Return commands of `tc -batch` that limit a device to ``rate`` bits per second.

    Small packets, such as acknowledgements, are sent first. In a single queue they would wait behind data packets, and
    the sender of the other direction would wait for them: two nodes that send to each other at the same time took a
    third more time. Real hosts use fair queues (fq_codel), which not every kernel has.
    """
    burst = max(MIN_BURST_BYTES, round(rate / 8 * BURST_SECONDS))
    bucket = f"ceil {rate}bit burst {burst} cburst {burst} quantum {QUANTUM_BYTES}"
    small_rate = max(rate // 10, 8)
    queue = round(rate / 8 * QUEUE_SECONDS) + burst
    return f"""\
qdisc add dev {device} root handle 1: htb default 3
class add dev {device} parent 1: classid 1:1 htb rate {rate}bit {bucket}
class add dev {device} parent 1:1 classid 1:2 htb prio 0 rate {small_rate}bit {bucket}
class add dev {device} parent 1:1 classid 1:3 htb prio 1 rate {max(rate - small_rate, 8)}bit {bucket}
qdisc add dev {device} parent 1:2 bfifo limit {queue}
qdisc add dev {device} parent 1:3 bfifo limit {queue}
filter add dev {device} parent 1: protocol ip u32 match u16 0 {LARGE_PACKET_MASK:#06x} at {LENGTH_OFFSET} flowid 1:2
"""


def shape(machine: Machine, addresses: Addresses, rate: int | None) -> None:
    """Limit both directions of a machine's link to ``rate`` bits per second, or remove the limit."""
    for run_at_end, device in ((run, addresses.port(machine.name)), (machine.run, INTERFACE)):
        if "htb" in run_at_end("tc", "qdisc", "show", "dev", device):
            run_at_end("tc", "qdisc", "delete", "dev", device, "root")
        if rate is not None:
            run_at_end("tc", "-batch", "-", stdin=shaping_commands(device, rate))


def set_link(machine: Machine, addresses: Addresses, state: str) -> None:
    """Set the link of a machine `up` or `down`, at the bridge's end."""
    run("ip", "link", "set", addresses.port(machine.name), state)


def listens(server: str) -> bool:
    """Whether the host and port of a URL accept connections."""
    url = urllib.parse.urlsplit(server)
    try:
        with socket.create_connection((url.hostname, url.port), timeout=2):
            return True
    except OSError:
        return False
