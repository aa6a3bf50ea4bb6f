"""Every test of the store runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.api.service import Service
from penstock.api.store import engine
from tests.support import postgres
from tests.support.service import Clock, make_tables, new_service

KINDS = ("sqlite", "postgresql")

PRAGMAS = engine.SQLITE_PRAGMAS


@pytest.fixture(autouse=True, scope="session")
def without_syncs() -> Iterator[None]:
    """What these tests are about survives no power cut anyway, and waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        quick = tuple(each.replace("synchronous = FULL", "synchronous = OFF") for each in PRAGMAS)
        patch.setattr(engine, "SQLITE_PRAGMAS", quick)
        yield


@pytest.fixture
def with_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite as a service opens it."""
    monkeypatch.setattr(engine, "SQLITE_PRAGMAS", PRAGMAS)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_tables(postgres_url: str) -> Iterator[str]:
    """A database with all tables and nothing in them: copying it is quicker than making them."""
    with postgres.database(postgres_url) as url:
        make_tables(url)
        yield url


@pytest.fixture(params=KINDS)
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'penstock.db'}"
        return
    with postgres.database(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database for `new_service`, which has its tables already where making them takes long."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'penstock.db'}"
        return
    server, tables = (request.getfixturevalue(name) for name in ("postgres_url", "postgres_tables"))
    with postgres.database(server, like=tables) as url:
        yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(database: str, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, database, clock)
    yield made
    made.close()
