"""Bulk statements: many rows by few statements.

For each row of an INSERT, and for each SELECT, SQLAlchemy and the driver do more work than the database, and SQLite's
driver releases the GIL and waits to get it back. So rows are inserted by the dozen, and the statements of every report
go to the driver directly, with SQL that is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sqlalchemy import BindParameter, Column, Connection, Dialect, Insert, String, Table, Text, bindparam
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.dialects.sqlite import pysqlite
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.expression import SelectBase

MOST_ROWS, MOST_KEYS = 64, 500
DIALECTS: dict[str, Dialect] = {
    "sqlite": pysqlite.dialect(),
    "postgresql": psycopg.dialect(paramstyle="format"),  # type: ignore[no-untyped-call]
}

Keys = Sequence[tuple[BindParameter[Any], ...]]
MakeSelect = Callable[[Keys], SelectBase]


def put(connection: Connection, made: Callable[[str], Insert], rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert the rows by the INSERT ``made`` for the dialect, each with a value for every column that is not numbered.

    The values go to the driver unchanged. On PostgreSQL no two rows may have the same key if the INSERT updates.
    """
    dialect = connection.dialect.name
    for start in range(0, len(rows), MOST_ROWS):
        part = rows[start : start + MOST_ROWS]
        if dialect == "postgresql":
            text, values = _postgresql_insert(made), tuple(map(list, zip(*part, strict=True)))
        else:
            text, values = _sqlite_insert(made, len(part)), tuple(chain.from_iterable(part))
        with _executed(connection, text, values):
            pass


def select_rows(connection: Connection, made: MakeSelect, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Return the rows of the SELECT ``made`` with parameters for that many keys; it uses each once and in order.

    Rows of the last key may be returned more than once: statements are compiled for few numbers of keys.
    """
    rows: list[Any] = []
    for start in range(0, len(keys), MOST_ROWS):
        part = list(keys[start : start + MOST_ROWS])
        size = 1 << (len(part) - 1).bit_length()
        text = _compiled_select(made, connection.dialect.name, size, len(part[0]))
        part += part[-1:] * (size - len(part))
        with _executed(connection, text, tuple(chain.from_iterable(part))) as cursor:
            rows += cursor.fetchall()
    return rows


def in_parts(keys: Iterable[str]) -> Iterator[list[str]]:
    """Yield the keys in sorted parts for queries, because databases limit the number of parameters."""
    ordered = sorted(keys)
    yield from (ordered[start : start + MOST_KEYS] for start in range(0, len(ordered), MOST_KEYS))


@contextmanager
def _executed(connection: Connection, text: str, values: tuple[Any, ...]) -> Iterator[DBAPICursor]:
    """Execute by the driver directly, with SQLAlchemy's errors."""
    dialect, driver = connection.dialect, connection.connection
    cursor = driver.cursor()
    try:
        cursor.execute(text, values)
        yield cursor
    except dialect.loaded_dbapi.Error as error:
        lost = dialect.is_disconnect(error, driver, cursor)
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            text, values, error, dialect.loaded_dbapi.Error, connection_invalidated=lost, dialect=dialect
        ) from error
    finally:
        cursor.close()


@functools.cache
def _compiled_select(made: MakeSelect, dialect: str, count: int, width: int) -> str:
    names = [[f"key_{number}_{place}" for place in range(width)] for number in range(count)]
    compiled = made([tuple(map(bindparam, key)) for key in names]).compile(dialect=DIALECTS[dialect])
    assert compiled.positiontup == [*chain.from_iterable(names)], compiled.positiontup
    return str(compiled)


@functools.cache
def _sqlite_insert(made: Callable[[str], Insert], count: int) -> str:
    """Return the INSERT for SQLite."""
    head, row, tail = _parts(made, "sqlite")
    return f"{head} VALUES {', '.join([row] * count)}{tail}"


@functools.cache
def _postgresql_insert(made: Callable[[str], Insert]) -> str:
    """Return the INSERT for PostgreSQL, which prepares it once: it takes a list for each column."""
    head, _, tail = _parts(made, "postgresql")
    lists = (f"unnest(%s::{_array_type(column)})" for column in _columns(made("postgresql")))
    return f"{head} SELECT {', '.join(lists)}{tail}"


def _array_type(column: Column[Any]) -> str:
    kind = Text() if isinstance(column.type, String) else column.type  # a cast to a length would cut what is too long
    return f"{kind.compile(DIALECTS['postgresql'])}[]"


def _parts(made: Callable[[str], Insert], dialect: str) -> tuple[str, str, str]:
    """Return the text before VALUES, the text of a row, and the text after the rows."""
    inserting = made(dialect)
    row = dict.fromkeys((column.name for column in _columns(inserting)), 0)
    head, _, rest = str(inserting.values(row).compile(dialect=DIALECTS[dialect])).partition(" VALUES ")
    values, conflict, tail = rest.partition(" ON CONFLICT ")
    return head, values, conflict + tail


def _columns(inserting: Insert) -> list[Column[Any]]:
    table = inserting.table
    assert isinstance(table, Table)
    return [column for column in table.c if column is not table.autoincrement_column]
