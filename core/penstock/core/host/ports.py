"""Free ports.

They are below the ports that systems assign to outgoing connections (32768 and up on Linux, 49152 elsewhere), one of
which might take the port before the caller listens on it; and below Kubernetes' node ports and torch's 29500.
"""

from __future__ import annotations

import random
import socket

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
ANY_PORT = 0
"""Lets a program that listens later choose a free port then: a port that is chosen earlier may be taken until then."""

PORTS = range(20_000, 29_000)
MOST_TRIES = 1000

_random = random.SystemRandom()


def free_port(address: str = LOOPBACK, count: int = 1) -> int:
    """The first of ``count`` consecutive free ports; raises `OSError` if none are found."""
    firsts = range(PORTS.start, PORTS.stop - count + 1)
    for _ in range(MOST_TRIES):
        port = _random.choice(firsts)
        if not any(listen_error(port + offset, address) for offset in range(count)):
            return port
    raise OSError(f"no free port of {address} between {PORTS.start} and {PORTS.stop}")


def listen_error(port: int, address: str = LOOPBACK) -> str:
    """The system's error for listening there; empty if there is none."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
        return ""
