"""Notices between services, on a real PostgreSQL."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Iterator

import pytest
from sqlalchemy import Engine, text

from penstock.api.live import notices as module
from penstock.api.live.notices import MOST_UIDS, Notices
from penstock.api.store.engine import make_engine, parse_url
from tests.support import postgres

PATIENCE_SECONDS = 60.0
Heard = queue.SimpleQueue[Collection[str]]


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    with postgres.database(postgres_url) as url:
        made = make_engine(parse_url(url))
        yield made
        made.dispose()


@pytest.fixture
def service(engine: Engine) -> Iterator[Callable[[], tuple[Notices, Heard]]]:
    """Makes one more service on the database, which listens once this returns."""
    made: list[Notices] = []

    def make() -> tuple[Notices, Heard]:
        heard: Heard = queue.SimpleQueue()
        made.append(Notices(engine, heard.put))
        listening(engine, len(made))
        return made[-1], heard

    yield make
    for each in made:
        each.close()


def listening(engine: Engine, count: int) -> None:
    """Wait for so many connections that listen."""
    asked = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN penstock' AND state = 'idle'")
    end = time.monotonic() + PATIENCE_SECONDS
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while connection.execute(asked).scalar_one() < count:
            assert time.monotonic() < end
            time.sleep(0.01)


def all_of(heard: Heard, uids: Collection[str]) -> list[str]:
    """What is heard until all of these were."""
    found: list[str] = []
    while not set(uids) <= set(found):
        found += heard.get(timeout=PATIENCE_SECONDS)
    return found


def test_others_hear_what_one_tells(service: Callable[[], tuple[Notices, Heard]]) -> None:
    (one, of_one), (_, of_two), (_, of_three) = service(), service(), service()
    one.notify(["a", "b"])
    for heard in (of_two, of_three):
        assert sorted(all_of(heard, "ab")) == ["a", "b"]
    one.notify(["c"])
    assert all_of(of_two, "c") == ["c"]
    assert of_one.empty()


def test_many_uids_are_told_in_parts(service: Callable[[], tuple[Notices, Heard]]) -> None:
    (one, _), (_, heard) = service(), service()
    uids = [f"{number:036}" for number in range(2 * MOST_UIDS + 1)]
    one.notify(uids)
    assert sorted(all_of(heard, uids)) == uids


def test_a_lost_connection_is_made_again(
    service: Callable[[], tuple[Notices, Heard]], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.05)
    (one, _), (_, heard) = service(), service()
    others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid) {others}"))
    listening(engine, 2)
    end = time.monotonic() + PATIENCE_SECONDS
    while heard.empty():  # the other connection may be lost with what it was given
        assert time.monotonic() < end
        one.notify(["a"])
        time.sleep(0.05)
    assert list(heard.get()) == ["a"]


def test_it_ends_at_once_whenever_that_is(engine: Engine) -> None:
    for _ in range(20):
        Notices(engine, lambda uids: None).close()
