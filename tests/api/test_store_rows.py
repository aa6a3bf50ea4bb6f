"""Rows by the dozen arrive as they are, however many there are, and meet what is there as the INSERT says."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Insert, select

from penstock.api.service import Service
from penstock.api.store.engine import upsert
from penstock.api.store.rows import MOST_ROWS, put
from penstock.api.store.schema import plans


def passing_over(dialect: str) -> Insert:
    inserting: Insert = upsert(dialect, plans).on_conflict_do_nothing()
    return inserting


@pytest.mark.parametrize("count", [0, 1, 2, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS + 5])
def test_any_number_of_rows(service: Service, count: int) -> None:
    rows = [(f"{number:064}", bytes([number % 256]), b"timeline", number / 7) for number in range(count)]

    def twice(connection: Connection) -> None:
        put(connection, passing_over, rows)
        put(connection, passing_over, [(digest, b"other", None, at) for digest, _, _, at in rows])

    service.write("plans", twice)
    found = service.read(lambda c: c.execute(select(plans).order_by(plans.c.digest)).all())
    assert [(row.digest, bytes(row.body), bytes(row.timeline), row.created_at) for row in found] == rows
