"""How many pods nodes have room for, by what a scheduler would say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.operator.capacity import num_pods, offers
from tests.support.manifests import example

ONE_POD = 1.02
FULL_MEMORY = 39


def job(**kubernetes: Any) -> PipelineJob:
    """Pods of a core for their ranks, a fiftieth of one for what reports, and 1.6 GiB."""
    return PipelineJob.from_manifest(example(resources={"ranks": 4, "memoryPerRank": "1Gi"}, kubernetes=kubernetes))


def node(name: str = "n", *, cpu: str = "4100m", ready: str = "True", **more: Any) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return {
        "metadata": {"name": name, "labels": more.pop("labels", {})},
        "spec": more,
        "status": {**status, "allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "110"}},
    }


def pod(cpu: str, *, on: str = "n", phase: str = "Running", **more: Any) -> dict[str, Any]:
    container = {"resources": {"requests": {"cpu": cpu}}}
    return {"spec": {"nodeName": on, "containers": [container], **more}, "status": {"phase": phase}}


def room(*nodes: dict[str, Any], pods: tuple[dict[str, Any], ...] = (), **kubernetes: Any) -> int:
    return num_pods(job(**kubernetes), offers(nodes, pods))


def test_what_runs_holds_its_part() -> None:
    assert room(node()) == 4
    assert room(node(), pods=(pod("1500m"),)) == 2
    assert room(node(), pods=(pod("1500m", phase="Succeeded"), pod("4", on="other"))) == 4
    assert room(node(), pods=(pod("8"),)) == 0


def test_nodes_add_up_and_each_by_itself() -> None:
    assert room(node("a", cpu="1500m"), node("b", cpu="1500m")) == 2


@pytest.mark.parametrize(
    "closed",
    [
        node(ready="Unknown"),
        node(unschedulable=True),
        node(taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}]),
        node(taints=[{"key": "k", "effect": "NoExecute"}]),
    ],
)
def test_nodes_that_take_no_pods(closed: dict[str, Any]) -> None:
    assert room(closed) == 0


def test_a_taint_that_only_advises() -> None:
    assert room(node(taints=[{"key": "k", "effect": "PreferNoSchedule"}])) == 4


@pytest.mark.parametrize(
    ("toleration", "is_let_on"),
    [
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "w"}, False),
        ({"key": "k", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerations(toleration: dict[str, Any], is_let_on: bool) -> None:
    tainted = node(taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])
    assert room(tainted, tolerations=[toleration]) == (4 if is_let_on else 0)


def test_a_node_selector() -> None:
    assert room(node("a", labels={"pool": "x"}), node("b"), nodeSelector={"pool": "x"}) == 4


def test_initial_containers_count_where_they_are_larger() -> None:
    initial = [{"resources": {"requests": {"cpu": "3"}}}]
    assert room(node(), pods=(pod("1", initContainers=initial),)) == 1


def test_devices_that_no_node_has() -> None:
    wanted = example(resources={"ranks": 4, "device": "cuda"})
    assert num_pods(PipelineJob.from_manifest(wanted), offers([node()], ())) == 0


@given(st.integers(0, 40), st.lists(st.integers(1, 3), max_size=8))
def test_room_never_exceeds_what_is_left(cores: int, held: list[int]) -> None:
    found = room(node(cpu=str(cores)), pods=tuple(pod(str(each)) for each in held))
    assert found == min(max(int((cores - sum(held)) / ONE_POD), 0), FULL_MEMORY)
