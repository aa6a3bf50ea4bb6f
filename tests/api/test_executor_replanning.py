"""The service follows attempts that plan again while they run: with another plan in the same one, or in the next."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.pages.job import event_text
from penstock.api.store import jobs
from penstock.api.store.plans import revisions
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from tests.support.executing import World
from tests.support.fake_supervisors import RUNS_ON, Script
from tests.support.sample_run import sample_plan
from tests.support.service import Clock, new_service

OTHER: Plan = dataclasses.replace(sample_plan(), receive_ahead=3)
DECISION = "the run continues with another plan: device 1 takes 2.00 times as long as measured"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    world = World(service, clock)
    world.supervisors.scripts = [RUNS_ON, Script()]
    yield world
    service.close()


def report(world: World, uid: str, **changes: Any) -> None:
    """What the supervisor of the first attempt reports from now on."""
    attempt = world.supervisors.attempts[world.folder(uid)]
    assert attempt.report is not None
    attempt.report = dataclasses.replace(attempt.report, **changes)


def leave(world: World, uid: str, plan: Plan) -> None:
    """Write the plan that the ranks change to, or that the next attempt runs."""
    (world.folder(uid).root / "plan.json").write_text(json.dumps(plan.to_manifest()))
    report(world, uid, plan_digest=plan.digest)


def plans(world: World, uid: str) -> list[tuple[int, Plan]]:
    kept = world.service.read(lambda connection: revisions(connection, uid))
    return [(revision.attempt, revision.plan) for revision in kept]


def decisions(world: World, uid: str) -> list[str]:
    rows = world.service.read(lambda connection: jobs.history(connection, uid))
    return [event_text(row.kind, row.body) for row in rows if row.kind == "replanning"]


def test_a_plan_that_needs_a_restart_is_that_of_the_next_attempt(world: World) -> None:
    uid = world.submit(replanOnDrift=True)
    world.until(uid, Phase.RUNNING)
    report(world, uid, replanning=DECISION, better_plan=True)
    younger = world.submit("younger")
    while ("stop", 1) not in world.supervisors.asked:
        world.executor.run_once()
    world.supervisors.step()
    leave(world, uid, OTHER)
    ended = world.until(uid, Phase.SUCCEEDED)
    assert (ended.attempt, ended.failures) == (2, 0)
    assert plans(world, uid) == [(1, sample_plan()), (2, OTHER)]
    binding = world.supervisors.attempts[world.folder(uid, 2)].binding
    assert binding is not None
    assert binding.plan_digest == OTHER.for_ranks.digest
    assert world.planner.asked == [uid], "the next attempt is not planned again"
    assert decisions(world, uid) == [f"Attempt 1: {DECISION}"]
    assert world.job(younger).attempt == 0, "the job has kept its cores between its attempts"


def test_ranks_that_change_their_plan_go_on_in_the_same_attempt(world: World) -> None:
    uid = world.submit(replanOnDrift=True)
    world.until(uid, Phase.RUNNING)
    report(world, uid, replanning=DECISION)
    leave(world, uid, OTHER)
    for _ in range(4):
        world.turn()
    job = world.job(uid)
    assert (job.phase, job.attempt, job.plan_digest) == (Phase.RUNNING, 1, OTHER.digest)
    assert plans(world, uid) == [(1, sample_plan()), (1, OTHER)]


def test_each_decision_is_one_event_also_for_a_restarted_service(world: World) -> None:
    uid = world.submit(replanOnDrift=True)
    world.until(uid, Phase.RUNNING)
    for text in (DECISION, "the run keeps its plan: the drift ended during the search"):
        report(world, uid, replanning=text)
        for _ in range(2):
            world.turn()
            world.restart()
    assert [text.partition(": ")[2].partition(":")[0] for text in decisions(world, uid)] == [
        "the run continues with another plan",
        "the run keeps its plan",
    ]


@pytest.mark.parametrize("text", ["{", "{}", None])
def test_a_plan_that_cannot_be_read_is_not_taken(world: World, text: str | None) -> None:
    uid = world.submit(replanOnDrift=True)
    world.until(uid, Phase.RUNNING)
    leave(world, uid, OTHER)
    path = world.folder(uid).root / "plan.json"
    path.unlink() if text is None else path.write_text(text)
    world.suspend(uid)
    assert world.until(uid, Phase.SUSPENDED).attempt == 1
    assert plans(world, uid) == [(1, sample_plan())]
