"""The schema's versions: made, upgraded, and checked at the start. The steps are alembic's, in `migrations/`."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from penstock.core.errors import UserError

FOLDER = Path(__file__).with_name("migrations")


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema up to ``revision``, in one transaction; a new database is made from nothing."""
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        command.upgrade(_config(connection), revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Take the schema back to ``revision``."""
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        command.downgrade(_config(connection), revision)


def current(engine: Engine) -> str | None:
    """The schema's revision; none in a new database."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def revisions() -> list[str]:
    """Every revision there is, oldest first."""
    script = ScriptDirectory.from_config(_config())
    return [found.revision for found in script.walk_revisions()][::-1]


def require_current(engine: Engine) -> None:
    """Raise `UserError` unless the schema is the one that this version of penstock works with."""
    found, known = current(engine), revisions()
    if found == known[-1]:
        return
    place = f"database {engine.url.render_as_string(hide_password=True)}"
    if found is not None and found not in known:
        remedy = "use the version of penstock that made it, or a newer one"
        raise UserError(what=f"has schema {found}, made by a newer penstock", where=place, remedy=remedy)
    what = "is empty" if found is None else f"has schema {found}, older than {known[-1]}"
    raise UserError(what=what, where=place, remedy="run: penstock database upgrade (back it up before)")


def _config(connection: object = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    config.attributes["connection"] = connection
    return config
