"""Log lines in the store: numbered by rank, across attempts; the newest of each rank are kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Insert,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.sql.expression import SelectBase

from penstock.api.store.rows import ask, put
from penstock.api.store.schema import log_lines

MOST_LINES = 2_000
"""Of each rank of a job; the rest stays in files."""
MOST_LINE_CHARACTERS, MOST_LEVEL_CHARACTERS = 8_192, 15
MOST_RANKS_ASKED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What a rank printed at a time, in seconds since the epoch."""

    uid: str
    rank: int
    attempt: int
    at: float
    level: str
    message: str


def add_lines(connection: Connection, lines: Sequence[Line]) -> None:
    """Keep them behind those that their ranks have; whoever asks holds the row of each job."""
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
    found: dict[tuple[str, int], int] = {}
    for start in range(0, len(ranks), MOST_RANKS_ASKED):
        part = ranks[start : start + MOST_RANKS_ASKED]
        rows = ask(connection, _last, [value for rank in part for value in rank])
        found.update((part[place], number or 0) for place, number in rows)
    return found


def _last(values: Sequence[BindParameter[Any]]) -> SelectBase:
    """Of each pair of uid and rank its place among them, and the highest number of its lines."""
    pairs = zip(values[::2], values[1::2], strict=True)
    asked: list[SelectBase] = [
        select(literal_column(str(place)), func.max(log_lines.c.number)).where(
            log_lines.c.uid == uid, log_lines.c.rank == rank
        )
        for place, (uid, rank) in enumerate(pairs)
    ]
    return union_all(*asked)


def _text(value: str, most: int) -> str:
    """As PostgreSQL takes it: no NUL, and no longer than there is room for."""
    return value[:most].replace("\0", "\N{REPLACEMENT CHARACTER}")


@functools.cache
def _keep(dialect: str) -> Insert:
    return insert(log_lines)


_FORGET = delete(log_lines).where(
    log_lines.c.uid == bindparam("of"), log_lines.c.rank == bindparam("by"), log_lines.c.number <= bindparam("most")
)
