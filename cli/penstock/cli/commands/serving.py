"""Run a service: `serve`; and without a token, `token` and `database` administer its database."""

from __future__ import annotations

import enum
import os
import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import Group, Output, add_family, command
from penstock.cli.output import Format

app = typer.Typer()
tokens = add_family(app, Group.SERVICE, "token", "Create, list and revoke tokens of a service.", "penstock token list")
database = add_family(
    app,
    Group.SERVICE,
    "database",
    "Upgrade, back up and restore the database of a service.",
    "penstock database backup copy.gz",
)

Folder = Annotated[Path | None, typer.Option("--folder", help="Folder of the service's database and runs.")]
DATABASE, DATABASE_FILE = "PENSTOCK_DATABASE", "PENSTOCK_DATABASE_FILE"


def database_url(given: str) -> str:
    """Return the URL: ``given``, else from the file that `DATABASE_FILE` names, else from `DATABASE`; empty for SQLite.

    Every user of a machine may read a process's command line, so a password there is refused. `DATABASE` is removed
    from the environment, because the processes of jobs inherit it. Raises `UserError` for a URL that cannot be used.
    """
    from penstock.core.errors import UserError

    of_environment, file = os.environ.pop(DATABASE, ""), os.environ.get(DATABASE_FILE, "")
    try:
        parts = urlsplit(given)
    except ValueError as error:
        raise UserError(
            what=f"is not a URL: {error}", where="--database", remedy="write postgresql://HOST/NAME"
        ) from None
    if parts.password or any("password" in name.lower() for name in parse_qs(parts.query)):
        what = "contains a password, which every user of this machine could read in the list of processes"
        remedy = f"put the URL in a file that {DATABASE_FILE} names, or in {DATABASE}, and leave --database out"
        raise UserError(what=what, where="--database", remedy=remedy)
    if given or not file:
        return given or of_environment
    try:
        url = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        remedy = "set the variable to a file that contains only the URL"
        raise UserError(what=f"{file} cannot be read: {reason}", where=DATABASE_FILE, remedy=remedy) from None
    if not url:
        remedy = "write the URL into the file, or unset the variable"
        raise UserError(what=f"{file} is empty", where=DATABASE_FILE, remedy=remedy)
    return url


Database = Annotated[
    str,
    typer.Option(
        "--database",
        callback=database_url,
        help=f"postgresql://USER@HOST/NAME, else SQLite in the folder. With a password only by ${DATABASE}, or in the "
        f"file that ${DATABASE_FILE} names.",
    ),
]


def default_folder() -> Path:
    """Return the default folder for this user's data."""
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "penstock"


@command(app, Group.SERVICE, "penstock serve --port 8470 --data corpus=/data/corpus")
def serve(
    folder: Folder = None,
    database: Database = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 8470,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further host name that requests may use.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: jobs may read it as data://NAME/...")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Certificate for HTTPS, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Installed schedule that jobs may name.")] = None,
    webhook: Annotated[str, typer.Option(help="URL to notify of the end of every job.")] = "",
    webhook_secret: Annotated[Path | None, typer.Option(help="File with the secret that signs notifications.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Serve the jobs of a Kubernetes cluster, and run none on this machine.")
    ] = False,
    namespace: Annotated[str, typer.Option(help="Serve only this namespace of the cluster.")] = "",
    policy: Annotated[
        Path | None, typer.Option(help="File with the cluster's policy for jobs, from the chart's ConfigMap.")
    ] = None,
) -> None:
    """Serve jobs, on this machine or on a cluster, by HTTP. Jobs continue when the service ends."""
    from penstock.api.settings import Settings
    from penstock.api.start.server import tls_of
    from penstock.api.start.serving import read_webhook
    from penstock.api.start.serving import serve as answer
    from penstock.cli.ports import check_port
    from penstock.core.errors import UserError

    for option, is_given in (("--namespace", bool(namespace)), ("--policy", policy is not None)):
        if is_given and not cluster:
            remedy = f"add --cluster to serve a Kubernetes cluster, or leave {option} out"
            raise UserError(what="is only for a cluster", where=option, remedy=remedy)

    settings = Settings(
        folder=(folder or default_folder()).absolute(),
        database=database,
        host=host,
        port=port,
        tls=tls_of(tls_certificate, tls_key),
        data_roots=dict(map(_root, data or ())),
        schedules=frozenset(schedule or ()),
        machine="" if cluster else socket.gethostname(),
    )
    check_port(port, "--port")
    settings, notifications = settings.answering_to(host, *(allow_host or ())), read_webhook(webhook, webhook_secret)
    if cluster:
        from penstock.api.start.cluster_serving import serve_cluster

        serve_cluster(settings, namespace, policy, notifications, say=output.say)
    else:
        from penstock.agent.shipping import is_acknowledged
        from penstock.client.config import configuration_file

        configuration = configuration_file(os.environ, Path.home())
        answer(settings, notifications, configuration=configuration, acknowledged=is_acknowledged, say=output.say)


def _root(text: str) -> tuple[str, Path]:
    """Parse ``NAME=FOLDER``; the folder must exist."""
    from penstock.core.errors import UserError

    name, _, folder = text.partition("=")
    if not name or not folder or not Path(folder).is_dir():
        remedy = "write NAME=FOLDER with an existing folder, such as corpus=/data/corpus"
        raise UserError(what=f"{text!r} does not name a folder", where="--data", remedy=remedy)
    return name, Path(folder).absolute()


class RoleName(enum.StrEnum):
    """The permissions of a token."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"
    INGEST = "ingest"


@command(tokens, Group.SERVICE, "penstock token create alice --role editor --days 90", "create")
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


@command(tokens, Group.SERVICE, "penstock token list --output json", "list")
def list_tokens(folder: Folder = None, database: Database = "", form: Output = Format.TEXT) -> None:
    """List all tokens, without their secrets."""
    from penstock.api.start import administration

    with administration.opened(folder or default_folder(), database) as service:
        tokens = administration.list_tokens(service)
    table = output.table("id", "name", "role", "namespace", "state", "expires", pad_edge=False)
    for token in tokens:
        table.add_row(*(token[name] or "–" for name in ("id", "name", "role", "namespace", "state", "expiresAt")))
    output.present(form, lambda: [table], lambda: tokens)


@command(tokens, Group.SERVICE, "penstock token revoke 3f2a9c1e", "revoke")
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


@command(database, Group.SERVICE, "penstock database upgrade", "upgrade")
def upgrade_database(folder: Folder = None, database: Database = "") -> None:
    """Upgrade the schema to this version of penstock. Run penstock database backup before."""
    from penstock.api.start.administration import upgrade

    before, after = upgrade(folder or default_folder(), database)
    output.say(f"schema {before or 'none'} to {after}" if before != after else f"schema {after}: nothing to do")


@command(database, Group.SERVICE, "penstock database backup copy.gz", "backup")
def back_up_database(
    file: Annotated[Path, typer.Argument(help="File of the backup; keep it as secret as the database.")],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Back up the whole database, also while a service runs. Files of runs are not included."""
    from penstock.api.start.administration import back_up

    count = back_up(folder or default_folder(), database, file)
    output.say(f"wrote {count:,} rows to {file}")


@command(database, Group.SERVICE, "penstock database restore copy.gz --folder new", "restore")
def restore_database(
    file: Annotated[Path, typer.Argument(help="A file from `penstock database backup`.", exists=True, dir_okay=False)],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Fill a new or empty database, SQLite or PostgreSQL, from a backup. No service may run on it."""
    from penstock.api.start.administration import restore

    output.say(f"{restore(folder or default_folder(), database, file):,} rows restored")
