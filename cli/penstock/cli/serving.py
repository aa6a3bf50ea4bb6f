"""The service on this machine: its folder and database, its first token, its executor, and the web server."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from penstock.api.auth.identity import Identity, Role
from penstock.api.client.config import configuration_file
from penstock.api.executor.admission import Demand
from penstock.api.executor.executor import Executor, Reports
from penstock.api.executor.files import replace_text
from penstock.api.executor.planning import ProcessPlanner
from penstock.api.executor.requests import MOST_SECONDS, Desk
from penstock.api.executor.supervisors import ProcessSupervisors
from penstock.api.server import Server, check_tls, collect_garbage_seldom
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.store import migrate, tokens
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.webhook.deliverer import Deliverer
from penstock.api.webhook.message import Webhook
from penstock.cli import background
from penstock.cli.output import say
from penstock.cli.secret_files import write_secret
from penstock.cli.stopping import listening
from penstock.core.errors import UserError


def serve(settings: Settings, webhook: Webhook | None = None) -> None:
    """Answer until SIGINT or SIGTERM; jobs go on without the service."""
    check_tls(settings)
    settings.folder.mkdir(parents=True, exist_ok=True)
    settings = replace(settings, executor=executor_name(settings))
    make_schema(settings)
    service = open_service(settings)
    introduce(service, configuration_file(os.environ, Path.home()))
    reports = Reports(server=settings.url, token_file=ingest_token(service), ca_file=ca_file(settings))
    executor = Executor(
        service,
        ProcessSupervisors(),
        ProcessPlanner(),
        capacity=this_machine(),
        name=settings.executor,
        reports=reports,
    )
    desk = Desk(service, ProcessPlanner(seconds=MOST_SECONDS), name=desk_name(settings))
    workers = [
        background.looking("executor", executor.turn),
        background.looking("desk", desk.turn, desk.close),
        background.forgetting(service),
    ]
    if webhook is not None:
        workers.append(background.looking("webhook", Deliverer(service, webhook, settings.url).turn))
    # Inside `listening`, because uvicorn ends by a signal and then sends it once more.
    with listening(), ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        server = Server(service)
        collect_garbage_seldom()
        say(f"penstock at {settings.url}")
        server.run()
    service.close()


def make_schema(settings: Settings) -> None:
    """Make the tables of a new database; an old one is left to `penstock database upgrade`."""
    engine = make_engine(parse_url(settings.database_url))
    try:
        if migrate.current(engine) is None:
            migrate.upgrade(engine)
    finally:
        engine.dispose()


def ca_file(settings: Settings) -> Path | None:
    """What this machine's own clients believe: the service's certificate itself, whoever signed it."""
    return settings.tls.certificate if settings.tls else None


def introduce(service: Service, path: Path) -> None:
    """At the first start make an administrator's token, and write it with the URL where this user's commands look."""
    if service.read(tokens.every):
        return
    admin = Identity(name="first", role=Role.ADMIN)
    _, secret = service.write("tokens", lambda connection: tokens.add(connection, admin, service.clock()))
    written = {"server": service.settings.url, "token": secret}
    if ca := ca_file(service.settings):
        written["ca"] = str(ca)
    write_secret(path, json.dumps(written, indent=1) + "\n")
    say(f"token and URL are in {path}")


def ingest_token(service: Service) -> Path:
    """The file of the token that attempts report with, made at the first start."""
    path = service.settings.folder / "ingest-token"
    if not path.exists():
        reporter = Identity(name="local-attempts", role=Role.INGEST)
        _, secret = service.write("tokens", lambda connection: tokens.add(connection, reporter, service.clock()))
        write_secret(path, secret + "\n")
    return path


def executor_name(settings: Settings) -> str:
    """Of whoever runs jobs in this folder: kept there, because its jobs bear it when machine or folder are renamed."""
    path = settings.folder / "executor"
    if not path.exists():
        replace_text(path, f"{settings.machine}:{settings.folder}\n")
    return path.read_text().strip()


def desk_name(settings: Settings) -> str:
    """The same at every start, so that a service knows what it was planning, and no other service's."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{settings.machine}:{settings.folder}"))


def this_machine() -> Demand:
    """What its jobs may hold."""
    cores = len(os.sched_getaffinity(0))
    devices = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return Demand(
        cores=cores, cuda_devices=devices, memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


def read_webhook(url: str, secret_file: Path | None) -> Webhook | None:
    """The webhook, if one is wanted; raises `UserError` unless there is a secret to sign with."""
    if not url and secret_file is None:
        return None
    if not url or secret_file is None:
        what, remedy = "has a meaning only with the other one", "give --webhook URL and --webhook-secret FILE"
        raise UserError(what=what, where="--webhook" if url else "--webhook-secret", remedy=remedy)
    try:
        return Webhook(url=url, secret=secret_file.read_bytes().strip())
    except OSError as error:
        remedy = "make one with: openssl rand -hex 32 > FILE"
        raise UserError(what=f"cannot be read: {error.strerror}", where="--webhook-secret", remedy=remedy) from None
