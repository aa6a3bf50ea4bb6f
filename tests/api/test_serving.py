"""What `penstock serve` finds again at its next start, what it leaves for attempts, and that there is one of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service
from penstock.api.settings import Settings
from penstock.api.start.cluster_serving import FolderWait
from penstock.api.start.service_files import address_file, executor_name, ingest_token
from penstock.api.start.serving import service_folder
from penstock.api.store import tokens
from penstock.cli.main import main
from penstock.core.host.locks import alone
from penstock.core.host.ports import free_port
from penstock.core.host.stopping import StopRequestedError, listening
from penstock.core.serialization.manifest_files import read
from penstock.core.supervision import Address
from tests.support.certificates import certificate
from tests.support.service import Clock, new_service


def test_an_executor_keeps_its_name_when_machine_and_folder_are_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    settings = Settings(folder=tmp_path / "a", machine="first")
    name = executor_name(settings)
    assert name == f"first:{tmp_path / 'a'}"
    moved = (tmp_path / "a").rename(tmp_path / "b")
    assert executor_name(replace(settings, folder=moved, machine="second")) == name


def test_folders_have_executors_of_their_own(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    names = {executor_name(Settings(folder=tmp_path / name, machine="first")) for name in "ab"}
    assert len(names) == 2


# Where attempts report to


def test_attempts_are_told_where_it_answers_now(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    settings = Settings(folder=tmp_path)
    assert read(address_file(settings), Address) == Address(server="http://127.0.0.1:8470")
    moved = address_file(replace(settings, host="localhost", port=9000, tls=tls))
    assert read(moved, Address) == Address(server="https://localhost:9000", ca_file=str(tls.certificate))


# What attempts report with


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def opens(service: Service, path: Path) -> bool:
    """Whether an attempt may report with what lies there."""
    secret = path.read_text().strip()
    found = service.read(lambda c: tokens.by_secret(c, secret))
    return found is not None and found.valid(service.clock()) and found.role is Role.INGEST


def test_a_token_that_opens_is_kept(service: Service) -> None:
    path = ingest_token(service)
    secret = path.read_text()
    assert opens(service, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ingest_token(service).read_text() == secret
    assert len(service.read(tokens.every)) == 1


def test_another_database_in_the_same_folder_gets_a_token_of_its_own(service: Service, tmp_path: Path) -> None:
    secret = ingest_token(service).read_text()
    other = new_service(tmp_path, f"sqlite:///{tmp_path / 'other.db'}")
    assert opens(other, ingest_token(other))
    assert ingest_token(other).read_text() != secret
    other.close()


def test_a_revoked_token_is_followed_by_another(service: Service) -> None:
    path = ingest_token(service)
    (first,) = service.read(tokens.every)
    service.write("tokens", lambda c: tokens.revoke(c, first.id, service.clock()))
    assert not opens(service, path)
    assert opens(service, ingest_token(service))


@pytest.mark.parametrize("role", [Role.INGEST, Role.ADMIN])
def test_a_token_that_expired_or_is_for_other_things_is_followed_by_another(
    service: Service, clock: Clock, tmp_path: Path, role: Role
) -> None:
    bearer = Identity(name="somebody", role=role)
    _, secret = service.write("tokens", lambda c: tokens.add(c, bearer, clock(), lifetime_seconds=10.0))
    (tmp_path / "ingest-token").write_text(secret)
    clock.now += 10.0 if role is Role.INGEST else 0.0
    assert opens(service, ingest_token(service))


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff", b"nonsense"])
def test_what_is_no_token_is_replaced(service: Service, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ingest-token").write_bytes(content)
    assert opens(service, ingest_token(service))


# One service of a folder


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a service says that cannot be there."""
    port = free_port()
    assert main(["serve", "--folder", str(folder), "--port", str(port)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_in_use_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(tmp_path / ".lock", "", ""):
        told = refused(tmp_path, capsys)
    assert f"is in use by process {os.getpid()}" in told
    assert "--folder" in told
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lock_of_the_machine_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    told = refused(tmp_path / "data", capsys)
    assert "cannot be written" in told
    assert "XDG_STATE_HOME" in told


# Who may read it


def test_what_a_service_writes_is_its_user_s_alone(tmp_path: Path) -> None:
    """Also in a folder that was there before, open to others; and what it starts writes alike."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        with service_folder(Settings(folder=folder)):
            (folder / "runs").mkdir()
            (folder / "penstock.db").touch()
            subprocess.run(["sh", "-c", "mkdir checkpoints; : > checkpoints/part"], cwd=folder / "runs", check=True)
        (tmp_path / "later").touch()
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "data": 0o700,
        "data/.lock": 0o600,
        "data/runs": 0o700,
        "data/penstock.db": 0o600,
        "data/runs/checkpoints": 0o700,
        "data/runs/checkpoints/part": 0o600,
        "later": 0o644,
    }


# Waiting for it, on a cluster


def test_a_service_in_a_pod_waits_for_the_folder_that_another_pod_holds(tmp_path: Path) -> None:
    """Its node may be dead, and the lock stand; an error would be followed by pauses of up to five minutes."""
    pauses: list[float] = []
    said: list[str] = []
    with ExitStack() as other:
        other.enter_context(service_folder(Settings(folder=tmp_path), name="the-pod-before"))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 90:
                other.close()

        with listening() as requests:
            waiting = FolderWait(requests, said.append, pause)
            with service_folder(Settings(folder=tmp_path), waiting, "this"):
                assert (tmp_path / ".lock").read_text() == f"{os.getpid()} on this"
    assert len(pauses) == 90
    assert len(said) == 2, "once a minute"
    assert f"service folder {tmp_path} is in use by process {os.getpid()} on the-pod-before; waiting" in said[0]


def test_a_service_that_waits_for_its_folder_ends_when_it_is_asked(tmp_path: Path) -> None:
    def pause(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with service_folder(Settings(folder=tmp_path)), listening() as requests:
        waiting = service_folder(Settings(folder=tmp_path), FolderWait(requests, print, pause))
        with pytest.raises(StopRequestedError), waiting:
            pass
