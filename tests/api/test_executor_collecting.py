"""Attempts are closed once every record they left is acknowledged, whichever process was killed, and not before."""

from __future__ import annotations

import fcntl
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from penstock.api.executor import collecting
from penstock.api.executor.collecting import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MOST_SHIPPERS,
    Collector,
    EndedAttempt,
    ProcessShippers,
    Step,
    next_step,
)
from penstock.api.service import Service
from penstock.api.store import attempts
from penstock.api.store.schema import attempts as table
from penstock.api.store.schema import jobs as jobs_table
from penstock.core.lifecycle import Launch, Phase
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import this_process
from penstock.core.serialization.manifest_files import write
from tests.support.executing import World
from tests.support.fake_supervisors import FAILS, RUNS_ON
from tests.support.service import Clock


def test_an_attempt_is_closed_only_when_nothing_writes_and_everything_is_acknowledged() -> None:
    """Every state that there is."""
    found = {
        state: next_step(EndedAttempt(supervised=state[0], acknowledged=state[1], shipping=state[2], followed=state[3]))
        for state in itertools.product((False, True), repeat=4)
    }
    closed = {state for state, step in found.items() if step is Step.CLOSE}
    assert closed == {(False, True, shipping, followed) for shipping in (False, True) for followed in (False, True)}
    assert {state for state, step in found.items() if step is Step.COLLECT} == {(False, False, False, False)}


@dataclass
class FakeShippers:
    """Notes what was started; nothing ends by itself."""

    started: list[AttemptFolder] = field(default_factory=list)
    alive: int = 0

    def start(self, folder: AttemptFolder) -> None:
        self.started.append(folder)
        self.alive += 1

    def running(self) -> int:
        return self.alive


@dataclass
class Bench:
    """Jobs whose executor is ``here``, and the collector of its attempts."""

    world: World
    shippers: FakeShippers = field(default_factory=FakeShippers)
    acknowledged: set[AttemptFolder] = field(default_factory=set)
    seconds: float = 0.0
    broken: set[AttemptFolder] = field(default_factory=set)
    collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.collector = Collector(
            self.world.service,
            self.shippers,
            name="here",
            acknowledged=self._acknowledged,
            seconds=lambda: self.seconds,
        )

    def _acknowledged(self, folder: AttemptFolder, is_newest: bool) -> bool:
        if folder in self.broken:
            raise OSError("the disk is broken")
        return folder in self.acknowledged

    def open(self) -> list[tuple[str, int]]:
        chosen = select(table.c.uid, table.c.attempt).where(table.c.closed_at.is_(None))
        rows = self.world.service.read(lambda c: c.execute(chosen.order_by(table.c.uid, table.c.attempt)).all())
        return [(uid, attempt) for uid, attempt in rows]


@pytest.fixture
def bench(service: Service, clock: Clock) -> Bench:
    return Bench(World(service, clock))


def test_a_running_attempt_is_left_alone(bench: Bench) -> None:
    bench.world.supervisors.scripts = [RUNS_ON]
    uid = bench.world.submit()
    bench.world.until(uid, Phase.RUNNING)
    bench.acknowledged.add(bench.world.folder(uid))
    bench.collector.run_once()
    assert (bench.open(), bench.shippers.started) == ([(uid, 1)], [])


def test_an_attempt_that_reported_everything_is_closed_without_another_process(bench: Bench) -> None:
    uid = bench.world.submit()
    bench.world.until(uid, Phase.SUCCEEDED)
    bench.acknowledged.add(bench.world.folder(uid))
    bench.collector.run_once()
    assert (bench.open(), bench.shippers.started) == ([], [])


def test_what_is_left_is_collected_and_then_closed(bench: Bench) -> None:
    uid = bench.world.submit()
    bench.world.until(uid, Phase.SUCCEEDED)
    folder = bench.world.folder(uid)
    bench.collector.run_once()
    assert (bench.open(), bench.shippers.started) == ([(uid, 1)], [folder])
    bench.acknowledged.add(folder)
    bench.collector.run_once()
    assert bench.open() == []


def test_every_attempt_of_a_job_is_collected_also_by_another_service(bench: Bench) -> None:
    """Also of a job that was deleted meanwhile."""
    bench.world.supervisors.scripts = [FAILS, FAILS, RUNS_ON]
    uid = bench.world.submit(backoffLimit=5)
    while bench.world.job(uid).attempt < 3:
        bench.world.turn()
        bench.world.clock.now += 1
    bench.world.until(uid, Phase.RUNNING)
    bench.restart()
    bench.collector.run_once()
    assert bench.shippers.started == [bench.world.folder(uid, attempt) for attempt in (1, 2)]
    bench.acknowledged.update(bench.shippers.started)
    bench.collector.run_once()
    assert bench.open() == [(uid, 3)]
    bench.world.delete(uid)
    bench.world.turn()
    bench.shippers.alive = 0
    bench.collector.run_once()
    assert bench.shippers.started[-1] == bench.world.folder(uid, 3)


def ended(bench: Bench) -> tuple[str, AttemptFolder]:
    uid = bench.world.submit(f"job-{bench.world.submitted}")
    bench.world.until(uid, Phase.SUCCEEDED)
    return uid, bench.world.folder(uid)


def test_a_shipper_that_fails_is_started_again_after_longer_and_longer_pauses(bench: Bench) -> None:
    ended(bench)
    started_at: list[int] = []
    for second in range(900):
        bench.seconds, bench.shippers.alive = float(second), 0
        bench.collector.run_once()
        if len(bench.shippers.started) > len(started_at):
            started_at.append(second)
    pauses = [after - before for before, after in itertools.pairwise(started_at)]
    assert pauses == [FIRST_PAUSE_SECONDS, 2, 4, 8, 16, 32, 64, 128, 256, LONGEST_PAUSE_SECONDS]


def test_few_are_collected_at_once(bench: Bench) -> None:
    folders = [ended(bench)[1] for _ in range(MOST_SHIPPERS + 2)]
    bench.collector.run_once()
    assert bench.shippers.started == folders[:MOST_SHIPPERS]
    bench.shippers.alive -= 1
    bench.collector.run_once()
    assert bench.shippers.started == folders[: MOST_SHIPPERS + 1]


def test_one_that_a_shipper_works_on_waits_for_it(bench: Bench) -> None:
    _, folder = ended(bench)
    shipping_lock(folder.root).parent.mkdir()
    with shipping_lock(folder.root).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bench.collector.run_once()
        assert bench.shippers.started == []
    bench.collector.run_once()
    assert bench.shippers.started == [folder]


def test_one_that_is_still_supervised_waits(bench: Bench) -> None:
    """Its job has left it, and its supervisor saves what it has."""
    uid, folder = ended(bench)
    folder.path.mkdir(parents=True, exist_ok=True)
    write(folder.claim, this_process())
    bench.acknowledged.add(folder)
    bench.collector.run_once()
    assert (bench.open(), bench.shippers.started) == ([(uid, 1)], [])
    folder.claim.unlink()
    bench.collector.run_once()
    assert bench.open() == []


def test_an_older_one_is_left_to_the_shipper_of_the_newest(bench: Bench) -> None:
    uid, folder = ended(bench)
    newest = AttemptFolder(folder.root, 2)
    started = Launch(2, 2, None)

    def launch(connection: Connection) -> None:
        attempts.add(connection, uid, started, (), 1.0)
        connection.execute(jobs_table.update().where(jobs_table.c.uid == uid).values(attempt=2))

    bench.world.service.write(uid, launch)
    newest.path.mkdir(parents=True)
    write(newest.claim, this_process())
    bench.collector.run_once()
    assert bench.shippers.started == []
    bench.acknowledged.add(folder)
    bench.collector.run_once()
    assert bench.open() == [(uid, 2)]


def test_one_that_cannot_be_read_holds_up_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there are more than are looked at in a turn."""
    monkeypatch.setattr(collecting, "MAX_PER_POLL", 2)
    found = [ended(bench) for _ in range(5)]
    bench.broken.update(folder for _, folder in found[:3])
    bench.acknowledged.update(folder for _, folder in found[3:])
    for _ in range(4):
        bench.collector.run_once()
    assert bench.open() == [(uid, 1) for uid, _ in found[:3]]


def test_another_executor_s_attempts_are_its_own(bench: Bench) -> None:
    uid, folder = ended(bench)
    bench.world.service.write(
        uid, lambda c: c.execute(jobs_table.update().where(jobs_table.c.uid == uid).values(executor="there"))
    )
    bench.acknowledged.add(folder)
    bench.collector.run_once()
    assert (bench.open(), bench.shippers.started) == ([(uid, 1)], [])


SHIPPER = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "stdin": sys.stdin.read(), "leads": os.getsid(0) == os.getpid()}))
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def note(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_shipper_is_a_process_that_ends_once_all_is_acknowledged(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Its stdin is at its end from the first moment on, and it outlives the service."""
    shippers = ProcessShippers(Path("/a"), Path("/t"), (sys.executable, "-c", SHIPPER))
    folder = AttemptFolder(tmp_path, 4)
    shippers.start(folder)
    assert processes[0].wait(60) == 0
    assert shippers.running() == 0
    said = json.loads(folder.shipper_log.read_text())
    arguments = [str(tmp_path), "--address-file", "/a", "--token-file", "/t"]
    assert said == {"arguments": arguments, "stdin": "", "leads": True}
