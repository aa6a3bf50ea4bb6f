"""Versions of the database schema: creation, upgrade, and the check when the service starts.

alembic runs the steps in `migrations/`. A service with a current schema does not import alembic, because the import
would take a quarter of its start-up time.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, column, inspect, select, table

from penstock.core.errors import UserError

FOLDER = Path(__file__).with_name("migrations")
VERSION = table("alembic_version", column("version_num"))


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Upgrade the schema to ``revision``, in one transaction; a new database gets all tables."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def current(engine: Engine) -> str | None:
    """Return the schema's revision; none in a new database."""
    with engine.connect() as connection:
        if not inspect(connection).has_table(VERSION.name):
            return None
        revision: str | None = connection.execute(select(VERSION.c.version_num)).scalar_one_or_none()
        return revision


def revisions() -> list[str]:
    """Return every revision, oldest first, from the names of their files."""
    return sorted(path.name.partition("_")[0] for path in (FOLDER / "versions").glob("[0-9]*.py"))


def require_current(engine: Engine) -> None:
    """Raise `UserError` unless the schema is the one of this version of penstock."""
    revision, known = current(engine), revisions()
    if revision == known[-1]:
        return
    place = f"database {engine.url.render_as_string(hide_password=True)}"
    if revision is not None and revision not in known:
        raise UserError(
            what=f"has schema {revision}, made by a newer penstock",
            where=place,
            remedy="upgrade penstock: pip install --upgrade penstock-cli",
        )
    raise UserError(
        what="is empty" if revision is None else f"has schema {revision}, older than {known[-1]}",
        where=place,
        remedy="run penstock database backup, then penstock database upgrade",
    )
