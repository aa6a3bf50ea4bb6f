"""Log lines in the store, numbered by rank across attempts; the newest of each rank are kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Insert,
    Select,
    bindparam,
    delete,
    insert,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.sql.expression import SelectBase

from penstock.api.store.rows import Keys, put, select_rows
from penstock.api.store.schema import log_lines

MOST_LINES = 2_000
"""Lines of each rank of a job that are kept; files have all lines."""
MOST_LINE_CHARACTERS, MOST_LEVEL_CHARACTERS = 8_192, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Line that a rank printed, with its time in seconds since the epoch."""

    uid: str
    rank: int
    attempt: int
    at: float
    level: str
    message: str


def add_lines(connection: Connection, lines: Sequence[Line]) -> None:
    """Append lines to those of their ranks; the caller has locked the row of each job."""
    ranks = sorted({(line.uid, line.rank) for line in lines})
    last = _last_numbers(connection, ranks)
    rows = []
    for line in lines:
        last[line.uid, line.rank] += 1
        level, message = _text(line.level, MOST_LEVEL_CHARACTERS), _text(line.message, MOST_LINE_CHARACTERS)
        rows.append((line.uid, line.rank, last[line.uid, line.rank], line.attempt, line.at, level, message))
    put(connection, _keep, rows)
    full = [(rank, last[rank] - MOST_LINES) for rank in ranks if last[rank] > MOST_LINES]
    if full:
        connection.execute(_FORGET, [{"of": of, "by": by, "most": most} for (of, by), most in full])


def _last_numbers(connection: Connection, ranks: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
    numbers = dict.fromkeys(ranks, 0)
    numbers.update(((uid, rank), number) for uid, rank, number in select_rows(connection, _last, ranks))
    return numbers


def _last(keys: Keys) -> SelectBase:
    """Query of the highest number of each rank's lines; the table's key finds it without a scan."""
    return union_all(*(select(_last_of(uid, rank).subquery()) for uid, rank in keys))


def _last_of(uid: BindParameter[str], rank: BindParameter[int]) -> Select[Any]:
    columns = (log_lines.c.uid, log_lines.c.rank, log_lines.c.number)
    newest_first = select(*columns).where(log_lines.c.uid == uid, log_lines.c.rank == rank).order_by(columns[2].desc())
    return newest_first.limit(literal_column("1")).offset(literal_column("0"))  # or each would be one more parameter


def _text(value: str, most: int) -> str:
    """Return the text as PostgreSQL accepts it: without NUL, and cut to the length of the column."""
    return value[:most].replace("\0", "\N{REPLACEMENT CHARACTER}")


@functools.cache
def _keep(dialect: str) -> Insert:
    return insert(log_lines)


_FORGET = delete(log_lines).where(
    log_lines.c.uid == bindparam("of"), log_lines.c.rank == bindparam("by"), log_lines.c.number <= bindparam("most")
)
