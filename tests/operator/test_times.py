"""Whose clock counts, and which time: the operator's own, and that in which a job is active."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.host.clocks import SlewedClock
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.status import ConditionType
from penstock.core.supervision import AttemptReport
from penstock.kube.resources import JOBSETS, PODS
from tests.support import manifests
from tests.support.fake_planner import FakePlanner
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

NODES = ("east", "west")


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def example(kubernetes: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The design's example with an output that its two pods can share."""
    return manifests.example(kubernetes={"volumes": {"out": {"claim": "shared"}}, **(kubernetes or {})}, **changes)


def running(operating: Operating, **changes: Any) -> str:
    return operating.running(example(**changes), sample_profile(), *NODES)


def end_all(operating: Operating, state: AttemptState) -> None:
    word = json.dumps(AttemptReport(state=state).to_manifest())
    for index in range(len(operating.kube.all(PODS))):
        operating.kube.end_pod(index, code=0, word=word)


@pytest.mark.parametrize("jump", [3_600.0, -3_600.0])
def test_setting_the_operator_s_wall_clock_loses_no_attempt_and_hides_no_silence(
    operating: Operating, jump: float
) -> None:
    boottime, ahead = 500.0, 1000.0 - 500.0
    clock = SlewedClock(lambda: boottime + ahead, lambda: boottime)
    uid = running(operating)
    boottime, ahead = boottime + operating.now - 1000.0, ahead + jump
    for step in range(1, 12):
        boottime += 50.0
        operating.now = clock()
        operating.kube.report(uid, attempt=1, epoch=1, step=step)
        operating.turn()
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RUNNING, 1)
    boottime += 70.0
    operating.now = clock()
    operating.turn()
    assert operating.status(uid).condition(ConditionType.STALLED) is not None


@pytest.mark.parametrize("ahead", [3_600.0, -3_600.0])
def test_a_clock_that_is_off_is_told_and_decides_nothing(operating: Operating, ahead: float) -> None:
    """The scheduler dates by its clock since when a pod has no place, the operator waits by its own."""
    operating.kube.clock = lambda: operating.now - ahead
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example(resources={"ranks": 2, "minRanks": 1}))
    operating.turn()
    operating.kube.start_pods(*NODES)
    operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.kube.clock())
    operating.turn()
    operating.now += 119.0
    operating.turn()
    admitted = operating.status(uid).condition(ConditionType.ADMITTED)
    assert admitted is not None
    which = "ahead of" if ahead > 0 else "behind"
    assert f"about 60 min {which} the cluster's; synchronise both machines with NTP" in admitted.message
    assert operating.status(uid).attempt == 1
    operating.now += 2.0
    operating.turn()
    assert (operating.status(uid).attempt, operating.status(uid).ranks) == (2, 1)


@pytest.mark.parametrize("ahead", [3_600.0, -3_600.0])
def test_a_restarted_operator_begins_a_wait_for_places_again_by_its_own_clock(
    operating: Operating, ahead: float
) -> None:
    """Nothing has shown it yet that the cluster's clock differs."""
    operating.kube.clock = lambda: operating.now - ahead
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example(resources={"ranks": 2, "minRanks": 1}))
    operating.turn()
    operating.kube.start_pods(*NODES)
    operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.kube.clock())
    operating.now += 60.0
    operating.turn()
    operating.restart()
    operating.turn()
    operating.now += 119.0
    operating.turn()
    assert operating.status(uid).attempt == 1
    operating.now += 2.0
    operating.turn()
    assert (operating.status(uid).attempt, operating.status(uid).ranks) == (2, 1)


@pytest.mark.parametrize("node_ahead", [3_600.0, 0.0, -3_600.0])
@pytest.mark.parametrize("ahead", [3_600.0, 0.0, -3_600.0])
def test_a_pod_that_ends_for_the_loss_of_a_node_is_no_failure_by_any_clock(
    operating: Operating, ahead: float, node_ahead: float
) -> None:
    """Neither by the kubelet's, which dates the end, nor by the node controller's, which dates the loss."""
    uid = running(operating)
    operating.now += 100.0
    operating.kube.add_node("west", ready=False, at=operating.now - node_ahead)
    operating.kube.end_pod(0, code=1, word="lost a peer", at=operating.now - ahead)
    operating.turn()
    status = operating.status(uid)
    assert (status.phase in (Phase.RECOVERING, Phase.QUEUED), status.failures) == (True, 0)


@pytest.mark.parametrize(("late", "says"), [(20.0, ""), (-20.0, ""), (40.0, "about 1 min ahead")])
def test_what_a_call_takes_is_no_difference(operating: Operating, late: float, says: str) -> None:
    operating.kube.clock = lambda: operating.now - late
    uid = operating.kube.submit(example())
    operating.turn()
    admitted = operating.status(uid).condition(ConditionType.ADMITTED)
    assert admitted is not None
    assert says in admitted.message
    assert bool(says) == ("clock" in admitted.message)


def test_a_deadline_counts_what_is_active(operating: Operating) -> None:
    """Neither while it is suspended, nor what was before; as the cluster counts for a Job."""
    uid = running(operating, runPolicy={"activeDeadlineSeconds": 100})
    operating.kube.change_spec(uid, runPolicy={"suspend": True})
    operating.turn()
    end_all(operating, AttemptState.STOPPED)
    operating.turn()
    operating.now += 1_000.0
    operating.turn()
    assert operating.phase(uid) is Phase.SUSPENDED
    operating.kube.change_spec(uid, runPolicy={"suspend": False})
    operating.turn()
    operating.now += 99.0
    operating.turn()
    assert operating.phase(uid) is Phase.QUEUED
    operating.now += 1.0
    operating.turn()
    assert operating.status(uid).reason == "DeadlineExceeded"


def test_a_deadline_does_not_count_what_a_queue_takes(operating: Operating) -> None:
    uid = operating.kube.submit(example(kubernetes={"queueName": "team"}, runPolicy={"activeDeadlineSeconds": 100}))
    operating.turn()
    operating.now += 1_000.0
    operating.turn()
    assert operating.phase(uid) is Phase.QUEUED
    operating.kube.all(JOBSETS)[0]["spec"]["suspend"] = False
    operating.turn()
    operating.now += 99.0
    operating.turn()
    assert operating.phase(uid) is Phase.QUEUED
    operating.now += 1.0
    operating.turn()
    assert operating.status(uid).reason == "DeadlineExceeded"
