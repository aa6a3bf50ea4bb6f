"""The network interface towards another host. gloo and NCCL need its name, or they would query a name service."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from penstock.core.errors import RunError

LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16s16x")
_ADDRESS = slice(20, 24)


def interface_towards(host: str) -> str:
    """The interface whose IPv4 address this host uses to reach ``host``, itself included; raises `RunError`."""
    own_address = address_towards(host)
    if ipaddress.ip_address(own_address).is_loopback:
        return LOOPBACK_INTERFACE
    for _, name in socket.if_nameindex():
        if address_of(name) == own_address:
            return name
    raise RunError(f"{host} is reached from {own_address}, which is no address of an interface here")


def address_towards(host: str) -> str:
    """The address of this host that the kernel's routes choose for ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # any port
        except OSError as error:
            raise RunError(f"{host}, where ranks are to meet, cannot be reached: {error.strerror}") from None
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _REQUEST.pack(interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS])
