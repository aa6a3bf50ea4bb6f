"""Which interface leads where, by this machine's own; several networks are tried in tests/integration."""

from __future__ import annotations

import socket

import pytest

from penstock.core.errors import RunError
from penstock.core.host import interfaces
from penstock.core.host.interfaces import address_of, address_towards, interface_towards


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "localhost"])
def test_the_route_to_the_loopback_is_the_loopback(host: str) -> None:
    assert interface_towards(host) == "lo"


def test_the_loopback_has_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("none-such") is None


def test_every_address_of_the_host_is_reached_over_its_interface() -> None:
    """As the first host finds it, where ranks meet at its own address."""
    own = {address: name for _, name in socket.if_nameindex() if (address := address_of(name))}
    for address, name in own.items():
        assert address_towards(address) == address
        assert interface_towards(address) == name


def test_an_unreachable_address_is_an_error() -> None:
    with pytest.raises(RunError, match=r"255.255.255.255, where ranks are to meet, cannot be reached: "):
        interface_towards("255.255.255.255")


def test_an_address_without_an_interface_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "address_towards", lambda host: "192.0.2.7")
    with pytest.raises(RunError, match=r"192.0.2.1 is reached from 192.0.2.7, which is no address"):
        interface_towards("192.0.2.1")
