"""Nodes that offer more cores for the time of a test, and what is told if that test fails."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from tests.support.cluster_jobs import offering
from tests.support.installed import PAIR_NODES, JobSpace
from tools.lab import lab
from tools.lab.console import LabError

OWN = 2


class Nodes:
    """A cluster whose nodes offer what was declared, but for one that stays as it is from some time on."""

    def __init__(self) -> None:
        self.cores: dict[str, int | None] = dict.fromkeys(PAIR_NODES)
        self.deaf = ""
        self.refuses = False

    def get(self, resource: object, name: str) -> dict[str, Any]:
        return {"status": {"allocatable": {"cpu": str(self.cores[name] or OWN)}}}

    def ready(self) -> set[str]:
        return set(PAIR_NODES)

    def wait(self, happened: Any, what: str) -> None:
        assert happened(), what

    def declare(self, space: object, node: str, count: int | None) -> None:
        if self.refuses:
            raise LabError("the kubelet does not start")
        if node != self.deaf:
            self.cores[node] = count


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes()
    monkeypatch.setattr(lab, "declare_cores", found.declare)
    monkeypatch.setattr(os, "cpu_count", lambda: OWN)
    return found


def space(nodes: Nodes) -> JobSpace:
    return JobSpace(cluster=cast(Any, nodes), lab=cast(Any, None), namespace="", system="")


def test_nodes_offer_more_and_then_what_they_had(nodes: Nodes) -> None:
    with offering(space(nodes), 5):
        assert set(nodes.cores.values()) == {5}
    assert set(nodes.cores.values()) == {None}


def test_a_node_that_does_not_come_back_fails_a_test_that_went_well(nodes: Nodes) -> None:
    with pytest.raises(AssertionError, match="do not offer 2 and 2 cores"), offering(space(nodes), 5):
        nodes.deaf = PAIR_NODES[0]


def test_a_node_that_does_not_offer_more_is_taken_back(nodes: Nodes) -> None:
    nodes.deaf = PAIR_NODES[0]
    with pytest.raises(AssertionError, match="do not offer 5 and 5 cores"), offering(space(nodes), 5):
        pytest.fail("it offers more")
    assert set(nodes.cores.values()) == {None}


@pytest.mark.parametrize("refuses", [False, True])
def test_what_a_test_fails_of_is_told_whatever_becomes_of_the_nodes(nodes: Nodes, refuses: bool) -> None:
    with pytest.raises(ZeroDivisionError) as error, offering(space(nodes), 5):  # noqa: PT012, what a test does
        nodes.deaf, nodes.refuses = PAIR_NODES[0], refuses
        raise ZeroDivisionError
    (note,) = error.value.__notes__
    assert ("the kubelet does not start" if refuses else "do not offer 2 and 2 cores") in note
