"""What is old goes and the rest stays, on a clock that is moved by hand."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from sqlalchemy import Connection, Table, func, insert, select
from sqlalchemy.exc import OperationalError

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.start.background import forget_old
from penstock.api.store import jobs, plan_requests, plans, retention, series
from penstock.api.store.plan_requests import NoSuchRequestError, State
from penstock.api.store.retention import DAY_SECONDS, LIMITS
from penstock.api.store.schema import audit, idempotency, log_lines, points, rollups, sessions, timelines
from penstock.api.store.schema import jobs as jobs_table
from penstock.api.store.schema import plans as plans_table
from penstock.api.store.series import ALL_RANKS, Point
from penstock.api.store.writer import Writer
from tests.support.sample_run import sample_plan
from tests.support.service import NOW, Clock, add_job, browser_of, client_of, job_manifest
from tests.support.whatif import add_request, request_of


def count(service: Service, table: Table) -> int:
    return service.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


def add(service: Service, uid: str, steps: range, at: float, attempt: int = 1) -> None:
    new = [Point(name, ALL_RANKS, step, float(step)) for name in ("loss", "speed") for step in steps]
    service.write(uid, lambda c: series.add_points(c, {(uid, attempt): new}, at))


def later(clock: Clock, days: float) -> None:
    clock.now = NOW + days * DAY_SECONDS


def test_the_table_of_limits() -> None:
    assert {limit.what: limit.seconds / DAY_SECONDS for limit in LIMITS} == {
        "points": 7, "roll-ups": 90, "idempotency keys": 1, "deleted jobs": 90, "audit entries": 90, "sessions": 1,
        "requests for plans": 30, "plans": 90,
    }  # fmt: skip


def test_old_points_go_and_their_rollups_stay(service: Service, clock: Clock) -> None:
    uid = add_job(service).uid
    add(service, uid, range(32), NOW)
    add(service, uid, range(32, 40), NOW + 3 * DAY_SECONDS)
    add(service, uid, range(20, 30), NOW + 3 * DAY_SECONDS, attempt=2)
    later(clock, 6.9)
    forget_old(service)
    assert count(service, points) == 2 * 50
    later(clock, 7.1)
    forget_old(service)
    assert count(service, points) == 2 * (18 + 1)
    chart = service.read(lambda c: series.charts(c, uid, most=39)[("loss", ALL_RANKS)])
    kept = [(each.step, each.attempt) for each in chart.points]
    assert kept == [(0, 1), (16, 1), (20, 2)], "rolled up, as the newest attempt has it, and nothing hidden"
    assert chart.first is not None
    assert (chart.first.step, chart.last.step) == (0, 29)
    later(clock, 10.1)
    forget_old(service)
    assert count(service, points) == 2 * 2, "the first of each attempt: where it began stays exact"
    assert count(service, rollups) == 2 * (3 + 1 + 1 + 1)
    later(clock, 101)
    forget_old(service)
    assert (count(service, points), count(service, rollups)) == (0, 0)


def test_a_bucket_that_still_grows_is_kept_whole(service: Service, clock: Clock) -> None:
    uid = add_job(service).uid
    add(service, uid, range(8), NOW)
    add(service, uid, range(8, 10), NOW + 5 * DAY_SECONDS)
    later(clock, 8)
    forget_old(service)
    assert count(service, points) == 2 * 10


def test_old_rollups_go(service: Service, clock: Clock) -> None:
    uid = add_job(service).uid
    add(service, uid, range(300), NOW)
    add(service, uid, range(512, 520), NOW + 30 * DAY_SECONDS)
    later(clock, 91)
    forget_old(service)
    assert (count(service, points), count(service, rollups)) == (0, 2 * 2)
    later(clock, 121)
    forget_old(service)
    assert count(service, rollups) == 0


@pytest.mark.parametrize("size", [1, 7, 500])
def test_work_is_done_in_slices(service: Service, clock: Clock, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """And nothing is left out between them."""
    for name in ("one", "two"):
        add(service, add_job(service, name).uid, range(100), NOW)
    monkeypatch.setattr(
        retention,
        "LIMITS",
        [retention.Limit(what=e.what, seconds=e.seconds, find=e.find, drop=e.drop, most=size) for e in LIMITS],
    )
    writes: list[str] = []
    write = Writer.write

    def counted(self: Writer, key: str, change: object) -> object:
        writes.append(key)
        return write(self, key, change)  # type: ignore[arg-type]

    monkeypatch.setattr(Writer, "write", counted)
    later(clock, 8)
    forget_old(service)
    assert count(service, points) == 2 * 2, "the first of each"
    assert len(writes) == -(-28 // size)


def test_a_key_may_be_used_again_after_a_day(service: Service, clock: Clock) -> None:
    client, key = client_of(service, Role.EDITOR), {"Idempotency-Key": "k"}
    made = client.post("/v1/jobs", json=job_manifest(), headers=key)
    later(clock, 0.9)
    forget_old(service)
    assert client.post("/v1/jobs", json=job_manifest(), headers=key).text == made.text
    later(clock, 1.1)
    forget_old(service)
    assert count(service, idempotency) == 0
    assert client.post("/v1/jobs", json=job_manifest("other"), headers=key).status_code == 201


def test_the_audit_log_goes_back_ninety_days(service: Service, clock: Clock) -> None:
    client_of(service, Role.EDITOR).post("/v1/jobs", json=job_manifest())
    service.write("audit", lambda c: None)
    later(clock, 89)
    forget_old(service)
    assert count(service, audit) == 1
    later(clock, 91)
    forget_old(service)
    assert count(service, audit) == 0


def test_sessions_are_forgotten_a_day_after_they_expire(service: Service, clock: Clock) -> None:
    browser_of(service, Role.VIEWER)
    later(clock, 1.4)
    forget_old(service)
    assert count(service, sessions) == 1
    later(clock, 1.6)
    forget_old(service)
    assert count(service, sessions) == 0


def test_requests_for_plans_are_forgotten_a_month_after_their_end(service: Service, clock: Clock) -> None:
    for each in ("old", "new", "open"):
        add_request(service, each)
    service.write("old", lambda c: plan_requests.cancel(c, "old", NOW))
    service.write("new", lambda c: plan_requests.cancel(c, "new", NOW + DAY_SECONDS))
    later(clock, 30.5)
    forget_old(service)
    with pytest.raises(NoSuchRequestError):
        request_of(service, "old")
    assert request_of(service, "new").state is State.CANCELED
    assert request_of(service, "open").state is State.QUEUED


def test_plans_go_after_the_jobs_that_went_by_them(service: Service, clock: Clock) -> None:
    first, second = add_job(service, "first").uid, add_job(service, "second").uid
    for uid, day in ((first, 1), (second, 2)):
        service.write(uid, partial(plans.keep_plan, uid=uid, attempt=1, plan=sample_plan(), now=NOW))
        assert count(service, plans_table) == 1, "both go by the same"
        service.write(uid, partial(jobs.mark_deleted, uid=uid, now=NOW + day * DAY_SECONDS))
    later(clock, 91.5)
    forget_old(service)
    assert (count(service, jobs_table), count(service, plans_table)) == (1, 1)
    later(clock, 92.5)
    forget_old(service)
    assert (count(service, jobs_table), count(service, plans_table)) == (0, 0)


def test_deleted_jobs_are_forgotten_with_all_they_left(service: Service, clock: Clock) -> None:
    live, gone = add_job(service, "live").uid, add_job(service, "gone").uid
    for uid in (live, gone):
        service.write(uid, partial(leave, uid=uid))
        add(service, uid, range(4), NOW + 50 * DAY_SECONDS)
    service.write(gone, lambda c: jobs.mark_deleted(c, gone, NOW))
    later(clock, 89)
    forget_old(service)
    assert count(service, jobs_table) == 2
    later(clock, 91)
    forget_old(service)
    assert service.read(lambda c: jobs.get(c, live)).uid == live
    for table, left in ((jobs_table, 1), (log_lines, 1), (timelines, 1), (rollups, 4)):
        assert count(service, table) == left, table.name


def leave(connection: Connection, uid: str) -> None:
    line = {"uid": uid, "rank": 0, "number": 1, "attempt": 1, "at": NOW, "level": "info", "message": "hello"}
    connection.execute(insert(log_lines).values(line))
    connection.execute(insert(timelines).values(uid=uid, attempt=1, step=0, body=b""))


def test_it_stops_when_asked_to(service: Service, clock: Clock) -> None:
    add(service, add_job(service).uid, range(4), NOW)
    later(clock, 100)
    stopping = threading.Event()
    stopping.set()
    forget_old(service, stopping.is_set)
    assert count(service, points) == 8


def test_a_database_that_does_not_answer_is_tried_again(
    service: Service, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(service, add_job(service).uid, range(4), NOW)
    later(clock, 8)

    def fail(self: Writer, key: str, change: object) -> object:
        raise OperationalError("", None, Exception("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", fail)
        forget_old(service)
    assert count(service, points) == 8
    forget_old(service)
    assert count(service, points) == 2, "the first of each"


def test_a_service_that_ends_is_let_go(service: Service, clock: Clock) -> None:
    add(service, add_job(service).uid, range(4), NOW)
    later(clock, 8)
    service.writer.close()
    forget_old(service)
    assert count(service, points) == 8
