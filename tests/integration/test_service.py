"""The service with everything real: `penstock serve`, supervisors, ranks and shippers, some of them killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from benchmarks.soak.kills import JOB, STEPS, differences, survive, undisturbed_losses

from tests.support.killing import VICTIMS
from tests.support.serving import Served, processes_of, served, served_job, wait_until

SEED, NUM_KILLS = 1, 8
LONG = {"training": {"globalBatch": 2, "steps": 3000, "optimizer": {"learningRate": 1e-3}}}
PHASES = ["Queued", "Profiling", "Planning", "Binding", "Running", "Succeeded"]

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with served(folder, log=folder / "service.log") as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(service: Served) -> dict[int, float]:
    """The loss of every step, as the service has it, of a job to which nothing happened."""
    return undisturbed_losses(service)


def test_a_job_is_measured_planned_and_trained(service: Served, undisturbed: dict[int, float]) -> None:
    assert list(undisturbed) == list(range(STEPS))
    assert service.phases("undisturbed") == PHASES
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


@pytest.mark.long
def test_whatever_is_killed_every_step_is_in_the_database_once(service: Served, undisturbed: dict[int, float]) -> None:
    """Eight kills by a fixed seed, of ranks, agents, supervisors, shippers and the service; `./dev soak` has more."""
    survived = survive(service, undisturbed, NUM_KILLS, SEED)
    assert survived.violations == []
    assert (survived.num_kills, set(survived.kills)) == (NUM_KILLS, set(VICTIMS))


@pytest.mark.parametrize(
    ("kept", "left", "complaint"),
    [
        ([(1, 1), (1, 2)], [(1, 1), (1, 2)], ""),
        ([(1, 1), (1, 2), (2, 2)], [(1, 1), (2, 2)], ""),
        ([(1, 1)], [], ""),
        ([(1, 1), (1, 3)], [(1, 1)], "are in the database and not in metrics.jsonl: attempt and step [(1, 3)]"),
        ([(1, 1)], [(1, 1), (1, 2)], "are not in the database: attempt and step [(1, 2)]"),
        ([(1, 1), (1, 2)], [(1, 2)], "are in the database and not in metrics.jsonl: attempt and step [(1, 1)]"),
        ([(1, 1), (1, 2)], [], "are in the database and not in metrics.jsonl: attempt and step [(1, 1), (1, 2)]"),
    ],
)
def test_a_killed_rank_may_leave_its_last_step_in_the_database_alone(
    kept: list[tuple[int, int]], left: list[tuple[int, int]], complaint: str
) -> None:
    sentences = differences(dict.fromkeys(kept, 1.0), dict.fromkeys(left, 1.0))
    assert [sentence.partition(" steps ")[2] for sentence in sentences] == ([complaint] if complaint else [])


def test_another_loss_in_the_database_is_a_difference() -> None:
    (sentence,) = differences({(1, 1): 1.0}, {(1, 1): 2.0})
    assert "have another loss in the database" in sentence


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
