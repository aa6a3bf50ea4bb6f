"""Connections to the database: SQLite in one file, or PostgreSQL.

SQLite uses a write-ahead log and syncs it at every commit, so an acknowledged change survives a power failure. Its
write transactions take the lock at their start, or two of them could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from penstock.core.errors import UserError

BUSY_MILLISECONDS = 10_000
STATEMENT_SECONDS = 30.0
"""Time limit of a service's statement on PostgreSQL, equal to the time limit of a request's body."""
IDLE_SECONDS = 10.0
"""Time limit between two statements of a transaction on PostgreSQL. A transaction whose service is frozen releases its
locks before the Lease of that service ends.
"""
POOLED_CONNECTIONS = 8
SQLITE_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    f"busy_timeout = {BUSY_MILLISECONDS}",
    "temp_store = MEMORY",
)
DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}


def parse_url(text: str) -> URL:
    """Return the database's URL with its driver; raises `UserError` for one that is neither SQLite nor PostgreSQL."""
    try:
        url = make_url(text)
    except ArgumentError:
        raise _refused("is not a database URL") from None
    driver = DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise _refused(f"{url.get_backend_name()} is not supported")
    if driver.startswith("sqlite") and not url.database:
        raise _refused("an in-memory database would lose all jobs at the end")
    return url.set(drivername=driver)


def _refused(what: str) -> UserError:
    return UserError(what=what, where="database", remedy="write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")


def make_engine(url: URL, statement_seconds: float | None = None) -> Engine:
    """Return an engine whose transactions are durable in both databases; it is not connected yet.

    PostgreSQL cancels statements that take longer than ``statement_seconds``, including time in lock waits. Without it
    there is no limit, as for a migration or a backup. SQLite's statements wait only for its one lock.
    """
    engine = create_engine(
        url,
        pool_size=POOLED_CONNECTIONS,
        max_overflow=POOLED_CONNECTIONS,
        pool_pre_ping=not is_sqlite(url),
    )
    if is_sqlite(url):
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif statement_seconds is not None:
        event.listen(engine, "connect", _limiting(statement_seconds))
    return engine


def is_sqlite(url: URL) -> bool:
    """Whether the database is a file on this machine."""
    return url.get_backend_name() == "sqlite"


def _configure_sqlite(connection: Any, record: object) -> None:
    """Set the pragmas, and leave transactions to SQLAlchemy: the driver begins them too late for savepoints."""
    connection.isolation_level = None
    for pragma in SQLITE_PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _limiting(statement_seconds: float) -> Callable[[Any, object], None]:
    def limit(connection: Any, record: object) -> None:
        connection.execute(f"SET statement_timeout = {round(1000 * statement_seconds)}")
        connection.execute(f"SET idle_in_transaction_session_timeout = {round(1000 * IDLE_SECONDS)}")
        connection.commit()  # settings of an uncommitted transaction would be lost

    return limit


def _begin_sqlite(connection: Connection) -> None:
    """Begin a transaction: readers have one snapshot and never wait, writers take the lock at their start."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def upsert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT with ON CONFLICT, for which each database has its own class."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
