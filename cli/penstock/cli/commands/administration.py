"""Work on a service's database itself: `token` makes, lists and revokes; `database` upgrades, copies and
restores. No token is needed.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import Output
from penstock.cli.commands.serving import Database, Folder, default_folder
from penstock.cli.output import Format


class RoleName(enum.StrEnum):
    """The permissions of a token."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"
    INGEST = "ingest"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    tokens = typer.Typer(no_args_is_help=True, help="Tokens of a service, on its database.")
    tokens.command("create")(create_token)
    tokens.command("list")(list_tokens)
    tokens.command("revoke")(revoke_token)
    app.add_typer(tokens, name="token")
    database = typer.Typer(no_args_is_help=True, help="The database of a service.")
    database.command("upgrade")(upgrade_database)
    database.command("backup")(back_up_database)
    database.command("restore")(restore_database)
    app.add_typer(database, name="database")


def create_token(
    name: Annotated[str, typer.Argument(help="The name of its bearer.")],
    role: Annotated[RoleName, typer.Option(help="Its permissions.")] = RoleName.VIEWER,
    namespace: Annotated[
        str | None,
        typer.Option(help="Only this namespace. Without it, all; an editor's token then only reads on a cluster."),
    ] = None,
    days: Annotated[float | None, typer.Option(min=0.001, help="Days until it expires; never if left out.")] = None,
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Make a token, and print its secret, which cannot be shown again."""
    from penstock.api.start.administration import new_token, opened

    with opened(folder or default_folder(), database) as service:
        output.write(new_token(service, name, role.value, namespace, None if days is None else days * 86_400))


def list_tokens(folder: Folder = None, database: Database = "", form: Output = Format.TEXT) -> None:
    """Show every token, without its secret."""
    from penstock.api.start import administration

    with administration.opened(folder or default_folder(), database) as service:
        tokens = administration.list_tokens(service)
    if form is not Format.TEXT:
        output.write_data(tokens, form)
        return
    from rich.table import Table

    table = Table("id", "name", "role", "namespace", "state", "expires", box=None, pad_edge=False)
    for token in tokens:
        table.add_row(*(token[name] or "–" for name in ("id", "name", "role", "namespace", "state", "expiresAt")))
    output.show(table)


def revoke_token(
    token: Annotated[str, typer.Argument(help="The token's id, as `penstock token list` shows it.")],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Revoke a token."""
    from penstock.api.start.administration import close_token, opened

    with opened(folder or default_folder(), database) as service:
        close_token(service, token)
        output.say(f"{token} is revoked")


def upgrade_database(folder: Folder = None, database: Database = "") -> None:
    """Upgrade the schema to this version of penstock; back the database up before."""
    from penstock.api.start.administration import upgrade

    before, after = upgrade(folder or default_folder(), database)
    output.say(f"schema {before or 'none'} to {after}" if before != after else f"schema {after}: nothing to do")


def back_up_database(
    file: Annotated[Path, typer.Argument(help="The file of the copy; keep it as secret as the database.")],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Copy the whole database, also while a service runs. Files of runs are not in it."""
    from penstock.api.start.administration import back_up

    count = back_up(folder or default_folder(), database, file)
    output.say(f"{count:,} rows in {file}")


def restore_database(
    file: Annotated[Path, typer.Argument(help="A file from `penstock database backup`.", exists=True, dir_okay=False)],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Fill a new or empty database, of either kind, from a copy. No service may run on it."""
    from penstock.api.start.administration import restore

    output.say(f"{restore(folder or default_folder(), database, file):,} rows restored")
