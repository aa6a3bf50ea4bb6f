"""Many rows by few statements.

For each row of an INSERT, and for each SELECT, the toolkit and the driver do more than the database does, and SQLite's
driver lets go of the interpreter and waits to get it back. So rows go in by the dozen, and what is done for every
report goes by texts that are made once for each number of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Insert, bindparam
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.dialects.sqlite import pysqlite
from sqlalchemy.sql.expression import SelectBase

MOST_ROWS = 64
DIALECTS: dict[str, Dialect] = {
    "sqlite": pysqlite.dialect(),
    "postgresql": psycopg.dialect(paramstyle="format"),  # type: ignore[no-untyped-call]
}


def put(connection: Connection, made: Callable[[str], Insert], rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert the rows, each with a value for every column of the table, by the INSERT ``made`` for the dialect.

    The values go to the driver as they are. On PostgreSQL no two rows may have the same key if the INSERT updates.
    """
    for start in range(0, len(rows), MOST_ROWS):
        part = rows[start : start + MOST_ROWS]
        text = _text(made, connection.dialect.name, len(part))
        connection.exec_driver_sql(text, tuple(chain.from_iterable(part)))


def ask(
    connection: Connection, made: Callable[[Sequence[BindParameter[Any]]], SelectBase], values: Sequence[Any]
) -> Sequence[Any]:
    """The rows of the SELECT that ``made`` writes with so many parameters, each of which it uses once and in order."""
    text = _question(made, connection.dialect.name, len(values))
    return connection.exec_driver_sql(text, tuple(values)).all()


@functools.cache
def _question(made: Callable[[Sequence[BindParameter[Any]]], SelectBase], dialect: str, count: int) -> str:
    names = [f"value_{number}" for number in range(count)]
    compiled = made([bindparam(name) for name in names]).compile(dialect=DIALECTS[dialect])
    assert compiled.positiontup == names, compiled.positiontup
    return str(compiled)


@functools.cache
def _text(made: Callable[[str], Insert], dialect: str, size: int) -> str:
    inserting = made(dialect)
    row = dict.fromkeys(inserting.table.c.keys(), 0)
    return str(inserting.values([row] * size).compile(dialect=DIALECTS[dialect]))
