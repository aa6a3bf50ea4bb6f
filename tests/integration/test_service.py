"""The service with everything real: `penstock serve`, supervisors, ranks and shippers, some of them killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select

from penstock.api.executor.folder import AttemptFolder
from penstock.api.store import series
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import points, rollups
from penstock.api.store.schema import series as series_table
from penstock.api.store.series import ALL_RANKS
from penstock.trainer.rundir import complete_lines
from penstock.trainer.status import read_status, status_path
from tests.support.serving import Served, processes_of, served, served_job, wait_until

SEED = 1
STEPS = 200
JOB = {
    "training": {"globalBatch": 2, "steps": STEPS, "optimizer": {"learningRate": 1e-2}},
    "checkpoint": {"everySteps": 50, "keep": 2},
}
LONG = {"training": {"globalBatch": 2, "steps": 3000, "optimizer": {"learningRate": 1e-3}}}
PHASES = ["Queued", "Profiling", "Planning", "Binding", "Running", "Succeeded"]

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(service: Served) -> dict[int, float]:
    """The loss of every step, as the service has it, of a job to which nothing happened."""
    uid = service.submit("undisturbed", **JOB)
    service.wait_for("undisturbed", "Succeeded")
    assert service.phases("undisturbed") == PHASES
    wait_until(lambda: len(losses(service, uid)) == STEPS)
    return losses(service, uid)


def losses(service: Served, uid: str) -> dict[int, float]:
    """What charts show."""
    with database(service) as connection:
        chart = series.charts(connection, uid).get(("loss", ALL_RANKS))
    return {point.step: point.last for point in chart.points} if chart else {}


@contextmanager
def database(service: Served) -> Iterator[Connection]:
    engine = make_engine(parse_url(f"sqlite:///{service.folder / 'data' / 'penstock.db'}"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def supervisor_of(service: Served, uid: str, attempt: int) -> int:
    claim = AttemptFolder(service.run_dir(uid), attempt).claim
    wait_until(claim.exists)
    pid: int = json.loads(claim.read_text())["pid"]
    return pid


def test_a_job_is_measured_planned_and_trained(service: Served, undisturbed: dict[int, float]) -> None:
    assert list(undisturbed) == list(range(STEPS))
    status = service.status("undisturbed")
    assert (status["attempt"], status["failures"], status["progress"]["step"]) == (1, 0, STEPS)
    assert undisturbed[STEPS - 1] < undisturbed[0]


def test_what_was_measured_plans_what_was_run(service: Served, undisturbed: dict[int, float]) -> None:
    """The service keeps the measurement; asked without hardware, it plans by it what the job was run by."""
    (profile,) = service.client.get("/v1/profiles").json()["items"]
    assert (profile["fresh"], profile["numRanks"]) == (True, 2)
    asked = service.client.post("/v1/plans", json={"job": served_job("undisturbed", **JOB)}).json()
    assert asked["profile"] == profile["digest"]
    wait_until(lambda: service.client.get(f"/v1/plans/{asked['id']}").json()["finishedAt"] is not None)
    found = service.client.get(f"/v1/plans/{asked['id']}").json()
    assert (found["state"], found["planDigest"]) == ("Succeeded", service.status("undisturbed")["planDigest"])


@pytest.mark.parametrize("victim", ["rank", "agent", "supervisor", "shipper", "service"])
def test_whatever_is_killed_every_step_is_in_the_database_once(
    service: Served, undisturbed: dict[int, float], victim: str
) -> None:
    """At a moment that the seed chooses; the job goes on as if nothing had happened."""
    moment = random.Random(f"{SEED} {victim}").randrange(5, STEPS * 3 // 4)
    name = f"without-{victim}"
    uid = service.submit(name, **JOB)
    service.wait_for_step(name, moment)
    kill(service, uid, victim)
    status = service.wait_for(name, "Succeeded")
    assert status["attempt"] == 1 + status["failures"]
    if victim in ("shipper", "service"):
        assert status["attempt"] == 1
    wait_until(lambda: recorded(service, uid) == written(service, uid), seconds=120)
    assert losses(service, uid) == undisturbed
    assert counted(service, uid) == len(recorded(service, uid))


def kill(service: Served, uid: str, victim: str) -> None:
    if victim == "service":
        service.end(signal.SIGKILL)
        service.start()
        return
    run = service.run_dir(uid)
    status = read_status(status_path(run / "status", 1))
    assert status is not None
    pids = {
        "rank": status.pid,
        "agent": parent_of(status.pid),
        "supervisor": supervisor_of(service, uid, 1),
        "shipper": next(pid for pid in processes_of(run) if "ship" in arguments_of(pid)),
    }
    os.kill(pids[victim], signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


Taken = dict[tuple[int, int], float]
"""The loss of every step of every attempt."""


def recorded(service: Served, uid: str) -> Taken:
    """What the database has."""
    loss = select(series_table.c.id).where(series_table.c.uid == uid, series_table.c.name == "loss")
    chosen = select(points.c.attempt, points.c.step, points.c.value).where(points.c.series.in_(loss))
    with database(service) as connection:
        return {(attempt, step): value for attempt, step, value in connection.execute(chosen)}


def counted(service: Served, uid: str) -> int:
    """How many points the roll-ups have taken in; more than there are if any was taken twice."""
    loss = select(series_table.c.id).where(series_table.c.uid == uid, series_table.c.name == "loss")
    with database(service) as connection:
        found = connection.execute(
            select(func.sum(rollups.c.count)).where(rollups.c.series.in_(loss), rollups.c.steps == 16)
        )
        return int(found.scalar_one())


def written(service: Served, uid: str) -> Taken:
    """What the ranks left in metrics.jsonl."""
    lines = [json.loads(line) for line in complete_lines(service.run_dir(uid) / "metrics.jsonl")]
    found = {(line["attempt"], line["step"]): line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_suspended_and_resumed_from_the_command_line(service: Served) -> None:
    command, manifest = service.command, service.folder / "rests.json"
    manifest.write_text(json.dumps(served_job("rests", **LONG)))
    assert "valid" in command("submit", manifest, "--dry-run")[1]
    assert "Pending" in command("submit", manifest)[0]
    uid = service.uid("rests")
    service.wait_for_step("rests", 30)
    command("suspend", "rests")
    assert "Suspended" in command("watch", "rests")[1]
    told = json.loads(command("status", "rests", "-o", "json")[0])
    assert (told["status"]["phase"], told["spec"]["runPolicy"]) == ("Suspended", {"suspend": True})
    done = service.steps_done(uid)
    wait_until(lambda: not [pid for pid in processes_of(service.run_dir(uid)) if pid != os.getpid()])
    command("resume", "rests", "--server", str(service.client.base_url))
    service.wait_for_step("rests", done + 30)
    assert service.status("rests")["failures"] == 0
    command("delete", "rests")
    _, told_twice = command("delete", "none", code=2)
    assert "there is no job default/none" in told_twice
    wait_until(lambda: service.client.get("/v1/jobs", params={"name": "rests"}).json()["items"] == [])
    wait_until(lambda: processes_of(service.run_dir(uid)) == [])


def test_a_job_that_cannot_be_planned_says_why(service: Served) -> None:
    service.submit("pinned", parallelism={"pp": 2, "slices": 4, "stages": [2, 0], "schedule": "zbv"})
    wait_until(lambda: service.status("pinned")["phase"] == "Failed")
    assert "remedy" in service.status("pinned")["message"]


def test_a_service_that_is_asked_to_end_does(service: Served) -> None:
    assert service.end(signal.SIGTERM) == 0
    service.start()
