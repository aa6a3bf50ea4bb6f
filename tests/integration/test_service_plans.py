"""Plans without running, with everything real: `penstock serve`, `penstock plan --server`, killed and interrupted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.serialization import yamltext
from penstock.planner.worker.__main__ import answer
from penstock.planner.worker.protocol import PlanningRequest
from tests.support.command import ended
from tests.support.repository import ROOT
from tests.support.serving import Served, served, wait_until
from tests.support.whatif import asked_for, tiny_job

EXAMPLES = ROOT / "deploy" / "examples"

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """What takes the planner many seconds."""
    job = yamltext.load((EXAMPLES / "gpt3-175b.yaml").read_text(), "job")
    job["spec"]["data"]["source"] = "python-stdlib"
    return {"job": job, "cluster": yamltext.load((EXAMPLES / "gpt3-175b-cluster.yaml").read_text(), "cluster")}


def ask(service: Served, body: dict[str, Any]) -> str:
    answer = service.client.post("/v1/plans", json=body)
    assert answer.status_code == 202, answer.text
    found: str = answer.json()["id"]
    return found


def request_of(service: Served, request: str) -> dict[str, Any]:
    found: dict[str, Any] = service.client.get(f"/v1/plans/{request}").json()
    return found


def searching(service: Served, request: str) -> None:
    """Wait until it tells how far it is."""
    wait_until(lambda: request_of(service, request)["progress"]["candidates"] > 0)
    assert request_of(service, request)["state"] == "Working"


def planning(service: Served) -> list[int]:
    """The planning processes of the service."""
    assert service.process is not None
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"PPid:\t{service.process.pid}\n" in (path / "status").read_text()
            if mine and b"penstock.planner.worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def manifests(folder: Path, body: dict[str, Any]) -> tuple[Path, Path]:
    job, cluster = folder / "job.json", folder / "cluster.json"
    job.write_text(json.dumps(body["job"]))
    cluster.write_text(json.dumps(body["cluster"]))
    return job, cluster


def test_the_command_prints_what_it_prints_without_a_service(service: Served, tmp_path: Path) -> None:
    job, cluster = manifests(tmp_path, asked_for(tiny_job(ranks=4)))
    url = str(service.client.base_url)
    there, told = service.command("plan", job, "--cluster", cluster, "--server", url)
    here, _ = service.command("plan", job, "--cluster", cluster)
    assert there == here
    assert "predicted step" in there
    as_data, _ = service.command("plan", job, "--cluster", cluster, "--server", url, "-o", "json")
    assert json.loads(as_data)["slices"]
    assert "error" not in told


def test_the_command_says_what_is_wrong(service: Served, tmp_path: Path) -> None:
    job, cluster = manifests(tmp_path, asked_for(tiny_job(memoryPerRank="1Ki")))
    url = str(service.client.base_url)
    _, told = service.command("plan", job, "--cluster", cluster, "--server", url, code=2)
    assert "spec.resources.memoryPerRank: nothing fits" in told
    assert "remedy" in told
    _, told = service.command("plan", job, "--server", url, code=2)
    assert "no fresh profile that fits the job" in told
    _, told = service.command("plan", job, "--server", url, "--run-dir", tmp_path / "run", code=2)
    assert "--run-dir uses this machine" in told


def test_who_stops_waiting_cancels(service: Served, tmp_path: Path, large: dict[str, Any]) -> None:
    job, cluster = manifests(tmp_path, large)
    url = str(service.client.base_url)
    waiting = service.command.start("plan", job, "--cluster", cluster, "--server", url)
    wait_until(lambda: planning(service) != [])
    waiting.send_signal(signal.SIGINT)
    ended(waiting, 130)
    wait_until(lambda: planning(service) == [])
    assert service.client.get("/v1/plans").json()["items"][0]["state"] == "Canceled"


@pytest.mark.long
def test_a_killed_service_plans_anew(service: Served, large: dict[str, Any]) -> None:
    request = ask(service, large)
    searching(service, request)
    (pid,) = planning(service)
    service.end(signal.SIGKILL)
    service.start()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    wait_until(lambda: request_of(service, request)["finishedAt"] is not None)
    found = request_of(service, request)
    job, cluster = PipelineJob.from_manifest(large["job"]), ClusterSpec.from_manifest(large["cluster"])
    expected = answer(PlanningRequest(spec=job.spec, cluster=cluster)).plan
    assert expected is not None
    assert (found["state"], found["planDigest"]) == ("Succeeded", expected.digest)
    assert len(found["plan"]["alternatives"]) == len(expected.alternatives) > 0


def test_a_service_that_ends_takes_its_planning_along(service: Served, large: dict[str, Any]) -> None:
    request = ask(service, large)
    searching(service, request)
    (pid,) = planning(service)
    assert service.end(signal.SIGTERM) == 0
    assert not Path(f"/proc/{pid}").exists()
    service.start()
    assert request_of(service, request)["state"] == "Working"
    canceled = service.client.delete(f"/v1/plans/{request}").json()
    assert canceled["state"] == "Canceled"
    wait_until(lambda: planning(service) == [])
