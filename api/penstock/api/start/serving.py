"""Service on this machine: its folder and database, its first token, its executor, and the web server."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.api.auth.identity import Identity, Role
from penstock.api.executor.collecting import Collector, ProcessShippers
from penstock.api.executor.executor import Executor, Reports
from penstock.api.executor.plan_queue import MOST_SECONDS, PlanQueue
from penstock.api.executor.supervisors import ProcessSupervisors
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.start import background
from penstock.api.start.server import Server, check_tls, collect_garbage_seldom
from penstock.api.start.service_files import address_file, ca_file, executor_name, ingest_token, planner_name
from penstock.api.store import migrate, tokens
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.webhook import Deliverer, Webhook
from penstock.core.errors import UserError
from penstock.core.host.launches import Launches
from penstock.core.host.locks import STATE, Lock, alone, launches_folder, machine_lock_path
from penstock.core.host.machine_capacity import this_machine
from penstock.core.host.stopping import listening
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.serialization.files import write_secret
from penstock.planner.worker.process import ProcessPlanner


def serve(
    settings: Settings,
    webhook: Webhook | None,
    *,
    configuration: Path,
    acknowledged: Callable[[AttemptFolder, bool], bool],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; jobs continue without the service.

    ``configuration`` is the file in which this user's commands look for a service, ``acknowledged`` is called by the
    `Collector`, and ``say`` prints a line.

    Raises:
        UserError: another service holds the folder, or a setting is invalid.
    """
    with service_folder(settings), _machine(settings, say) as machine:
        settings = replace(settings, executor=executor_name(settings))

        def begun(service: Service) -> Service:
            introduce(service, configuration, say)
            return service

        def workers(service: Service) -> Iterator[AbstractContextManager[None]]:
            return _workers(service, webhook, machine.take, acknowledged)

        answering(settings, begun, workers, say)


@contextmanager
def service_folder(settings: Settings, wait: Callable[[str], None] | None = None, name: str = "") -> Iterator[None]:
    """Create the service's folder if needed, and hold it under ``name`` during the block.

    While another service holds it, wait by ``wait``, or without that raise `UserError`. Files that are created during
    the block are readable only by this user, also those of supervisors and ranks.
    """
    check_tls(settings)
    before = os.umask(0o077)
    try:
        make_private(settings.folder)
        remedy = "stop that service, or use another folder with --folder"
        with alone(settings.folder / ".lock", f"service folder {settings.folder}", remedy, wait, name):
            yield
    finally:
        os.umask(before)


def make_private(folder: Path) -> None:
    """Create the folder, readable only by this user.

    A folder of an older penstock is closed to other users, with all its content. A folder of another user, as a volume
    in a pod may be, is not changed. Raises `UserError` if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            what=f"cannot be created: {error.strerror}",
            where=str(folder),
            remedy="choose a folder that you may create, with --folder",
        ) from None
    if folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)


def answering(
    settings: Settings,
    begun: Callable[[Service], Service],
    workers: Callable[[Service], Iterator[AbstractContextManager[None]]],
    say: Callable[[str], None],
) -> None:
    """Serve the store of ``settings`` until a signal, as the service that ``begun`` returns, next to its workers."""
    make_schema(settings)
    with closing(open_service(settings)) as opened:
        service = begun(opened)
        # Inside `listening`, because uvicorn ends by a signal and then sends it once more.
        with listening(), ExitStack() as stack:
            for worker in workers(service):
                stack.enter_context(worker)
            server = Server(service)
            collect_garbage_seldom()
            say(f"penstock serves {settings.url}")
            server.run()


@contextmanager
def _machine(settings: Settings, say: Callable[[str], None]) -> Iterator[Lock]:
    """Take the lock of this machine if it is free; print a message otherwise."""
    path = machine_lock_path(os.environ, Path.home(), settings.machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path, f"process {os.getpid()}, folder {settings.folder}")
    except OSError as error:
        raise UserError(
            what=f"cannot be written: {error.strerror}",
            where=str(path),
            remedy=f"fix its permissions, or set {STATE} to another folder",
        ) from None
    with closing(lock):
        if not lock.take():
            other = f"another service launches jobs on this machine ({lock.holder})"
            say(f"{other}; this one launches none until that one ends")
        yield lock


def _workers(
    service: Service,
    webhook: Webhook | None,
    may_launch: Callable[[], bool],
    acknowledged: Callable[[AttemptFolder, bool], bool],
) -> Iterator[AbstractContextManager[None]]:
    """Yield the parts of the background work, each of which runs during its block."""
    settings = service.settings
    reports = Reports(address_file=address_file(settings), token_file=ingest_token(service))
    here = this_machine(os.environ)
    executor = Executor(
        service,
        ProcessSupervisors(),
        ProcessPlanner(),
        machine=here,
        name=settings.executor,
        reports=reports,
        may_launch=may_launch,
        launches=Launches(launches_folder(os.environ, Path.home(), socket.gethostname()), here),
    )
    collector = Collector(
        service,
        ProcessShippers(reports.address_file, reports.token_file),
        name=settings.executor,
        acknowledged=acknowledged,
    )
    plan_queue = PlanQueue(service, ProcessPlanner(seconds=MOST_SECONDS), name=planner_name(settings))
    yield background.polling("executor", executor.run_once, wake=service.requested)
    yield background.polling("collector", collector.run_once)
    yield background.polling("plan-queue", plan_queue.run_once, plan_queue.close)
    yield background.enforcing_retention(service)
    yield from delivering(service, webhook)


def delivering(service: Service, webhook: Webhook | None) -> Iterator[AbstractContextManager[None]]:
    """Yield the delivery to the webhook, if there is one, which runs during its block."""
    if webhook is not None:
        yield background.polling("webhook", Deliverer(service, webhook, service.settings.url).run_once)


def make_schema(settings: Settings) -> None:
    """Create the tables of a new database; `penstock database upgrade` upgrades an old one."""
    engine = make_engine(parse_url(settings.database_url))
    try:
        if migrate.current(engine) is None:
            migrate.upgrade(engine)
    finally:
        engine.dispose()


def introduce(service: Service, path: Path, say: Callable[[str], None]) -> None:
    """At the first start, create an administrator's token, and write it with the URL to this user's configuration."""
    if service.read(tokens.every):
        return
    admin = Identity(name="first", role=Role.ADMIN)
    _, secret = service.write("tokens", lambda connection: tokens.add(connection, admin, service.clock()))
    written = {"server": service.settings.url, "token": secret}
    if ca := ca_file(service.settings):
        written["ca"] = str(ca)
    write_secret(path, json.dumps(written, indent=1) + "\n")
    say(f"an administrator's token and the URL are in {path}")


def read_webhook(url: str, secret_file: Path | None) -> Webhook | None:
    """Return the webhook, if there is one; raises `UserError` unless there is a secret to sign with."""
    if not url and secret_file is None:
        return None
    if not url or secret_file is None:
        raise UserError(
            what="needs the other one of --webhook and --webhook-secret",
            where="--webhook" if url else "--webhook-secret",
            remedy="give both --webhook URL and --webhook-secret FILE",
        )
    try:
        return Webhook(url=url, secret=secret_file.read_bytes().strip())
    except OSError as error:
        raise UserError(
            what=f"cannot be read: {error.strerror}",
            where="--webhook-secret",
            remedy="create the file with: openssl rand -hex 32 > FILE",
        ) from None
