"""The schema's versions: made, upgraded, and checked at the start. The steps are alembic's, in `migrations/`.

A service that finds its schema current does without alembic, which takes a quarter of its start to load.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, column, inspect, select, table

from penstock.core.errors import UserError

FOLDER = Path(__file__).with_name("migrations")
VERSION = table("alembic_version", column("version_num"))


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema up to ``revision``, in one transaction; a new database is made from nothing."""
    _migrate("upgrade", engine, revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Take the schema back to ``revision``."""
    _migrate("downgrade", engine, revision)


def _migrate(direction: str, engine: Engine, revision: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)


def current(engine: Engine) -> str | None:
    """The schema's revision; none in a new database."""
    with engine.connect() as connection:
        if not inspect(connection).has_table(VERSION.name):
            return None
        revision: str | None = connection.execute(select(VERSION.c.version_num)).scalar_one_or_none()
        return revision


def revisions() -> list[str]:
    """Every revision there is, oldest first: their files begin with them."""
    return sorted(path.name.partition("_")[0] for path in (FOLDER / "versions").glob("[0-9]*.py"))


def require_current(engine: Engine) -> None:
    """Raise `UserError` unless the schema is the one that this version of penstock works with."""
    revision, known = current(engine), revisions()
    if revision == known[-1]:
        return
    place = f"database {engine.url.render_as_string(hide_password=True)}"
    if revision is not None and revision not in known:
        remedy = "use the version of penstock that made it, or a newer one"
        raise UserError(what=f"has schema {revision}, made by a newer penstock", where=place, remedy=remedy)
    what = "is empty" if revision is None else f"has schema {revision}, older than {known[-1]}"
    raise UserError(what=what, where=place, remedy="run: penstock database upgrade (back it up before)")
