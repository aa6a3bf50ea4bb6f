"""The kinds of device that ship: each reads, plans, and says where every number comes from."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.cluster import KernelSpec
from penstock.core.devices import cluster_of, device_kind, device_kinds
from penstock.core.errors import UserError

EXPECTED = {"v100-16", "v100-32", "a100-40", "a100-80", "l40s", "h100", "h100-pcie", "h200", "b200", "gb200", "mi300x"}


def test_the_built_in_kinds() -> None:
    assert set(device_kinds()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_has_a_source_with_a_date(name: str) -> None:
    kind = device_kind(name)
    sourced = {field for source in kind.sources for field in source.fields}
    kernels = {f"kernels.{_camel(field.name)}" for field in dataclasses.fields(KernelSpec)}
    links = {"intraNode", "interNode", "nicsPerNode"} | ({"intraNodePeer"} if kind.intra_node_peer else set())
    measured = {"device.peakFlops", "device.memoryBytes", "device.memoryBandwidth"}
    assert sourced == kernels | links | measured
    assert all(source.source and source.date[:2] == "20" for source in kind.sources)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_cluster_has_as_many_nodes_as_asked_for(name: str) -> None:
    kind = device_kind(name)
    cluster = cluster_of(kind, 3)
    assert cluster.num_devices == 3 * kind.devices_per_node
    assert cluster.device.name == name
    assert cluster.device.kernels is not None


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean h100"):
        device_kind("h1000")


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
