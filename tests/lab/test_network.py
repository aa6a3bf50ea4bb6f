"""Rates, shaping and routes of the network, and hierarchies of control groups."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.lab import cgroups, network
from tools.lab.addresses import Addresses
from tools.lab.console import LabError

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "M": 10**6, "Gbit/s": 10**9}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_rates_are_parsed_in_every_spelling(number: int, unit: str) -> None:
    assert network.bits_per_second(f"{number}{unit}") == number * UNITS[unit]


def test_a_rate_may_have_a_fraction() -> None:
    assert network.bits_per_second("2.5gbit") == 2_500_000_000


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1mbit", "100mbyte", "1e3mbit"])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="is not a rate: write for example 100mbit or 1gbit, or none"):
        network.bits_per_second(text)


@given(st.integers(1000, 10**11))
def test_a_burst_is_at_least_a_segment_and_a_millisecond_of_the_rate(rate: int) -> None:
    whole, small, rest = (
        line.split() for line in network.shaping_commands("eth0", rate).splitlines() if "class" in line
    )
    for words in (whole, small, rest):
        assert words[words.index("ceil") + 1] == f"{rate}bit"
        assert int(words[words.index("burst") + 1]) >= max(64_000, int(rate / 8000))
    shares = [int(words[words.index("rate") + 1].removesuffix("bit")) for words in (whole, small, rest)]
    assert shares[0] == rate == shares[1] + shares[2]


def test_every_machine_has_routes_to_the_pods_of_the_others() -> None:
    addresses = Addresses(0)
    all_routes = network.pod_routes(addresses, 3)
    assert all_routes == [[str(addresses.pods(node)), "via", str(addresses.node(node))] for node in (1, 2, 3)]
    assert network.pod_routes(addresses, 3, exclude=2) == [all_routes[0], all_routes[2]]


VERSION_1 = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
"""
HYBRID = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
VERSION_2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "names"),
    [
        (VERSION_1, ["cpu", "memory"]),
        (VERSION_1 + HYBRID, ["cpu", "memory", "unified"]),
        (VERSION_2, [""]),
        ("", []),
    ],
)
def test_hierarchies_of_both_versions_are_listed(mounts: str, names: list[str]) -> None:
    assert cgroups.hierarchies(mounts) == [Path("/sys/fs/cgroup") / name for name in names]


def test_a_server_listens_until_its_socket_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        assert network.listens(url)
    assert not network.listens(url)
