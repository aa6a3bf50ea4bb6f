"""The one writer: what fails alone, what is committed together, what happens at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, NoResultFound

from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.writer import Writer, WriterClosedError
from tests.support.service import new_service

counters = Table(
    "counters",
    MetaData(),
    Column("name", String(20), primary_key=True),
    Column("value", Integer, nullable=False),
)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    made = make_engine(parse_url(database))
    with made.begin() as connection:
        counters.create(connection)
        connection.execute(insert(counters), [{"name": name, "value": 0} for name in "ab"])
    yield made
    made.dispose()


def raised(name: str) -> None:
    raise LookupError(name)


def add(connection: Connection, name: str) -> int:
    """Read, then write: what goes wrong without locks."""
    mine = counters.c.name == name
    value: int = connection.execute(select(counters.c.value).where(mine).with_for_update()).scalar_one()
    connection.execute(update(counters).where(mine).values(value=value + 1))
    return value + 1


def values(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.name: row.value for row in connection.execute(select(counters))}


def test_a_change_that_fails_takes_nothing_else_with_it(engine: Engine) -> None:
    writer = Writer(engine)

    def half(connection: Connection) -> None:
        add(connection, "a")
        raised("b")

    gate = hold(writer)
    before = writer.submit("a", lambda connection: add(connection, "a"))
    failing = writer.submit("a", half)
    after = writer.submit("a", lambda connection: add(connection, "a"))
    gate.set()
    assert (before.result(), after.result()) == (1, 2)
    with pytest.raises(LookupError):
        failing.result()
    writer.close()
    assert values(engine)["a"] == 2


def hold(writer: Writer) -> threading.Event:
    """Keeps the writer busy until the event is set, so that what is asked meanwhile shares a transaction."""
    gate = threading.Event()
    writer.submit("", lambda connection: gate.wait(10))
    return gate


def test_what_waits_is_committed_together_in_the_order_of_keys(engine: Engine) -> None:
    told: list[Sequence[str]] = []
    writer = Writer(engine, told.append)
    order: list[str] = []
    gate = hold(writer)

    def note(connection: Connection, name: str) -> None:
        order.append(name)

    for name in ("b", "a", "c"):
        writer.submit(name, partial(note, name=name))
    gate.set()
    writer.close()
    assert order == ["a", "b", "c"]
    assert set(told[-1]) >= {"a", "b", "c"}


def test_a_future_is_done_only_after_the_commit(engine: Engine) -> None:
    writer = Writer(engine)
    for expected in range(1, 20):
        writer.write("a", lambda connection: add(connection, "a"))
        assert values(engine)["a"] == expected
    writer.close()


def test_two_writers_lose_nothing(engine: Engine) -> None:
    """They lock the same rows, in changes that reach for both in opposite orders."""
    writers = [Writer(engine), Writer(engine)]

    def both(connection: Connection, names: str) -> None:
        for name in names:
            add(connection, name)

    asked: list[Future[None]] = []
    for _ in range(40):
        for writer, names in zip(writers, ("ab", "ba"), strict=True):
            asked.append(writer.submit(names, partial(both, names=names)))
    for future in asked:
        future.result(timeout=60)
    for writer in writers:
        writer.close()
    assert values(engine) == {"a": 80, "b": 80}


def test_after_the_end_nothing_is_taken(engine: Engine) -> None:
    writer = Writer(engine)
    last = writer.submit("a", lambda connection: add(connection, "a"))
    writer.close()
    assert last.result() == 1
    with pytest.raises(WriterClosedError):
        writer.submit("a", lambda connection: add(connection, "a"))
    writer.close()


def test_a_database_that_is_gone_is_told_to_all_who_wait(engine: Engine) -> None:
    writer = Writer(engine)
    with engine.begin() as connection:
        counters.drop(connection)
    with pytest.raises(Exception, match="counters"):
        writer.write("a", lambda connection: add(connection, "a"))
    writer.close()


def test_on_a_full_disk_nothing_seems_kept(tmp_path: Path) -> None:
    """SQLite then rolls back all that shared the transaction, and none of those may be told that it is kept."""
    service = new_service(tmp_path)
    engine = service.engine
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("CREATE TABLE notes (body TEXT)"))

    def fill(connection: Any, record: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # it is never less than what there is

    engine.dispose()
    event.listen(engine, "connect", fill)
    held, go_on = threading.Event(), threading.Event()

    def hold(connection: Connection) -> None:
        held.set()
        go_on.wait(10)

    def note(size: int) -> Callable[[Connection], None]:
        def change(connection: Connection) -> None:
            connection.execute(text("INSERT INTO notes VALUES (:body)"), {"body": "x" * size})

        return change

    holding = service.submit("a", hold)
    held.wait(10)
    small = service.submit("b", note(10))
    large = service.submit("c", note(10_000_000))
    go_on.set()
    holding.result()
    for future in (small, large):
        with pytest.raises(DBAPIError, match="disk is full"):
            future.result()
    assert service.read(lambda c: c.execute(text("SELECT count(*) FROM notes")).scalar_one()) == 0
    service.close()


def test_joint_changes_are_made_by_one_call_and_fail_alone(engine: Engine) -> None:
    writer = Writer(engine)
    calls: list[list[str]] = []

    def together(connection: Connection, names: Sequence[str]) -> list[int | Exception]:
        calls.append(list(names))
        found: list[int | Exception] = []
        for name in names:
            if name == "refused":
                found.append(LookupError(name))
                continue
            found.append(add(connection, name))  # raises for a name that no row has
        return found

    gate = hold(writer)
    names = ("a", "refused", "b", "none", "a")
    asked = [writer.submit_joint(str(number), together, name) for number, name in enumerate(names)]
    gate.set()
    assert [asked[number].result() for number in (0, 2, 4)] == [1, 1, 2]
    for number, error in ((1, LookupError), (3, NoResultFound)):
        with pytest.raises(error):
            asked[number].result()
    writer.close()
    assert calls == [list(names), *([name] for name in names)]
    assert values(engine) == {"a": 2, "b": 1}
