"""Backup of a database as compressed lines of JSON: a consistent snapshot, for both kinds of databases.

The first line has the schema's revision, rows by table follow, and the last line has their number, so a truncated file
is detected.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Engine, LargeBinary, Table, func, insert, select, text

from penstock.api.store import migrate
from penstock.api.store.schema import metadata
from penstock.core import jsontext
from penstock.core.errors import UserError

ROWS_PER_LINE = 500


def back_up(engine: Engine, file: IO[bytes]) -> int:
    """Write a consistent snapshot, while other transactions continue; return the number of rows."""
    with gzip.open(file, "wt", encoding="utf-8", newline="\n") as lines, engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        _write(lines, {"schema": migrate.current(engine)})
        count = 0
        for table in metadata.sorted_tables:
            for rows in _rows(connection, table):
                _write(lines, {"table": table.name, "rows": rows})
                count += len(rows)
        _write(lines, {"rows": count})
    return count


def _write(lines: IO[str], value: dict[str, Any]) -> None:
    lines.write(json.dumps(value, separators=(",", ":")) + "\n")


def _rows(connection: Connection, table: Table) -> Iterator[list[list[Any]]]:
    binary = _binary(table)
    result = connection.execution_options(yield_per=ROWS_PER_LINE).execute(select(table))
    for part in result.partitions():
        yield [[_text(value) if i in binary else value for i, value in enumerate(row)] for row in part]


def _binary(table: Table) -> frozenset[int]:
    return frozenset(i for i, column in enumerate(table.columns) if isinstance(column.type, LargeBinary))


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def restore(engine: Engine, path: Path) -> int:
    """Fill the empty database from a backup, all or nothing; return the number of rows.

    Raises:
        UserError: the file is not a backup, is truncated, or has another schema; or the database is not empty.
    """
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        _require_empty(connection)
        count = 0
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                count = _read(connection, map(jsontext.load, lines), migrate.revisions()[-1], str(path))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                what=f"is not a complete backup: {error}",
                where=str(path),
                remedy="name a file that penstock database backup wrote",
            ) from None
        _go_on_numbering(connection)
    return count


def _require_empty(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if connection.execute(select(table).limit(1)).first() is not None:
            raise UserError(
                what=f"is not empty: {table.name} has rows",
                where="database",
                remedy="restore into a new folder or an empty database",
            )


def _read(connection: Connection, lines: Iterable[dict[str, Any]], known: str, place: str) -> int:
    """Insert the rows in all lines after the first, until a line without a table."""
    count, following = 0, iter(lines)
    if (schema := next(following, {})["schema"]) != known:
        raise UserError(
            what=f"has schema {schema}, and the database has {known}",
            where=place,
            remedy="restore with the penstock that made it, then: penstock database upgrade",
        )
    for line in following:
        if "table" not in line:
            if line["rows"] != count:
                raise ValueError(f"{count} rows of {line['rows']}")
            return count
        count += _insert(connection, metadata.tables[line["table"]], line["rows"])
    raise EOFError("its last line is missing")


def _insert(connection: Connection, table: Table, rows: list[list[Any]]) -> int:
    binary, names = _binary(table), [column.name for column in table.columns]
    values = [
        {
            name: base64.b64decode(value) if i in binary and value is not None else value
            for i, (name, value) in enumerate(zip(names, row, strict=True))
        }
        for row in rows
    ]
    connection.execute(insert(table), values)
    return len(values)


def _go_on_numbering(connection: Connection) -> None:
    """Advance PostgreSQL's sequences, which ignore rows that were inserted with their numbers."""
    if connection.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        last = connection.execute(select(func.max(column))).scalar_one()
        if last is not None:
            counter = text("SELECT setval(pg_get_serial_sequence(:of, :by), :last)")
            connection.execute(counter, {"of": table.name, "by": column.name, "last": last})
