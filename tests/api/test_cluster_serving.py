"""`penstock serve --cluster` as a process: on a cluster that is there, and on none."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.agent.record_upload import HttpPost
from penstock.agent.shipping import Shipper
from penstock.api.auth.identity import Identity, Role
from penstock.api.settings import Settings
from penstock.api.start.cluster_serving import service_instance
from penstock.api.store import tokens
from penstock.cli.main import main
from penstock.core.host.ports import free_port
from penstock.core.records import RecordKind
from penstock.core.run.outbox import Outbox
from tests.support.command import Command
from tests.support.fake_apiserver import FakeApiserver, Found, kubeconfig_of, served
from tests.support.on_cluster import instant
from tests.support.outboxes import address_file
from tests.support.sample_run import sample_profile
from tests.support.service import NOW, job_manifest, new_service, step_records
from tests.support.serving import wait_until

LEASE = ("leases", "own", "penstock-service")
JOB, POD = "default/tiny", "a.pod.token"


@pytest.fixture
def fake() -> FakeApiserver:
    made = FakeApiserver()
    made.tokens["a.token.eve"] = {"audiences": ["penstock"], "user": {"username": "eve"}}
    made.rights |= {("eve", "get", "default"), ("eve", "list", "default")}
    return made


@pytest.fixture
def kubeconfig(tmp_path: Path, fake: FakeApiserver) -> Iterator[Path]:
    with served(fake) as client:
        yield kubeconfig_of(client, tmp_path)


def test_it_mirrors_reports_and_hands_over_at_its_end(tmp_path: Path, fake: FakeApiserver, kubeconfig: Path) -> None:
    """Without a machine's executor, a token file, or anything else that a machine needs."""
    port = free_port()
    job = running_job(fake)
    with serving(tmp_path, kubeconfig, port) as process:
        wait_until(lambda: fake.objects.get(LEASE) is not None and answers(port), 60)
        fake.touch(job, reason="Resumed", phaseEnteredAt=instant(NOW + 1))
        wait_until(lambda: request(port, "GET", f"/v1/jobs/{JOB}").json()["status"]["reason"] == "Resumed", 20)
        records = {"records": [each.to_manifest() for each in step_records(job["metadata"]["uid"], range(3))]}
        assert request(port, "POST", "/v1/ingest", token=POD, json=records).status_code == 200
        wait_until(lambda: step_of(job) == 3, 20)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert fake.objects[LEASE]["spec"]["holderIdentity"] == ""
    assert not (tmp_path / "config" / "penstock" / "service.json").exists()
    assert not (tmp_path / "data" / "executor").exists()


def test_what_ranks_report_while_it_is_away_is_caught_up(tmp_path: Path, fake: FakeApiserver, kubeconfig: Path) -> None:
    """It is killed; meanwhile an attempt measures and takes steps, and deletes are missed."""
    port = free_port()
    job, gone = running_job(fake), fake.add_job(job_manifest("gone"))
    (tmp_path / "token").write_text(POD)
    (tmp_path / "outbox").mkdir()
    address = address_file(tmp_path / "address.json", f"http://127.0.0.1:{port}")
    box = Outbox(tmp_path / "outbox", uid=job["metadata"]["uid"], attempt=1, source="rank-0", clock=time.time)
    with closing(HttpPost(address, tmp_path / "token")) as post:
        shipper = Shipper(tmp_path / "outbox", post, print)
        with serving(tmp_path, kubeconfig, port) as process:
            wait_until(lambda: answers(port) and answers(port, "default/gone"), 60)
            put_steps(box, job, range(3))
            assert shipper.ship()
            wait_until(lambda: step_of(job) == 3, 20)
            process.kill()
            process.communicate(timeout=60)
        fake.remove(gone)
        box.put(RecordKind.PROFILE, profile=sample_profile())
        put_steps(box, job, range(3, 6))
        assert not shipper.ship()
        with serving(tmp_path, kubeconfig, port):
            wait_until(shipper.ship, 60)
            wait_until(lambda: step_of(job) == 6, 30)
            wait_until(lambda: not request(port, "GET", "/v1/jobs?namespace=default&name=gone").json()["items"], 20)
    box.close()
    assert job["status"]["progress"]["profileRef"] == "tiny-profile-a1"
    assert ("configmaps", "default", "tiny-profile-a1") in fake.objects


def test_its_policy_and_editors_without_a_namespace(tmp_path: Path, fake: FakeApiserver, kubeconfig: Path) -> None:
    """The file says what jobs may use; who holds a token that lost something by it is named at the start."""
    port, policy = free_port(), tmp_path / "policy.json"
    policy.write_text('{"ownNamespace": "own", "everywhere": {"images": ["own:1"]}}')
    fake.rights.add(("eve", "create", "default"))
    (tmp_path / "data").mkdir()
    with closing(new_service(tmp_path / "data")) as before:
        wide = Identity(name="wide", role=Role.EDITOR)
        before.write("tokens", lambda connection: tokens.add(connection, wide, before.clock()))
    running_job(fake)
    with serving(tmp_path, kubeconfig, port, "--policy", str(policy)) as process:
        wait_until(lambda: answers(port), 60)
        for image, status in (("own:1", 201), ("evil:1", 403)):
            manifest = job_manifest(image.partition(":")[0])
            manifest["spec"]["kubernetes"] = {"image": image}
            assert request(port, "POST", "/v1/jobs", json=manifest).status_code == status
        process.send_signal(signal.SIGTERM)
        said, complaints = process.communicate(timeout=60)
    assert "token wide (" in said + complaints


@contextmanager
def serving(folder: Path, kubeconfig: Path, port: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A service, which is ended with the block."""
    environment = {"KUBECONFIG": str(kubeconfig), "PENSTOCK_OWN_NAMESPACE": "own", "HOME": str(folder)}
    command = Command(folder, environment)
    process = command.start("serve", "--cluster", "--folder", folder / "data", "--port", str(port), *more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def running_job(fake: FakeApiserver) -> Found:
    """A job whose first attempt runs, and its pod."""
    job = fake.add_job(job_manifest(), phase="Running", reason="Bound", phaseEnteredAt=instant(NOW), attempt=1)
    fake.add_rank(job, 1, POD)
    return job


def step_of(job: Found) -> int:
    """As the cluster was told."""
    return int(job["status"].get("progress", {}).get("step", 0))


def put_steps(box: Outbox, job: Found, steps: range) -> None:
    """Metrics of these steps, as a rank writes them."""
    for record in step_records(job["metadata"]["uid"], steps):
        if record.metrics is not None:
            box.put(RecordKind.METRICS, metrics=record.metrics)


def request(port: int, method: str, path: str, token: str = "a.token.eve", **more: Any) -> httpx.Response:
    """What the service answers."""
    bearer = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=bearer, trust_env=False, **more)


def answers(port: int, job: str = JOB) -> bool:
    """Whether the job can be read."""
    try:
        return request(port, "GET", f"/v1/jobs/{job}").status_code == 200
    except httpx.TransportError:
        return False


def test_without_a_cluster_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["serve", "--cluster", "--folder", str(tmp_path / "data")]) == 2
    assert "set KUBECONFIG to a file" in capsys.readouterr().err


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
    assert "kubectl get namespace kube-system" in capsys.readouterr().err


def test_a_namespace_alone_means_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--namespace", "a", "--folder", str(tmp_path / "data")]) == 2
    assert "add --cluster" in capsys.readouterr().err


def test_replicas_bear_names_of_their_own(tmp_path: Path) -> None:
    first, second = (service_instance(Settings(folder=tmp_path / name), "", {}) for name in "ab")
    assert first.name != second.name
    assert (first.own_namespace, first.namespace) == ("penstock-system", "")
    assert service_instance(Settings(folder=tmp_path), "a", {"PENSTOCK_OWN_NAMESPACE": "own"}).own_namespace == "own"
