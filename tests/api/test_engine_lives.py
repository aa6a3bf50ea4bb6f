"""The engine's table of lives under the service, with real supervisors as processes; only the ranks follow scripts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.api.executor.supervisors import ProcessSupervisors
from penstock.api.store import jobs
from penstock.core.lifecycle import Phase
from penstock.core.serialization.manifest_files import read
from penstock.core.supervision import Claim
from tests.support.engine_cases import CASES, Case, End, Outcome, expected
from tests.support.executing import World
from tests.support.service import Clock, new_service

PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.05


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    clock = Clock(time.time())  # supervisors have the real one
    service = new_service(tmp_path, "", clock)
    yield World(service, clock, boottime=Clock(50.0))
    service.close()


def service_outcome(case: Case, world: World) -> Outcome:
    """Submit the case's job and turn until it has ended; seconds pass on the service's clocks with every turn."""
    command = (sys.executable, "-m", "tests.support.scripted_supervisor", ",".join(case.ends))
    world.restart(supervisors=ProcessSupervisors(command))
    uid, is_pending, end = world.submit(**case.policy), True, time.monotonic() + PATIENCE_SECONDS
    while not _is_over(case, world.job(uid).phase):
        assert time.monotonic() < end, f"{world.phases(uid)} goes on"
        world.executor.run_once()
        if is_pending and _steps(world, uid):
            is_pending = False
            world.executor.run_once()
            world.pass_time(case.passes_seconds)
            world.clock.now += case.jump_seconds
            if case.suspends:
                world.suspend(uid)
            if case.ends[0] is End.VANISHES:
                _kill_supervisor(world, uid)
        world.pass_time(POLL_SECONDS)
        time.sleep(POLL_SECONDS)
    history = world.service.read(lambda connection: jobs.history(connection, uid))
    life = tuple((Phase(row.body["phase"]), row.body["reason"]) for row in history if row.kind == "phase")
    launched = tuple(row.body["attempt"] for row in history if row.kind == "launched")
    return Outcome(life=life, started=launched, failures=world.job(uid).failures)


def _is_over(case: Case, phase: Phase) -> bool:
    return phase.terminal or (case.suspends and phase is Phase.SUSPENDED)


def _steps(world: World, uid: str) -> bool:
    """Whether the first attempt runs and has taken a step."""
    report = ProcessSupervisors().report(world.folder(uid))
    return world.job(uid).phase is Phase.RUNNING and report is not None and report.last_step_at is not None


def _kill_supervisor(world: World, uid: str) -> None:
    claim = read(world.folder(uid).claim, Claim)
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_life_of_a_job_of_the_service(case: Case, world: World) -> None:
    assert service_outcome(case, world) == expected(case)
