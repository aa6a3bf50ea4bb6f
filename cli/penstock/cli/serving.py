"""The service on this machine: its folder and database, its first token, its executor, and the web server."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.api import retention
from penstock.api.auth.identity import Identity, Role
from penstock.api.client.config import configuration_file
from penstock.api.executor.admission import Demand
from penstock.api.executor.executor import Executor, Reports
from penstock.api.executor.planning import ProcessPlanner
from penstock.api.executor.requests import Desk
from penstock.api.executor.supervisors import ProcessSupervisors
from penstock.api.server import Server, check_tls
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.store import migrate, tokens
from penstock.api.store.engine import make_engine, parse_url
from penstock.cli.output import say
from penstock.cli.secret_files import write_secret
from penstock.cli.stopping import listening

LOOK_SECONDS = 0.5
FORGET_SECONDS = 3600.0


def serve(settings: Settings) -> None:
    """Answer until SIGINT or SIGTERM; jobs go on without the service."""
    check_tls(settings)
    settings.folder.mkdir(parents=True, exist_ok=True)
    make_schema(settings)
    service = open_service(settings)
    introduce(service, configuration_file(os.environ, Path.home()))
    reports = Reports(server=settings.url, token_file=ingest_token(service), ca_file=ca_file(settings))
    executor = Executor(
        service,
        ProcessSupervisors(),
        ProcessPlanner(),
        capacity=this_machine(),
        name=f"{os.uname().nodename}:{settings.folder}"[:36],
        reports=reports,
    )
    desk = Desk(service, ProcessPlanner(), name=desk_name(settings))
    workers = (looking("executor", executor.turn), looking("desk", desk.turn, desk.close), forgetting(service))
    # Inside `listening`, because uvicorn ends by a signal and then sends it once more.
    with listening(), ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        say(f"penstock at {settings.url}")
        Server(service).run()
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


@contextmanager
def looking(name: str, turn: Callable[[], None], close: Callable[[], None] = lambda: None) -> Iterator[None]:
    """``turn`` is called again and again, in a thread of its own, for as long as the block lasts; then ``close``."""
    with _repeating(name, LOOK_SECONDS, lambda ending: turn(), close):
        yield


@contextmanager
def forgetting(service: Service) -> Iterator[None]:
    """Now and then what is older than its limit is dropped, for as long as the block lasts."""
    with _repeating("retention", FORGET_SECONDS, lambda ending: retention.forget_old(service, ending.is_set)):
        yield


@contextmanager
def _repeating(
    name: str, seconds: float, do: Callable[[threading.Event], object], close: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Does it again and again, ``seconds`` in between, in a thread; it is told by an event that the block ends."""
    ending = threading.Event()

    def work() -> None:
        while not ending.wait(seconds):
            do(ending)
        close()

    thread = threading.Thread(target=work, name=f"penstock-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(timeout=30)
