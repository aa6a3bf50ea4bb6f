"""Backups: what is restored is what was there, in either kind of database, and nothing half."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from penstock.api.service import Service
from penstock.api.store import backup, jobs
from penstock.api.store.schema import metadata
from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase
from tests.support import postgres
from tests.support.filled_job import enter, running_job
from tests.support.service import Clock, add_job, client_of, new_service


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    """An empty service to restore into."""
    if request.param == "sqlite":
        (tmp_path / "target").mkdir()
        made = new_service(tmp_path / "target", clock=clock)
        yield made
        made.close()
        return
    server, tables = (request.getfixturevalue(name) for name in ("postgres_url", "postgres_tables"))
    with postgres.database(server, like=tables) as url:
        made = new_service(tmp_path, url, clock)
        yield made
        made.close()


def everything(service: Service) -> dict[str, list[Any]]:
    """The rows of every table, in an order of their own."""
    found = {}
    for table in metadata.sorted_tables:
        rows = service.read(lambda c, table=table: c.execute(select(table)).all())  # type: ignore[misc]
        found[table.name] = sorted(map(tuple, rows), key=repr)
    return found


def backed_up(service: Service, folder: Path) -> Path:
    path = folder / "backup.gz"
    with path.open("wb") as file:
        backup.back_up(service.engine, file)
    return path


def test_what_is_restored_is_what_was_there(service: Service, target: Service, tmp_path: Path) -> None:
    running_job(service)
    client_of(service).post("/v1/login-links", headers={"Idempotency-Key": "k"})
    service.write("audit", lambda connection: None)  # what was to be written down by now is
    before = everything(service)
    count = backup.restore(target.engine, backed_up(service, tmp_path))
    assert everything(target) == before
    assert count == sum(map(len, before.values())) > 50


def test_a_restored_service_goes_on(service: Service, target: Service, tmp_path: Path) -> None:
    first = running_job(service)
    backup.restore(target.engine, backed_up(service, tmp_path))
    enter(target, first.uid, Phase.SUCCEEDED)
    second = add_job(target, "second")
    assert second.number > first.number
    assert [each.name for each in target.read(lambda connection: jobs.unfinished(connection, "here"))] == [
        "tiny",
        "second",
    ]


def test_a_database_that_is_in_use_is_left_alone(service: Service, target: Service, tmp_path: Path) -> None:
    path = backed_up(service, tmp_path)
    add_job(target, "mine")
    with pytest.raises(UserError, match="is not empty: jobs has rows"):
        backup.restore(target.engine, path)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_copy_that_was_cut_short_restores_nothing(
    service: Service, target: Service, tmp_path: Path, cut: int
) -> None:
    running_job(service)
    whole = gzip.decompress(backed_up(service, tmp_path).read_bytes()).splitlines(keepends=True)
    short = tmp_path / "short.gz"
    short.write_bytes(gzip.compress(b"".join(whole[:-cut])))
    with pytest.raises(UserError, match="is not a complete backup: its last line is missing"):
        backup.restore(target.engine, short)
    assert not any(everything(target).values())


def broken(path: Path) -> list[bytes]:
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    fewer = [*lines[:-1], json.dumps({"rows": 1}).encode() + b"\n"]
    return [
        path.read_bytes()[:-20],
        b"hello",
        gzip.compress(b"hello\n"),
        gzip.compress(b""),
        gzip.compress(b"".join(fewer)),
    ]


def test_what_is_no_backup_is_refused(service: Service, target: Service, tmp_path: Path) -> None:
    add_job(service)
    for content in broken(backed_up(service, tmp_path)):
        path = tmp_path / "broken"
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a complete backup") as refusal:
            backup.restore(target.engine, path)
        assert "penstock database backup" in refusal.value.remedy
        assert not any(everything(target).values())


def test_a_copy_of_another_schema_is_refused(target: Service, tmp_path: Path) -> None:
    path = tmp_path / "old.gz"
    path.write_bytes(gzip.compress(json.dumps({"schema": "0000_old"}).encode() + b"\n"))
    with pytest.raises(UserError, match="has schema 0000_old"):
        backup.restore(target.engine, path)
