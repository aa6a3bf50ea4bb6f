"""`penstock serve --cluster` as a process: on a cluster that is there, and on none."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.settings import Settings
from penstock.cli.cluster_serving import place_of
from penstock.cli.main import main
from tests.support.command import Command
from tests.support.fake_apiserver import FakeApiserver, served
from tests.support.load_service import free_ports
from tests.support.on_cluster import instant
from tests.support.service import NOW, job_manifest, step_records
from tests.support.serving import wait_until

LEASE = ("leases", "own", "penstock-service")
JOB = "default/tiny"


@pytest.fixture
def fake() -> FakeApiserver:
    made = FakeApiserver()
    made.tokens["a.token.eve"] = {"audiences": ["penstock"], "user": {"username": "eve"}}
    made.rights |= {("eve", "get", "default")}
    return made


@pytest.fixture
def kubeconfig(tmp_path: Path, fake: FakeApiserver) -> Iterator[Path]:
    with served(fake) as client:
        path = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": client.configuration.host}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": "secret"}}
        document = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "c"}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **document}))
        yield path


def test_it_mirrors_reports_and_hands_over_at_its_end(tmp_path: Path, fake: FakeApiserver, kubeconfig: Path) -> None:
    """Without a machine's executor, a token file, or anything else that a machine needs."""
    (port,) = free_ports(1)
    environment = {"KUBECONFIG": str(kubeconfig), "PENSTOCK_OWN_NAMESPACE": "own", "HOME": str(tmp_path)}
    command = Command(tmp_path, environment)
    process = command.start("serve", "--cluster", "--folder", tmp_path / "data", "--port", str(port))
    try:
        job = fake.add_job(job_manifest())
        fake.add_rank(job, 1, "a.pod.token")
        wait_until(lambda: fake.objects.get(LEASE) is not None and answers(port), 60)
        fake.touch(job, phase="Running", reason="Bound", phaseEnteredAt=instant(NOW), attempt=1)
        wait_until(lambda: asked(port, "GET", f"/v1/jobs/{JOB}").json()["status"]["phase"] == "Running", 20)
        records = {"records": [each.to_manifest() for each in step_records(job["metadata"]["uid"], range(3))]}
        assert asked(port, "POST", "/v1/ingest", token="a.pod.token", json=records).status_code == 200
        wait_until(lambda: job["status"].get("progress", {}).get("step") == 3, 20)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM), (out, err)
    assert fake.objects[LEASE]["spec"]["holderIdentity"] == ""
    assert not (tmp_path / "config" / "penstock" / "service.json").exists()
    assert not (tmp_path / "data" / "executor").exists()


def asked(port: int, method: str, path: str, token: str = "a.token.eve", **more: Any) -> httpx.Response:
    """What the service answers."""
    bearer = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=bearer, trust_env=False, **more)


def answers(port: int) -> bool:
    """Whether the job can be read."""
    try:
        return asked(port, "GET", f"/v1/jobs/{JOB}").status_code == 200
    except httpx.TransportError:
        return False


def test_without_a_cluster_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["serve", "--cluster", "--folder", str(tmp_path / "data")]) == 2
    assert "name a file that kubectl can use in KUBECONFIG" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_told(
    tmp_path: Path,
    fake: FakeApiserver,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.objects.clear()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert main(["serve", "--cluster", "--folder", str(tmp_path / "data")]) == 2
    assert "may get the namespace kube-system" in capsys.readouterr().err


def test_a_namespace_alone_means_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--namespace", "a", "--folder", str(tmp_path / "data")]) == 2
    assert "add --cluster" in capsys.readouterr().err


def test_replicas_bear_names_of_their_own(tmp_path: Path) -> None:
    first, second = (place_of(Settings(folder=tmp_path / name), "", {}) for name in "ab")
    assert first.name != second.name
    assert (first.own_namespace, first.namespace) == ("penstock-system", "")
    assert place_of(Settings(folder=tmp_path), "a", {"PENSTOCK_OWN_NAMESPACE": "own"}).own_namespace == "own"
