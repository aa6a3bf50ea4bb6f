"""The schema's versions: up and down on data, equal to the tables, and refused when they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text

from penstock.api.service import open_service
from penstock.api.settings import Settings
from penstock.api.store import migrate
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import metadata
from penstock.core.errors import UserError
from tests.support.service import add_job, new_service


@pytest.fixture
def database(empty_database: str) -> str:
    return empty_database


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    made = make_engine(parse_url(database))
    yield made
    made.dispose()


def test_migrations_make_the_tables(engine: Engine) -> None:
    migrate.upgrade(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_files_of_migrations_begin_with_their_revisions() -> None:
    found = ScriptDirectory(str(migrate.FOLDER)).walk_revisions()
    assert migrate.revisions() == [each.revision for each in found][::-1]


def test_each_revision_is_a_step(engine: Engine) -> None:
    for revision in migrate.revisions():
        migrate.upgrade(engine, revision)
        assert migrate.current(engine) == revision
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_an_upgrade_of_what_is_current_changes_nothing(engine: Engine, database: str, tmp_path: Path) -> None:
    service = new_service(tmp_path, database)
    made = add_job(service)
    service.close()
    migrate.upgrade(engine)
    again = open_service(Settings(folder=tmp_path, database=database))
    assert add_job(again, "other").number == made.number + 1
    again.close()


def test_an_empty_database_is_refused_with_the_command(database: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is empty\n.*penstock database upgrade"):
        open_service(Settings(folder=tmp_path, database=database))


def test_a_newer_schema_is_refused(engine: Engine, database: str, tmp_path: Path) -> None:
    migrate.upgrade(engine)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("UPDATE alembic_version SET version_num = 'from-the-future'"))
    with pytest.raises(UserError, match="made by a newer penstock"):
        open_service(Settings(folder=tmp_path, database=database))


@pytest.mark.parametrize(
    ("url", "message"),
    [("nonsense", "no database URL|not a database URL"), ("mysql://a/b", "mysql is not supported"),
     ("sqlite://", "would lose all jobs")],
)  # fmt: skip
def test_a_bad_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_url(url)
