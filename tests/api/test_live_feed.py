"""The feed and its listeners, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from penstock.api.live import feed as feeds
from penstock.api.live import listeners
from penstock.api.live.feed import Feed
from penstock.api.live.listeners import MOST_WAITING, MOST_WAITING_BYTES, Filter, JobListener, ListListener, Outgoing
from penstock.api.live.messages import KEEP_ALIVE, JobUpdate
from penstock.api.service import Service
from penstock.api.store import changes, jobs
from penstock.api.store.changes import Change
from penstock.core.lifecycle import Phase
from tests.support.listening import Ear, ear
from tests.support.service import Clock, add_job, new_service

EVERYTHING = Filter()
NEVER_SECONDS = 1e6
"""Longer than any test lasts: what waits for that is not heard."""


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first look a feed looks only when a commit wakes it."""
    monkeypatch.setattr(feeds, "TICK_SECONDS", NEVER_SECONDS)


@pytest.fixture
def other(database: str, service: Service, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    """A second service on the same database."""
    made = new_service(tmp_path, database, clock)
    yield made
    made.close()


async def enter(service: Service, uid: str, phase: Phase) -> None:
    def change(connection: Connection) -> None:
        jobs.enter_phase(connection, uid, phase, "Because", "", service.clock())

    await asyncio.to_thread(service.write, uid, change)


async def report(service: Service, uid: str, step: int) -> None:
    def change(connection: Connection) -> None:
        jobs.report(connection, [(uid, jobs.Reported(attempt=0, step=step, reported_at=service.clock()))])

    await asyncio.to_thread(service.write, uid, change)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())


@pytest.mark.usefixtures("only_woken")
def test_a_listener_hears_what_it_missed_then_how_the_job_is_then_what_happens(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        async with ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            (first,) = await hearing.until(1)
            assert [each.kind for each in hearing.heard] == ["hello", "event", "job"]
            assert first.data["status"]["phase"] == "Pending"
            await enter(service, uid, Phase.QUEUED)
            *_, second = await hearing.until(2)
            assert second.data["status"]["phase"] == "Queued"
            assert [(each.id, each.data["kind"]) for each in hearing.of("event")] == [("1", "created"), ("2", "phase")]

    run(scenario)
    assert service.feed.num_listeners == 0


def test_who_comes_again_goes_on_after_the_last_event(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        await enter(service, uid, Phase.QUEUED)
        async with ear(service.feed, JobListener(uid=uid, last_event=1)) as hearing:
            await hearing.until(1)
            assert [each.id for each in hearing.of("event")] == ["2"]

    run(scenario)


def test_what_another_service_commits_is_heard(service: Service, other: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        listener = JobListener(uid=uid, last_event=0)
        async with ear(service.feed, listener) as hearing, ear(service.feed, ListListener(filter=EVERYTHING)) as rows:
            await hearing.until(1)
            await rows.until(1)
            await enter(other, uid, Phase.QUEUED)
            *_, heard = await hearing.until(2)
            assert heard.data["status"]["phase"] == "Queued"
            *_, row = await rows.until(2)
            assert row.data == heard.data

    run(scenario)


def test_a_job_s_reports_are_told_at_most_once_a_second_and_what_happens_at_once(service: Service) -> None:
    uid = add_job(service).uid
    listener = JobListener(uid=uid, last_event=0)

    def heard_at(now: float) -> bool:
        (change,) = service.read(lambda connection: changes.read_changes(connection, [uid], {}))
        return listener.offer(JobUpdate(change), now)

    async def scenario() -> None:
        assert heard_at(100.0)
        await report(service, uid, 1)
        assert not heard_at(100.9), "it should be told again"
        assert heard_at(101.0)
        await report(service, uid, 2)
        await enter(service, uid, Phase.QUEUED)
        assert heard_at(101.1)

    run(scenario)


def test_of_many_reports_the_last_is_not_lost(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few are told."""
    for module, name in ((feeds, "TICK_SECONDS"), (feeds, "ROW_SECONDS"), (listeners, "REPORT_SECONDS")):
        monkeypatch.setattr(module, name, 0.1)
    uid, last = add_job(service).uid, 20

    async def messages_of(hearing: Ear) -> None:
        while not (progress := hearing.of("job")[-1].data["status"]["progress"]) or progress["step"] < last:
            await hearing.until(len(hearing.of("job")) + 1)

    async def scenario() -> None:
        listener = JobListener(uid=uid, last_event=0)
        async with ear(service.feed, listener) as hearing, ear(service.feed, ListListener(filter=EVERYTHING)) as rows:
            await hearing.until(1)
            await rows.until(1)
            for step in range(1, last + 1):
                await report(service, uid, step)
            await messages_of(hearing)
            await messages_of(rows)

    run(scenario)


def test_reports_that_come_too_soon_wait_for_what_happens(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "REPORT_SECONDS", NEVER_SECONDS)
    uid = add_job(service).uid

    async def scenario() -> None:
        async with ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            await hearing.until(1)
            for step in range(1, 20):
                await report(service, uid, step)
            await enter(service, uid, Phase.QUEUED)
            first, second = await hearing.until(2)
            assert first.data["status"]["progress"] is None
            assert second.data["status"]["progress"]["step"] == 19

    run(scenario)


@pytest.mark.usefixtures("only_woken")
def test_a_list_hears_at_once_of_a_row_that_was_not_told_lately(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "ROW_SECONDS", 0.0)
    uids = [add_job(service, name).uid for name in ("first", "second")]

    async def scenario() -> None:
        async with ear(service.feed, ListListener(filter=EVERYTHING)) as rows:
            await rows.until(2)
            for number, uid in enumerate(uids, start=3):
                await enter(service, uid, Phase.QUEUED)
                *_, row = await rows.until(number)
                assert (row.data["uid"], row.data["status"]["phase"]) == (uid, "Queued")

    run(scenario)


@pytest.mark.usefixtures("only_woken")
def test_a_row_that_was_told_lately_waits_and_holds_up_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "ROW_SECONDS", NEVER_SECONDS)
    told = add_job(service, "told").uid

    async def scenario() -> None:
        async with ear(service.feed, ListListener(filter=EVERYTHING)) as rows:
            await rows.until(1)
            await enter(service, told, Phase.QUEUED)
            fresh = await asyncio.to_thread(add_job, service, "fresh")
            await rows.until(2)
            assert [row.data["uid"] for row in rows.of("job")] == [told, fresh.uid]

    run(scenario)


def test_a_list_hears_of_its_own_jobs_only(service: Service) -> None:
    mine = add_job(service, "mine-1", labels={"team": "a", "kind": "x"}).uid
    others = [
        add_job(service, "mine-2", labels={"team": "b"}),
        add_job(service, "yours-1", labels={"team": "a"}),
        add_job(service, "mine-3", namespace="elsewhere", labels={"team": "a"}),
    ]
    wanted = Filter.of(("default",), {"team": "a"}, "mine")

    async def scenario() -> None:
        async with (
            ear(service.feed, ListListener(filter=wanted)) as hearing,
            ear(service.feed, ListListener(filter=EVERYTHING)) as all_rows,
        ):
            for uid in (*(each.uid for each in others), mine):
                await enter(service, uid, Phase.QUEUED)
            await hearing.until(1)
            while len({row.data["uid"] for row in all_rows.of("job") if row.data["status"]["phase"] == "Queued"}) < 4:
                await all_rows.until(len(all_rows.of("job")) + 1)
            assert {row.data["uid"] for row in hearing.of("job")} == {mine}

    run(scenario)


def test_who_does_not_read_is_dropped_and_nobody_waits(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        slow = JobListener(uid=uid, last_event=0)
        async with ear(service.feed, slow, deaf=True), ear(service.feed, JobListener(uid=uid, last_event=0)) as quick:
            await quick.until(1)
            assert service.feed.num_listeners == 2
            for number in range(MOST_WAITING):
                slow.outgoing.put(b"%d" % number)
            while service.feed.num_listeners == 2:
                await asyncio.sleep(0.01)
            await enter(service, uid, Phase.QUEUED)
            await quick.until(2)

    run(scenario)


def test_a_client_that_leaves_is_forgotten(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        async with ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            hearing.leave()
            while service.feed.num_listeners:
                await asyncio.sleep(0.01)
        async with ear(service.feed, ListListener(filter=EVERYTHING)) as hearing:  # the feed goes on for the next
            await enter(service, uid, Phase.QUEUED)
            await hearing.until(1)

    run(scenario)


def test_a_stream_ends_after_its_time_and_when_the_feed_is_closed(service: Service) -> None:
    async def ends(hearing: Ear) -> None:
        while not hearing.ended:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with ear(service.feed, ListListener(filter=EVERYTHING), most_seconds=0.2) as hearing:
            await ends(hearing)
        assert KEEP_ALIVE in hearing.raw
        async with ear(service.feed, ListListener(filter=EVERYTHING)) as hearing:
            service.feed.close()
            await ends(hearing)

    run(scenario)


def test_a_closed_feed_ends_streams_that_come_late_until_it_is_opened(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        service.feed.close()
        async with asyncio.timeout(5), ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            while not hearing.ended:
                await asyncio.sleep(0.01)
        service.feed.open()
        async with ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            await hearing.until(1)

    run(scenario)


def test_a_database_that_is_away_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, read_changes = iter(range(3)), changes.read_changes

    def stumbling(connection: Connection, uids: Collection[str], after: Mapping[str, int]) -> list[Change]:
        if next(failures, None) is not None:
            raise OperationalError("SELECT", {}, Exception("the database is away"))
        return read_changes(connection, uids, after)

    monkeypatch.setattr(feeds, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(changes, "read_changes", stumbling)
    uid = add_job(service).uid
    feed = Feed(service.engine, service.clock)

    async def scenario() -> None:
        async with ear(feed, JobListener(uid=uid, last_event=0)) as hearing:
            (heard,) = await hearing.until(1)
            assert heard.data["uid"] == uid

    run(scenario)


def test_a_feed_serves_one_event_loop_after_another(service: Service) -> None:
    uid = add_job(service).uid

    async def scenario() -> None:
        async with ear(service.feed, JobListener(uid=uid, last_event=0)) as hearing:
            await hearing.until(1)

    run(scenario)
    run(scenario)


def test_what_waits_is_taken_together_and_too_much_drops() -> None:
    async def scenario() -> None:
        outgoing = Outgoing(most_waiting=2)
        assert await outgoing.take(0.01) == b""
        outgoing.put(b"a")
        outgoing.put(b"b")
        assert await outgoing.take(0.01) == b"ab"
        for text in (b"a", b"b", b"c"):
            outgoing.put(text)
        assert outgoing.dropped.is_set()
        assert await outgoing.take(0.01) == b"ab"
        assert await outgoing.take(0.01) is None

    run(scenario)


def test_who_is_cancelled_just_as_something_comes_ends() -> None:
    async def scenario() -> None:
        outgoing = Outgoing()
        taking = asyncio.create_task(outgoing.take(60))
        await asyncio.sleep(0.01)
        outgoing.put(b"a")
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    run(scenario)


def test_too_many_bytes_drop_too_but_never_a_single_message() -> None:
    async def scenario() -> None:
        outgoing = Outgoing()
        large = b"x" * (MOST_WAITING_BYTES + 1)
        outgoing.put(large)
        assert not outgoing.dropped.is_set()
        assert await outgoing.take(0.01) == large
        outgoing.put(b"a")
        outgoing.put(large)
        assert outgoing.dropped.is_set()

    run(scenario)
