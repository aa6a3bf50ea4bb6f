"""Administration of a service's database without a token: `token` creates, lists and revokes; `database` upgrades,
backs up and restores.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add, add_family
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
    tokens = add_family(
        app, Group.SERVICE, "token", "Create, list and revoke tokens of a service.", "penstock token list"
    )
    add(tokens, Group.SERVICE, create_token, "penstock token create alice --role editor --days 90", "create")
    add(tokens, Group.SERVICE, list_tokens, "penstock token list --output json", "list")
    add(tokens, Group.SERVICE, revoke_token, "penstock token revoke 3f2a9c1e", "revoke")
    database = add_family(
        app,
        Group.SERVICE,
        "database",
        "Upgrade, back up and restore the database of a service.",
        "penstock database backup copy.gz",
    )
    add(database, Group.SERVICE, upgrade_database, "penstock database upgrade", "upgrade")
    add(database, Group.SERVICE, back_up_database, "penstock database backup copy.gz", "backup")
    add(database, Group.SERVICE, restore_database, "penstock database restore copy.gz --folder new", "restore")


def create_token(
    name: Annotated[str, typer.Argument(help="Name of the bearer.")],
    role: Annotated[RoleName, typer.Option(help="Permissions of the token.")] = RoleName.VIEWER,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Only this namespace, all by default. On a cluster, an editor's token without it only reads."
        ),
    ] = None,
    days: Annotated[float | None, typer.Option(min=0.001, help="Days until it expires; never by default.")] = None,
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Create a token, and print its secret, which cannot be shown again."""
    from penstock.api.start.administration import new_token, opened

    with opened(folder or default_folder(), database) as service:
        output.write(new_token(service, name, role.value, namespace, None if days is None else days * 86_400))


def list_tokens(folder: Folder = None, database: Database = "", form: Output = Format.TEXT) -> None:
    """List all tokens, without their secrets."""
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
        output.say(f"token {token} is revoked")


def upgrade_database(folder: Folder = None, database: Database = "") -> None:
    """Upgrade the schema to this version of penstock. Run penstock database backup before."""
    from penstock.api.start.administration import upgrade

    before, after = upgrade(folder or default_folder(), database)
    output.say(f"schema {before or 'none'} to {after}" if before != after else f"schema {after}: nothing to do")


def back_up_database(
    file: Annotated[Path, typer.Argument(help="File of the backup; keep it as secret as the database.")],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Back up the whole database, also while a service runs. Files of runs are not included."""
    from penstock.api.start.administration import back_up

    count = back_up(folder or default_folder(), database, file)
    output.say(f"wrote {count:,} rows to {file}")


def restore_database(
    file: Annotated[Path, typer.Argument(help="A file from `penstock database backup`.", exists=True, dir_okay=False)],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Fill a new or empty database, SQLite or PostgreSQL, from a backup. No service may run on it."""
    from penstock.api.start.administration import restore

    output.say(f"{restore(folder or default_folder(), database, file):,} rows restored")
