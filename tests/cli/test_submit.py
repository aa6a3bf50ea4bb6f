"""`penstock submit --dry-run` with a real service, and where none is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.cli.main import main
from tests.support.listening import answering, bearer
from tests.support.service import job_manifest, new_service

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("PENSTOCK_SERVER", "PENSTOCK_TOKEN", "PENSTOCK_CA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """One that is known."""
    made = new_service(tmp_path)
    with answering(made) as url:
        monkeypatch.setenv("PENSTOCK_SERVER", url)
        monkeypatch.setenv("PENSTOCK_TOKEN", bearer(made, Role.EDITOR)["Authorization"].partition(" ")[2])
        yield made
    made.close()


def write(folder: Path, **data: Any) -> str:
    manifest = job_manifest()
    manifest["spec"]["data"] |= data
    path = folder / "job.json"
    path.write_text(json.dumps(manifest))
    return str(path)


def test_the_service_says_whether_it_would_take_it(service: Service, tmp_path: Path, capsys: Captured) -> None:
    assert main(["submit", write(tmp_path), "--dry-run"]) == 0
    assert "the service accepts it" in capsys.readouterr().err
    assert main(["submit", write(tmp_path), "--dry-run", "-o", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["metadata"]["name"], told["status"]["phase"]) == ("tiny", "Pending")
    assert service.read(lambda c: jobs.page(c, jobs.Query(deleted=True)))[0] == []


@pytest.mark.usefixtures("service")
def test_what_the_service_would_refuse_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert main(["submit", write(tmp_path, source="data://none/text"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "spec.data.source" in said
    assert "--data NAME=FOLDER" in said


def test_where_no_service_is_known_the_manifest_alone_is_looked_at(tmp_path: Path, capsys: Captured) -> None:
    assert main(["submit", write(tmp_path, source="data://none/text"), "--dry-run"]) == 0
    assert "no service has checked it, because none is configured" in capsys.readouterr().err
    assert main(["submit", write(tmp_path, source=7), "--dry-run"]) == 2
    assert "spec.data.source" in capsys.readouterr().err


def test_one_that_is_known_and_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with closing(new_service(tmp_path)) as ended, answering(ended) as url:
        pass
    monkeypatch.setenv("PENSTOCK_TOKEN", "x")
    monkeypatch.setattr("penstock.client.calls.MOST_TRIES", 1)
    assert main(["submit", write(tmp_path), "--dry-run", "--server", url]) == 2
    assert "cannot be reached" in capsys.readouterr().err
