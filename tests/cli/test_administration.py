"""`penstock token` and `penstock database`: on the database itself, without a service."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service
from penstock.api.store import migrate, tokens
from penstock.api.store.engine import make_engine, parse_url
from penstock.cli.main import main
from tests.support.service import new_service


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a service that does not run."""
    new_service(tmp_path).close()
    return tmp_path


def bearer(folder: Path, secret: str) -> Identity | None:
    service: Service = new_service(folder)
    found = service.read(lambda connection: tokens.by_secret(connection, secret))
    service.close()
    return found.identity if found is not None and found.valid(service.clock()) else None


def test_a_token_is_made_listed_and_revoked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["token", "create", "ci", "--role", "editor", "--namespace", "team", "--folder", str(folder)]
    assert main(arguments) == 0
    secret = capsys.readouterr().out.strip()
    assert bearer(folder, secret) == Identity(name="ci", role=Role.EDITOR, namespace="team")
    assert main(["token", "list", "--folder", str(folder), "-o", "json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["state"], listed["expiresAt"]) == ("ci", "valid", None)
    assert main(["token", "revoke", listed["id"], "--folder", str(folder)]) == 0
    assert bearer(folder, secret) is None
    assert main(["token", "list", "--folder", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "revoked" in told
    assert secret not in told


def test_a_token_may_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "create", "ci", "--days", "2", "--folder", str(folder)]) == 0
    capsys.readouterr()
    assert main(["token", "list", "--folder", str(folder), "-o", "json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["expiresAt"] > listed["createdAt"]


def test_an_unknown_token_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "revoke", "none", "--folder", str(folder)]) == 2
    assert "none: is not the id of a token" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["token", "list"], ["database", "upgrade"]], ids=" ".join)
def test_a_folder_without_a_service_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--folder", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "is not a database of a service" in told
    assert "penstock serve" in told
    assert list(tmp_path.iterdir()) == []


def test_an_old_schema_is_upgraded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path
    engine = make_engine(parse_url(f"sqlite:///{folder / 'penstock.db'}"))
    migrate.upgrade(engine, migrate.revisions()[0])
    engine.dispose()
    assert main(["token", "list", "--folder", str(folder)]) == 2
    assert "penstock database upgrade" in capsys.readouterr().err
    assert main(["database", "upgrade", "--folder", str(folder)]) == 0
    assert main(["database", "upgrade", "--folder", str(folder)]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(["token", "list", "--folder", str(folder)]) == 0


def test_a_database_is_copied_and_restored(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "create", "ci", "--folder", str(folder)]) == 0
    secret = capsys.readouterr().out.strip()
    copy, elsewhere = folder / "copy.gz", tmp_path_factory.mktemp("elsewhere") / "new"
    assert main(["database", "backup", str(copy), "--folder", str(folder)]) == 0
    assert copy.stat().st_mode & 0o777 == 0o600
    assert main(["database", "restore", str(copy), "--folder", str(elsewhere)]) == 0
    assert "1 rows restored" in capsys.readouterr().err
    assert bearer(elsewhere, secret) == Identity(name="ci", role=Role.VIEWER)
    assert main(["database", "restore", str(copy), "--folder", str(elsewhere)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_copy_that_cannot_be_written_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["database", "backup", str(folder / "none" / "copy.gz"), "--folder", str(folder)]) == 2
    assert "cannot be written" in capsys.readouterr().err


class TestPasswords:
    """Every user of a machine may read what a process was started with (`/proc/PID/cmdline`)."""

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://penstock:secret@127.0.0.1/penstock",
            "postgresql://penstock@127.0.0.1/penstock?password=secret",
            "postgresql+psycopg://penstock:secret@/penstock?host=/run",
            "postgresql://penstock@127.0.0.1/penstock?sslpassword=secret",
        ],
    )
    @pytest.mark.parametrize("command", [("serve",), ("token", "list"), ("database", "upgrade")])
    def test_none_stands_in_a_command_line(
        self, folder: Path, capsys: pytest.CaptureFixture[str], url: str, command: tuple[str, ...]
    ) -> None:
        assert main([*command, "--folder", str(folder), "--database", url]) == 2
        told = capsys.readouterr().err
        assert "--database: contains a password" in told
        assert "PENSTOCK_DATABASE_FILE" in told
        assert "secret@" not in told

    def test_the_environment_may_hold_one_and_no_child_inherits_it(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PENSTOCK_DATABASE", "mysql://penstock:secret@127.0.0.1/penstock")
        assert main(["token", "list", "--folder", str(folder)]) == 2
        assert "mysql is not supported" in capsys.readouterr().err
        assert "PENSTOCK_DATABASE" not in os.environ

    def test_so_may_a_file(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "url"
        file.write_text(f"sqlite:///{folder / 'penstock.db'}\n")
        monkeypatch.setenv("PENSTOCK_DATABASE_FILE", str(file))
        assert main(["token", "list", "--folder", "/nowhere"]) == 0
        file.unlink()
        assert main(["token", "list", "--folder", str(folder)]) == 2
        assert "PENSTOCK_DATABASE_FILE" in capsys.readouterr().err
