"""What serves and plans needs what the service's image has and no more: no torch, nothing that development installs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.api.schemas.bodies import EXAMPLE_CLUSTER, EXAMPLE_JOB
from penstock.core.host.ports import free_port
from tests.support.members import SERVICE, modules_beyond
from tests.support.refusing import refusing
from tests.support.repository import ROOT
from tests.support.service import job_manifest
from tests.support.serving import wait_until

BEYOND = modules_beyond(*SERVICE)
GPT3 = ["deploy/examples/gpt3-175b.yaml", "--cluster", "deploy/examples/gpt3-175b-cluster.yaml"]

pytestmark = pytest.mark.timeout(900)


@contextmanager
def served(folder: Path, refused: frozenset[str] = BEYOND) -> Iterator[httpx.Client]:
    """A service there, and somebody who may ask it anything."""
    port = free_port()
    configuration = folder / "penstock" / "service.json"
    command = [sys.executable, "-m", "penstock.cli", "serve", "--folder", str(folder / "data"), "--port", str(port)]
    with subprocess.Popen(command, env=refusing(folder, refused), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or (configuration.exists() and answers(port)))
            assert process.poll() is None, process.communicate()
            bearer = {"Authorization": f"Bearer {json.loads(configuration.read_text())['token']}"}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=bearer, trust_env=False) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_service_answers_without_torch_or_a_compiler(tmp_path: Path) -> None:
    with served(tmp_path, BEYOND | {"numba"}) as client:
        listed = client.get("/v1/jobs")
        assert (listed.status_code, listed.json()["items"]) == (200, [])


def test_a_service_plans_without_torch(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        asked = client.post("/v1/plans", json={"job": EXAMPLE_JOB, "cluster": EXAMPLE_CLUSTER})
        assert asked.status_code == 202, asked.text
        place = asked.headers["Location"]
        wait_until(lambda: client.get(place).json()["finishedAt"] is not None)
        found = client.get(place).json()
        assert found["state"] == "Succeeded", found


def test_a_job_fails_at_once_and_says_what_to_install(tmp_path: Path) -> None:
    job, place = job_manifest("local"), "/v1/jobs/default/local"
    job["spec"]["resources"] = {"ranks": 1, "memoryPerRank": "1Gi"}
    with served(tmp_path) as client:
        assert client.post("/v1/jobs", json=job).status_code == 201
        wait_until(lambda: client.get(place).json()["status"]["phase"] in ("Failed", "Recovering"))
        status = client.get(place).json()["status"]
    assert (status["phase"], status["reason"], status["attempt"], status["failures"]) == ("Failed", "UserError", 1, 0)
    assert "pip install --constraint WHEELS/penstock.txt penstock-trainer" in status["message"]


def test_the_command_plans_with_the_agent_alone(tmp_path: Path) -> None:
    environment = refusing(tmp_path, modules_beyond("penstock-cli", "penstock-agent"))
    command = [sys.executable, "-m", "penstock.cli", "plan", *GPT3, "--output", "json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_the_command_alone_says_what_it_plans_with(tmp_path: Path) -> None:
    environment = refusing(tmp_path, modules_beyond("penstock-cli"))
    command = [sys.executable, "-m", "penstock.cli", "plan", *GPT3]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "pip install --constraint WHEELS/penstock.txt penstock-agent" in done.stderr
