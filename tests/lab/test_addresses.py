"""Addresses of labs: they follow from the slot, and no two labs overlap."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.lab.addresses import MAX_NODES, RANGE, SLOTS, Addresses, free_slot, slots_by_preference

slots = st.integers(0, len(SLOTS) - 1)
NODES = range(1, MAX_NODES + 1)


@given(slots)
def test_parts_of_a_lab_do_not_overlap(slot: int) -> None:
    addresses = Addresses(slot)
    parts = [addresses.machines, addresses.services, *(addresses.pods(node) for node in NODES)]
    assert all(part.subnet_of(addresses.network) for part in parts)
    assert not any(one.overlaps(other) for number, one in enumerate(parts) for other in parts[:number])


@given(slots)
def test_every_machine_has_a_different_address(slot: int) -> None:
    addresses = Addresses(slot)
    machines = [addresses.host, addresses.control_plane, *(addresses.node(node) for node in NODES)]
    assert len(set(machines)) == len(machines)
    assert set(machines) <= set(addresses.machines.hosts())
    assert addresses.apiserver == f"https://{addresses.control_plane}:6443"


def test_labs_share_nothing() -> None:
    labs = [Addresses(slot) for slot in range(len(SLOTS))]
    assert not any(one.network.overlaps(other.network) for one in labs for other in labs if one is not other)
    machines = ["control-plane", *(f"node{node}" for node in NODES)]
    names = [lab.bridge for lab in labs] + [lab.port(machine) for lab in labs for machine in machines]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15  # the kernel's limit


def test_no_address_is_public() -> None:
    assert RANGE.is_private


@given(st.text(min_size=1))
def test_every_name_has_a_fixed_order_of_all_slots(name: str) -> None:
    order = list(slots_by_preference(name))
    assert sorted(order) == list(range(len(SLOTS)))
    assert list(slots_by_preference(name)) == order


def test_different_names_start_at_different_slots() -> None:
    assert len({next(slots_by_preference(f"lab-{number}")) for number in range(50)}) > 8


@given(st.sets(slots))
def test_slots_with_routes_are_not_free(taken: set[int]) -> None:
    routed = ["default", "192.0.2.0/24", *(str(Addresses(slot).pods(3)) for slot in taken)]
    free = free_slot("lab", routed)
    if len(taken) == len(SLOTS):
        assert free is None
    else:
        assert free == next(slot for slot in slots_by_preference("lab") if slot not in taken)


@pytest.mark.parametrize("route", ["198.18.0.0/15", "198.0.0.0/8", "198.19.255.255"])
def test_a_slot_that_a_route_overlaps_is_not_free(route: str) -> None:
    free = [slot for slot in range(len(SLOTS)) if not SLOTS[slot].overlaps(IPv4Network(route))]
    slot = free_slot("lab", [route])
    assert slot in free if free else slot is None
