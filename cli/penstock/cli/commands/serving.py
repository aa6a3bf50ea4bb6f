"""`penstock serve`, and the options that the other commands of a service share."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add

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


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add(app, Group.SERVICE, serve, "penstock serve --port 8470 --data corpus=/data/corpus")


def default_folder() -> Path:
    """Return the default folder for this user's data."""
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "penstock"


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
