"""A service on a real database, with a clock that stands still, and clients that may do this or that."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, update
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.auth.identity import Identity, Role, new_token
from penstock.api.http.credentials import COOKIE
from penstock.api.service import Service, open_service
from penstock.api.settings import Limits, Settings
from penstock.api.store import jobs, migrate, sessions, tokens
from penstock.api.store.engine import is_sqlite, make_engine, parse_url
from penstock.api.store.ingest import Batch, take
from penstock.api.store.jobs import StoredJob
from penstock.api.store.schema import jobs as jobs_table
from penstock.api.store.sessions import StoredSession
from penstock.core.job import PipelineJob
from penstock.core.records import LogLine, Progress, Record, RecordKind, StepMetrics

NOW = 1_700_000_000.0
HOST = "http://localhost"
SHORT_STREAMS = Limits(stream_seconds=0.2)
"""A `TestClient` waits for the end of every answer."""


@dataclass
class Clock:
    """Seconds since the epoch, moved by hand. ``ahead`` sets it wrong; a monotonic clock is ``now`` alone."""

    now: float = NOW
    ahead: float = 0.0

    def __call__(self) -> float:
        return self.now + self.ahead

    def seconds(self) -> float:
        """Of the monotonic clock."""
        return self.now


def job_manifest(name: str = "tiny", **metadata: Any) -> dict[str, Any]:
    """A valid PipelineJob."""
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": name, **metadata},
        "spec": {
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kvHeads": 1, "vocab": 300},
            "data": {
                "source": "python-stdlib",
                "tokenizer": {"train": "bpe", "vocab": 300},
                "sequenceLength": 32,
            },
            "training": {"globalBatch": 2, "steps": 10},
        },
    }


def new_service(
    folder: Path,
    database: str = "",
    clock: Clock | None = None,
    limits: Limits = SHORT_STREAMS,
    executor: str = "",
) -> Service:
    """A service in ``folder`` or on the database that is named, which gets its tables if it has none."""
    settings = Settings(folder=folder, database=database, limits=limits, executor=executor)
    url = parse_url(settings.database_url)
    if is_sqlite(url):
        path = Path(url.database or "")
        if not path.exists():
            path.write_bytes(_empty_database())
    else:
        make_tables(settings.database_url)
    return open_service(settings, clock or Clock())


@functools.cache
def _empty_database() -> bytes:
    """A SQLite file with all tables: copying it is quicker than making them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "penstock.db"
        make_tables(f"sqlite:///{path}")
        return path.read_bytes()


def make_tables(database: str) -> None:
    """Make the tables of a new database."""
    engine = make_engine(parse_url(database))
    if migrate.current(engine) is None:
        migrate.upgrade(engine)
    engine.dispose()


def client_of(service: Service, role: Role | None = Role.ADMIN, namespace: str | None = None) -> TestClient:
    """A client with a token of that role, or with none."""
    headers = {}
    if role is not None:
        bearer = Identity(name=f"a-{role}", role=role, namespace=namespace)
        _, secret = service.write("tokens", lambda connection: tokens.add(connection, bearer, service.clock()))
        headers["Authorization"] = f"Bearer {secret}"
    return TestClient(create_app(service), base_url=HOST, headers=headers, raise_server_exceptions=False)


def session_of(
    service: Service, role: Role = Role.ADMIN, namespace: str | None = None, lifetime_seconds: float | None = None
) -> tuple[StoredSession, str]:
    """A session of a new token with that role, and the session's secret."""
    who = Identity(name=f"a-{role}", role=role, namespace=namespace)
    now = service.clock()

    def change(connection: Connection) -> tuple[StoredSession, str]:
        token, _ = tokens.add(connection, who, now, lifetime_seconds)
        link = new_token(sessions.LINK_PREFIX)
        sessions.add_link(connection, token.id, link, now)
        return sessions.begin(connection, link, "127.0.0.1", now)

    return service.write("sessions", change)


def browser_of(
    service: Service, role: Role = Role.ADMIN, namespace: str | None = None, origin: str | None = HOST
) -> TestClient:
    """A client that is signed in by a cookie, on a page of ``origin``."""
    _, secret = session_of(service, role, namespace)
    headers = {"Cookie": f"{COOKIE}={secret}", **({"Origin": origin} if origin else {})}
    return TestClient(create_app(service), base_url=HOST, headers=headers, raise_server_exceptions=False)


_uids = itertools.count(1)


def add_job(service: Service, name: str = "tiny", **metadata: Any) -> StoredJob:
    """A job in the store; a name that ends with a dash gets a number."""
    number = next(_uids)
    job = PipelineJob.from_manifest(job_manifest(f"{name}{number}" if name.endswith("-") else name, **metadata))
    uid = f"00000000-0000-0000-0000-{number:012d}"

    def change(connection: Connection) -> StoredJob:
        return jobs.create(connection, job, uid, "somebody", service.clock())

    return service.write(uid, change)


def step_records(uid: str, steps: range, *, attempt: int = 1, first: int = 0, source: str = "rank-0") -> list[Record]:
    """Metrics and progress of these steps, numbered from ``first`` on."""
    records = []
    numbers = itertools.count(first)
    for step in steps:
        metrics = StepMetrics(
            step=step,
            loss=5.0 - step / 1000,
            step_seconds=0.5,
            tokens_per_second=1000.0,
            learning_rate=1e-3,
            gradient_norm=1.0,
            peak_bytes=10**9,
            attempt=attempt,
        )
        told = Progress(step=step + 1, num_steps=1000, phase="Running")
        for kind, content in ((RecordKind.METRICS, {"metrics": metrics}), (RecordKind.PROGRESS, {"progress": told})):
            records.append(
                Record(
                    uid=uid,
                    attempt=attempt,
                    source=source,
                    sequence=next(numbers),
                    recorded_at=NOW,
                    kind=kind,
                    **content,
                )
            )
    return records


def send_lines(service: Service, uid: str, *lines: tuple[int, str], first: int = 0) -> None:
    """Lines of ranks, as a shipper of the first attempt brings them, numbered from ``first`` on."""
    records = [
        Record(
            uid=uid,
            attempt=1,
            source="logs",
            sequence=first + i,
            recorded_at=NOW + first + i,
            kind=RecordKind.LOG,
            log=LogLine(rank=rank, level="info", message=text),
        )
        for i, (rank, text) in enumerate(lines)
    ]

    def change(connection: Connection) -> None:
        connection.execute(update(jobs_table).where(jobs_table.c.uid == uid).values(attempt=1))
        take(connection, [Batch.of(records, NOW)])

    service.write(uid, change)
