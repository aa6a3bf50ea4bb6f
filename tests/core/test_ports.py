"""Ports for who listens a moment later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.core.host import ports
from penstock.core.host.ports import EVERYWHERE, LOOPBACK, PORTS, free_port, listen_error

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_process_can_listen_on_a_free_port_and_the_following_ports() -> None:
    first = free_port(count=3)
    for port in range(first, first + 3):
        with socket.create_server((LOOPBACK, port)):
            assert port in PORTS


def test_a_used_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port(count=2)
    with socket.create_server((LOOPBACK, taken + 1)):
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 2))
        assert {free_port() for _ in range(20)} == {taken}
        with pytest.raises(OSError, match="no free port"):
            free_port(count=2)


def test_a_port_used_at_one_address_is_not_free_at_all_addresses() -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.2", taken)):
        assert listen_error(taken, LOOPBACK) == ""
        assert listen_error(taken, EVERYWHERE) == "Address already in use"


@pytest.mark.skipif(not RANGE.exists(), reason="NOT RUN: this system does not say which ports it gives out")
def test_no_outgoing_connection_gets_the_port_meanwhile() -> None:
    assert PORTS.stop <= int(RANGE.read_text().split()[0])
