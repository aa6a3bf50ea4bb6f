"""Plan queue: its steps for open requests, as a table; and with real requests, in a store and processes."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.executor.plan_queue import (
    LAPSE_SECONDS,
    MOST_BEGINNINGS,
    MOST_CONCURRENT,
    Begin,
    Drop,
    Fail,
    PlanQueue,
    Poll,
    Step,
    next_steps,
)
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.store import plan_requests
from penstock.api.store.plan_requests import PlanInput, State, StoredRequest
from penstock.planner.worker.__main__ import answer
from penstock.planner.worker.process import ProcessPlanner
from penstock.planner.worker.protocol import Answer, PlanningRequest
from tests.support.fake_planner import FakePlanner
from tests.support.planning import cluster
from tests.support.service import NOW, Clock, new_service
from tests.support.whatif import add_request, plan_queue_of, request_of, tiny_job, turn_until

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


def request(id_: str, **changes: Any) -> StoredRequest:
    fields: dict[str, Any] = {"number": 1, "namespace": "default", "name": "tiny", "created_by": "me"}
    return StoredRequest(**{**fields, "id": id_, "created_at": NOW, "state": State.QUEUED, **changes})


def worked_on(id_: str, worker: str, *, begun: int = 1) -> StoredRequest:
    return request(id_, state=State.WORKING, worker=worker, renewed_at=NOW, begun=begun)


A, B, C = request("a"), request("b"), request("c")
MINE, LOST = worked_on("m", "here"), worked_on("l", "here")
THEIRS, LAPSED = worked_on("t", "there"), worked_on("lapsed", "there")
POISON = worked_on("p", "here", begun=MOST_BEGINNINGS)


@pytest.mark.parametrize(
    ("found", "busy", "steps"),
    [
        ([], set(), []),
        ([A], set(), [Begin(A)]),
        ([A, B, C], set(), [Begin(A), Begin(B)]),
        ([MINE, A, B], {"m"}, [Poll(MINE), Begin(A)]),
        ([LOST], set(), [Begin(LOST)]),
        ([LOST, A, B], set(), [Begin(LOST), Begin(A)]),
        ([THEIRS], set(), []),
        ([LAPSED], set(), [Begin(LAPSED)]),
        ([], {"x"}, [Drop("x")]),
        ([THEIRS], {"t"}, [Drop("t")]),
        ([A, B, C], {"x"}, [Drop("x"), Begin(A), Begin(B)]),
        ([POISON, A, B], set(), [Fail(POISON), Begin(A), Begin(B)]),
        ([POISON], {"p"}, [Poll(POISON)]),
        ([MINE, LOST, A], {"m", "l"}, [Poll(MINE), Poll(LOST)]),
    ],
)
def test_what_is_due(found: list[StoredRequest], busy: set[str], steps: list[Step]) -> None:
    assert next_steps(found, busy, "here", {LAPSED.id}) == steps


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=2))
def test_namespaces_take_turns(waiting: list[str], working: list[str]) -> None:
    """None is begun a second time while another's first request waits; in each the oldest comes first."""
    found = [replace(worked_on(f"w{i}", "there"), namespace=namespace) for i, namespace in enumerate(working)]
    left = [request(f"q{i}", namespace=namespace) for i, namespace in enumerate(waiting)]
    taken = Counter(working)
    begun = [step.request for step in next_steps([*found, *left], set(), "here", set()) if isinstance(step, Begin)]
    assert len(begun) == min(MOST_CONCURRENT, len(waiting))
    for each in begun:
        assert each == next(other for other in left if other.namespace == each.namespace)
        assert taken[each.namespace] == min(taken[other.namespace] for other in left)
        taken[each.namespace] += 1
        left.remove(each)


def test_no_more_than_a_few_at_once(service: Service) -> None:
    for i in range(MOST_CONCURRENT + 3):
        add_request(service, f"r{i}")
    planner = FakePlanner()
    plan_queue = plan_queue_of(service, planner)
    plan_queue.run_once()
    assert planner.asked == [f"r{i}" for i in range(MOST_CONCURRENT)]
    for _ in range(20):
        plan_queue.run_once()
    assert planner.asked == [f"r{i}" for i in range(MOST_CONCURRENT + 3)]
    assert {request_of(service, f"r{i}").state for i in range(MOST_CONCURRENT + 3)} == {State.SUCCEEDED}


def test_an_error_is_kept(service: Service) -> None:
    add_request(service, "r")
    plan_queue = plan_queue_of(
        service, FakePlanner(answer=Answer(what="too large", where="spec.model", remedy="shrink it"))
    )
    for _ in range(4):
        plan_queue.run_once()
    found = request_of(service, "r")
    assert found.state is State.FAILED
    assert found.error == {"what": "too large", "where": "spec.model", "remedy": "shrink it"}


def test_two_services_share_the_work(service: Service) -> None:
    planners = FakePlanner(), FakePlanner()
    plan_queues = [
        plan_queue_of(service, planner, name) for planner, name in zip(planners, ("one", "two"), strict=True)
    ]
    for i in range(4):
        add_request(service, f"r{i}")
    for _ in range(3):
        for plan_queue in plan_queues:
            plan_queue.run_once()
    assert [planner.asked for planner in planners] == [["r0", "r1"], ["r2", "r3"]]


def test_what_another_service_left_is_taken_up(service: Service, clock: Clock) -> None:
    add_request(service, "r")
    plan_queue_of(service, FakePlanner(), "killed").run_once()
    planner = FakePlanner()
    plan_queue = plan_queue_of(service, planner)
    plan_queue.run_once()
    assert planner.asked == []
    clock.now += LAPSE_SECONDS + 1
    for _ in range(4):
        plan_queue.run_once()
    assert (planner.asked, request_of(service, "r").begun) == (["r"], 2)
    assert request_of(service, "r").state is State.SUCCEEDED


def test_who_works_is_not_taken_for_gone(service: Service, clock: Clock) -> None:
    add_request(service, "r")
    planner, other = Patient(), FakePlanner()
    plan_queues = plan_queue_of(service, planner), plan_queue_of(service, other, "other")
    for _ in range(30):
        for plan_queue in plan_queues:
            plan_queue.run_once()
        clock.now += LAPSE_SECONDS / 10
    assert (planner.asked, other.asked) == (["r"], [])


@pytest.mark.parametrize("jump_seconds", [3600.0, -3600.0])
def test_a_jump_of_a_wall_clock_takes_no_request_from_its_worker(
    service: Service, clock: Clock, jump_seconds: float
) -> None:
    """The clocks of two services may differ, too."""
    add_request(service, "r")
    boottime, planner, other = Clock(50.0), Patient(), FakePlanner()
    off = replace(service, clock=Clock(clock.now - 1e6))
    plan_queues = (
        PlanQueue(service, planner, name="here", boottime=boottime),
        PlanQueue(off, other, name="other", boottime=boottime),
    )
    for i in range(30):
        for plan_queue in plan_queues:
            plan_queue.run_once()
        boottime.now += LAPSE_SECONDS / 10
        clock.now += LAPSE_SECONDS / 10 + (jump_seconds if i == 5 else 0.0)
    assert (planner.asked, other.asked) == (["r"], [])


class Patient(FakePlanner):
    """Never comes to an end."""

    def poll(self, key: str) -> Answer | None:
        return None


def test_what_kills_the_service_again_and_again_is_given_up(service: Service) -> None:
    add_request(service, "r")
    for _ in range(MOST_BEGINNINGS):
        plan_queue_of(service, FakePlanner()).run_once()
    assert request_of(service, "r").state is State.WORKING
    plan_queue_of(service, FakePlanner()).run_once()
    found = request_of(service, "r")
    assert (found.state, f"started {MOST_BEGINNINGS} times" in found.error["what"]) == (State.FAILED, True)


def test_a_request_whose_profile_is_gone_fails_and_others_go_on(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    add_request(service, "r", PlanInput(job=tiny_job(), profile="0" * 64))
    add_request(service, "s")
    plan_queue = plan_queue_of(service, FakePlanner())
    for _ in range(4):
        plan_queue.run_once()
    assert [request_of(service, each).state for each in "rs"] == [State.FAILED, State.SUCCEEDED]
    assert "cannot be read" in request_of(service, "r").error["what"]
    assert "NoSuchProfileError" in caplog.text


# With real processes, on SQLite: what they do does not depend on the database.


@pytest.fixture
def here(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def pid_of(planner: ProcessPlanner, key: str) -> int:
    return planner._running[key].process.pid


def ended_at(plan_queue: PlanQueue, service: Service, key: str) -> StoredRequest:
    turn_until(plan_queue, lambda: request_of(service, key).state.terminal)
    return request_of(service, key)


def test_canceling_kills_the_process(here: Service) -> None:
    add_request(here, "r")
    planner = ProcessPlanner(SLEEPS)
    plan_queue = plan_queue_of(here, planner)
    plan_queue.run_once()
    pid = pid_of(planner, "r")
    here.write("r", lambda c: plan_requests.cancel(c, "r", NOW))
    os.kill(pid, 0)
    plan_queue.run_once()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert request_of(here, "r").state is State.CANCELED


def test_one_that_takes_too_long_is_ended(here: Service) -> None:
    add_request(here, "r")
    planner = ProcessPlanner(SLEEPS, seconds=0.2)
    plan_queue = plan_queue_of(here, planner)
    plan_queue.run_once()
    pid = pid_of(planner, "r")
    found = ended_at(plan_queue, here, "r")
    assert (found.state, found.error["what"]) == (State.FAILED, "planning took over 0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_desk_that_closes_leaves_no_process(here: Service) -> None:
    add_request(here, "r")
    planner = ProcessPlanner(SLEEPS)
    plan_queue = plan_queue_of(here, planner)
    plan_queue.run_once()
    pid = pid_of(planner, "r")
    plan_queue.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert request_of(here, "r").state is State.WORKING


def test_a_killed_service_plans_anew_and_alike(here: Service, tmp_path: Path, clock: Clock) -> None:
    add_request(here, "r")
    add_request(here, "s")
    killed = ProcessPlanner(SLEEPS)
    plan_queue_of(here, killed).run_once()
    again = open_service(Settings(folder=tmp_path), clock)
    plan_queue = plan_queue_of(again, ProcessPlanner())
    found = [ended_at(plan_queue, again, each) for each in "rs"]
    expected = answer(PlanningRequest(spec=tiny_job().spec, cluster=cluster())).plan
    assert expected is not None
    assert [(each.state, each.begun, each.plan_digest) for each in found] == [(State.SUCCEEDED, 2, expected.digest)] * 2
    for each in "rs":
        killed.cancel(each)
    again.close()


def test_what_a_process_complains_of_is_in_the_log(here: Service, caplog: pytest.LogCaptureFixture) -> None:
    add_request(here, "r")
    planner = ProcessPlanner((sys.executable, "-c", "raise RuntimeError('no such luck')"))
    with caplog.at_level(logging.WARNING):
        found = ended_at(plan_queue_of(here, planner), here, "r")
    assert found.error["what"] == "planning ended with code 1"
    assert "no such luck" in caplog.text
