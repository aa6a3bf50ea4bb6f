"""How the databases are opened: what is committed survives, and nothing is waited for without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from penstock.api.service import open_service
from penstock.api.settings import Settings
from penstock.api.store.engine import make_engine, parse_url
from tests.support import postgres
from tests.support.service import client_of, make_tables


@pytest.mark.usefixtures("with_syncs")
def test_sqlite_survives_a_power_cut(tmp_path: Path) -> None:
    engine = make_engine(parse_url(f"sqlite:///{tmp_path / 'new.db'}"))
    with engine.connect() as connection:
        found = [connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("journal_mode", "synchronous")]
    engine.dispose()
    assert found == ["wal", 2]  # 2 is FULL


def test_only_a_service_s_statements_are_limited(postgres_url: str, tmp_path: Path) -> None:
    with postgres.database(postgres_url) as url:
        make_tables(url)
        service = open_service(Settings(folder=tmp_path, database=url))
        patient = make_engine(parse_url(url))
        found = []
        for engine in (service.engine, patient):
            with engine.connect() as connection:
                found.append(connection.execute(text("SHOW statement_timeout")).scalar_one())
        patient.dispose()
        service.close()
    assert found == ["30s", "0"]


def test_a_statement_that_takes_too_long_is_given_up(postgres_url: str, tmp_path: Path) -> None:
    """It is answered as a problem, and the connection is good for the next one."""
    with postgres.database(postgres_url) as url:
        make_tables(url)
        service = open_service(Settings(folder=tmp_path, database=url), statement_seconds=0.2)
        client = client_of(service)
        with service.engine.connect() as other:
            other.execute(text("LOCK TABLE jobs"))
            answer = client.get("/v1/jobs")
        assert (answer.status_code, answer.json()["detail"]) == (503, "the database exceeded its time limit")
        assert answer.json()["remedy"]
        assert client.get("/v1/jobs").status_code == 200
        service.close()
