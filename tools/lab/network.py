"""The lab's network on this machine: a bridge, a cable from it to each room, and routes to pods and services.

This machine forwards nothing and filters nothing for the lab; pods of different nodes meet on the bridge.
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
from tools.lab.rooms import Room

ROOM_END = "eth0"
SMALLEST_BURST_BYTES = 64_000  # a whole segment of TCP, as the kernel hands them to an interface
BURST_SECONDS = 0.001
QUEUE_SECONDS = 0.05
QUANTUM_BYTES = 60_000
PACKET_LENGTH = 2
"""Where the header of a packet holds its length (RFC 791)."""

MASK_OF_LARGE = 0xFF00
"""Bits of a length that only one of 256 bytes or more has."""

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])(?:bit)?(?:/s)?", re.IGNORECASE)
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9}


def routed() -> list[str]:
    """Every destination that this machine has a route to."""
    return [route["dst"] for route in json.loads(run("ip", "-json", "-4", "route"))]


def lay_bridge(addresses: Addresses) -> None:
    run("ip", "link", "add", addresses.bridge, "type", "bridge")
    run("ip", "address", "add", f"{addresses.host}/{addresses.machines.prefixlen}", "dev", addresses.bridge)
    run("ip", "link", "set", addresses.bridge, "up")


def plug_in(room: Room, address: IPv4Address, addresses: Addresses) -> None:
    """Lay the cable from the bridge to a room; it is gone with either."""
    port = addresses.port(room.name)
    run("ip", "link", "add", port, "type", "veth", "peer", "name", ROOM_END, "netns", str(room.first.pid))
    run("ip", "link", "set", port, "master", addresses.bridge, "up")
    room.run("ip", "address", "add", f"{address}/{addresses.machines.prefixlen}", "dev", ROOM_END)
    room.run("ip", "link", "set", ROOM_END, "up")
    room.run("ip", "route", "add", "default", "via", str(addresses.host))


def pod_routes(addresses: Addresses, num_nodes: int, besides: int = 0) -> list[list[str]]:
    """Routes to the pods of every node, as words of `ip route add`; node ``besides`` reaches its own by itself."""
    nodes = [number for number in range(1, num_nodes + 1) if number != besides]
    return [[str(addresses.pods(number)), "via", str(addresses.node(number))] for number in nodes]


def route_host(addresses: Addresses, num_nodes: int) -> None:
    """Lead this machine to pods, and through the first node to services: their addresses exist in nodes only."""
    for words in [*pod_routes(addresses, num_nodes), [str(addresses.services), "via", str(addresses.node(1))]]:
        run("ip", "route", "add", *words)


def route_room(room: Room, routes: Sequence[Sequence[str]]) -> None:
    """Lead a room to pods, and let it pass on what its own pods send."""
    room.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    for words in routes:
        room.run("ip", "route", "add", *words)


def take_up_bridge(addresses: Addresses) -> None:
    """Remove the bridge, its routes, and the ends of cables that are left, if any of it is there."""
    ports = [link["ifname"] for link in json.loads(run("ip", "-json", "link"))]
    for port in sorted(ports, reverse=True):
        if port.startswith((f"{addresses.bridge}n", f"{addresses.bridge}cp")) or port == addresses.bridge:
            with contextlib.suppress(LabError):  # went with its room a moment ago
                run("ip", "link", "delete", port)


def bits_per_second(text: str) -> int:
    """Parse a rate such as `100mbit` or `1G`; raises `LabError` for anything else."""
    found = RATE.fullmatch(text.strip())
    rate = round(float(found[1]) * FACTORS[found[2].lower()]) if found else 0
    if rate <= 0:
        raise LabError(f"'{text}' is no rate: write one as 100mbit or 1gbit, or none")
    return rate


def shaping(device: str, rate: int) -> str:
    """What lets a device send at most that many bits per second, as commands of `tc -batch`.

    Small packets, such as acknowledgements, go first. In one line with all others they would wait for what goes the
    other way, and who sends for them: two neighbours that send at once took a third more time. Cards of real hosts have
    queues that are fair (fq_codel), which not every kernel has.
    """
    burst = max(SMALLEST_BURST_BYTES, round(rate / 8 * BURST_SECONDS))
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
filter add dev {device} parent 1: protocol ip u32 match u16 0 {MASK_OF_LARGE:#06x} at {PACKET_LENGTH} flowid 1:2
"""


def shape(room: Room, addresses: Addresses, rate: int | None) -> None:
    """Let both ends of a room's cable send at most that many bits per second, or as fast as they can."""
    for end, device in ((run, addresses.port(room.name)), (room.run, ROOM_END)):
        if "htb" in end("tc", "qdisc", "show", "dev", device):
            end("tc", "qdisc", "delete", "dev", device, "root")
        if rate is not None:
            end("tc", "-batch", "-", stdin=shaping(device, rate))


def set_link(room: Room, addresses: Addresses, state: str) -> None:
    """Pull a room's cable (`down`) or plug it in again (`up`)."""
    run("ip", "link", "set", addresses.port(room.name), state)


def listens(server: str) -> bool:
    """Whether somebody takes connections at a URL."""
    place = urllib.parse.urlsplit(server)
    try:
        with socket.create_connection((place.hostname, place.port), timeout=2):
            return True
    except OSError:
        return False
