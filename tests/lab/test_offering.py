"""Nodes that offer more cores during a test, and the error if that test or the reset fails."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from tests.support.cluster_jobs import offering
from tests.support.installed import PAIR_NODES, JobSpace
from tools.lab import lab
from tools.lab.console import LabError

HOST_CORES = 2


class Nodes:
    """Cluster whose nodes offer the declared cores, except for one node that can stop to change."""

    def __init__(self) -> None:
        self.cores: dict[str, int | None] = dict.fromkeys(PAIR_NODES)
        self.stuck = ""
        self.refuses = False

    def get(self, resource: object, name: str) -> dict[str, Any]:
        return {"status": {"allocatable": {"cpu": str(self.cores[name] or HOST_CORES)}}}

    def ready(self) -> set[str]:
        return set(PAIR_NODES)

    def wait(self, condition: Any, message: str) -> None:
        assert condition(), message

    def declare(self, space: object, node: str, count: int | None) -> None:
        if self.refuses:
            raise LabError("the kubelet does not start")
        if node != self.stuck:
            self.cores[node] = count


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    fake_nodes = Nodes()
    monkeypatch.setattr(lab, "declare_cores", fake_nodes.declare)
    monkeypatch.setattr(os, "cpu_count", lambda: HOST_CORES)
    return fake_nodes


def space(nodes: Nodes) -> JobSpace:
    return JobSpace(cluster=cast(Any, nodes), lab=cast(Any, None), namespace="", system="")


def test_nodes_offer_more_cores_and_are_reset(nodes: Nodes) -> None:
    with offering(space(nodes), 5):
        assert set(nodes.cores.values()) == {5}
    assert set(nodes.cores.values()) == {None}


def test_a_failed_reset_fails_a_test_that_passed(nodes: Nodes) -> None:
    with pytest.raises(AssertionError, match="do not offer 2 and 2 cores"), offering(space(nodes), 5):
        nodes.stuck = PAIR_NODES[0]


def test_a_node_that_does_not_offer_more_is_reset(nodes: Nodes) -> None:
    nodes.stuck = PAIR_NODES[0]
    with pytest.raises(AssertionError, match="do not offer 5 and 5 cores"), offering(space(nodes), 5):
        pytest.fail("the test ran without the cores")
    assert set(nodes.cores.values()) == {None}


@pytest.mark.parametrize("refuses", [False, True])
def test_the_error_of_a_test_is_kept_if_the_reset_fails_too(nodes: Nodes, refuses: bool) -> None:
    with pytest.raises(ZeroDivisionError) as error, offering(space(nodes), 5):  # noqa: PT012, what a test does
        nodes.stuck, nodes.refuses = PAIR_NODES[0], refuses
        raise ZeroDivisionError
    (note,) = error.value.__notes__
    assert ("the kubelet does not start" if refuses else "do not offer 2 and 2 cores") in note
