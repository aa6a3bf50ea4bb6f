"""PipelineJobs come from events, and what events missed comes from lists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kube.resources import JOBS, Resource
from penstock.kube.transport import KubeError, Listing
from penstock.operator import job_feed
from penstock.operator.cache import Cache
from penstock.operator.job_feed import JobFeed, WatchAudit
from tests.support.manifests import example

SOON = 5.0
MISSING = KubeError(404, "NotFound", "the server could not find the requested resource")
BROKEN = KubeError(500, "InternalError", "etcd")


def job(name: str, version: int) -> dict[str, Any]:
    manifest = example()
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {**manifest, "metadata": {**metadata, "generation": 1}}


def listing(version: int, *jobs: dict[str, Any]) -> Listing:
    return Listing(objects=jobs, version=str(version))


class Scripted:
    """Answers lists as written, one after the other, and then as the last time."""

    def __init__(self, *answers: Listing | Exception) -> None:
        self.answers = list(answers)
        self.num_lists = 0
        self.namespaces: set[str] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        assert (resource, selector) == (JOBS, "")
        self.may_answer.wait(SOON)
        self.namespaces.add(namespace)
        self.num_lists += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_feed, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(job_feed, "LONGEST_WAIT_SECONDS", 0.02)


@pytest.fixture
def feeds() -> Iterator[Callable[..., JobFeed]]:
    made: list[JobFeed] = []

    def feed(kube: Scripted, cache: Cache | None = None, clock: Callable[[], float] = time.time) -> JobFeed:
        made.append(JobFeed(kube, cache or Cache(clock), "team", clock))
        return made[-1]

    yield feed
    for each in made:
        each.stop()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names(cache: Cache) -> set[str]:
    return {snapshot.name for snapshot in cache.jobs()}


Feeds = Callable[..., JobFeed]


def test_events_fill_the_cache_and_empty_it(feeds: Feeds) -> None:
    cache = Cache(time.time)
    feed = feeds(Scripted(listing(1)), cache)
    for kind, item in ((None, job("a", 1)), ("ADDED", job("b", 2)), ("MODIFIED", job("a", 3))):
        feed.observe(kind, item)
    assert names(cache) == {"a", "b"}
    feed.observe("DELETED", job("a", 4))
    feed.observe("MODIFIED", job("a", 3))  # late
    assert names(cache) == {"b"}


def test_a_list_removes_what_vanished_and_keeps_what_is_newer(feeds: Feeds) -> None:
    cache, kube = Cache(time.time), Scripted(listing(5, job("kept", 2)))
    feed = feeds(kube, cache)
    for item in (job("vanished", 1), job("kept", 2), job("newer", 6)):
        feed.observe("ADDED", item)
    assert not feed.synced.is_set()
    feed.start()
    wait_for(feed.synced.is_set)
    assert names(cache) == {"kept", "newer"}
    assert kube.namespaces == {"team"}


def test_lists_are_regular(feeds: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_feed, "LIST_SECONDS", 0.02)
    kube = Scripted(listing(1))
    feeds(kube).start()
    wait_for(lambda: kube.num_lists >= 4)


@pytest.mark.parametrize(
    ("answers", "num_calls"),
    [
        ([listing(1)], 0),
        ([BROKEN, BROKEN, listing(1)], 0),
        ([MISSING, listing(1)], 1),
        ([listing(1), MISSING, BROKEN, MISSING, listing(2), listing(3)], 1),
        ([MISSING, listing(1), MISSING, listing(2)], 2),
    ],
)
def test_a_definition_that_comes_back_is_reported_once(
    feeds: Feeds, monkeypatch: pytest.MonkeyPatch, answers: list[Listing | Exception], num_calls: int
) -> None:
    monkeypatch.setattr(job_feed, "LIST_SECONDS", 0.01)
    kube, calls = Scripted(*answers), []
    feed = feeds(kube)
    feed.on_unwatched = lambda: calls.append(kube.num_lists)
    feed.expect_watch()
    feed.start()
    wait_for(lambda: kube.num_lists >= len(answers) + 2)
    assert len(calls) == num_calls


def test_a_refresh_returns_with_a_list_that_began_after_it(feeds: Feeds) -> None:
    cache, kube = Cache(time.time), Scripted(listing(1), listing(2, job("new", 2)))
    feed = feeds(kube, cache)
    feed.start()
    wait_for(feed.synced.is_set)
    feed.begin_watch()
    assert names(cache) == {"new"}
    assert kube.num_lists == 2


def test_a_refresh_does_not_wait_for_a_cluster_that_does_not_answer(
    feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_feed, "ANSWER_SECONDS", 0.1)
    kube = Scripted(listing(1))
    kube.may_answer.clear()
    feed = feeds(kube)
    feed.start()
    began = time.monotonic()
    feed.begin_watch()
    assert 0.1 <= time.monotonic() - began < SOON / 2
    kube.may_answer.set()


def test_a_refresh_returns_when_a_list_fails(feeds: Feeds) -> None:
    feed = feeds(Scripted(BROKEN))
    feed.start()
    began = time.monotonic()
    feed.begin_watch()
    assert time.monotonic() - began < SOON / 2
    assert not feed.synced.is_set()


def test_ages(feeds: Feeds) -> None:
    """An error is an answer, but brings no news."""
    now = [100.0]
    feed = feeds(Scripted(BROKEN), clock=lambda: now[0])
    now[0] = 130.0
    assert (feed.silent_seconds, feed.stuck_seconds) == (30.0, 30.0)
    feed.start()
    wait_for(lambda: feed.stuck_seconds == 0.0)
    assert feed.silent_seconds == 30.0
    feed.observe("ADDED", job("a", 1))
    assert feed.silent_seconds == 0.0


class TestAudit:
    """Times are in seconds, versions rise."""

    def test_the_example_of_the_module(self) -> None:
        audit = WatchAudit()
        assert audit.check([job("a", 5), job("b", 7)], 8, 0.0) == []
        audit.report(job("a", 5))
        audit.report(job("a", 9))
        assert audit.check([job("a", 9), job("b", 7)], 10, 60.0) == ["team/b"]

    def test_a_list_that_follows_at_once_says_nothing(self) -> None:
        audit = WatchAudit()
        audit.check([job("a", 5)], 8, 0.0)
        assert audit.check([job("a", 5)], 8, 1.0) == []
        audit.report(job("a", 5))
        assert audit.check([job("a", 5)], 8, 60.0) == []

    def test_what_vanished_is_no_longer_expected(self) -> None:
        audit = WatchAudit()
        audit.check([job("a", 5)], 8, 0.0)
        assert audit.check([], 9, 60.0) == []

    def test_another_watch_has_its_own_time(self) -> None:
        audit = WatchAudit()
        audit.check([job("a", 5)], 8, 0.0)
        audit.restart()
        assert audit.check([job("a", 5)], 8, 60.0) == []
        assert audit.check([job("a", 5)], 8, 120.0) == ["team/a"]

    def test_a_message_names_a_few(self) -> None:
        audit, jobs = WatchAudit(), [job(f"job-{number}", 5) for number in range(9)]
        audit.check(jobs, 8, 0.0)
        assert len(audit.check(jobs, 8, 60.0)) == job_feed.MOST_NAMES

    @given(st.data())
    def test_a_watch_that_reports_in_time_is_never_restarted_and_a_dead_one_always(self, data: st.DataObject) -> None:
        """A cluster whose jobs come, change and go; each change is reported, at the latest before the next list."""
        audit, jobs, pending, version = WatchAudit(), {}, [], 1
        is_dead = False
        for second in range(0, data.draw(st.integers(2, 6)) * 60, 60):
            for name, is_deleted, is_reported in data.draw(st.lists(st.tuples(NAMES, st.booleans(), st.booleans()))):
                version += 1
                jobs[name] = job(name, version)
                pending.append(jobs[name])
                if is_deleted:
                    del jobs[name]
                if is_reported:
                    report_all(audit, pending)
            expected = dict(jobs)
            assert audit.check(list(jobs.values()), version, float(second)) == []
            report_all(audit, pending)
        is_dead = bool(expected)
        version += 1
        for name in expected:
            jobs[name] = job(name, version)  # changed, and not reported from now on
        assert audit.check(list(jobs.values()), version, second + 60.0) == []
        assert bool(audit.check(list(jobs.values()), version, second + 120.0)) is is_dead


NAMES = st.sampled_from(["a", "b", "c"])


def report_all(audit: WatchAudit, pending: list[dict[str, Any]]) -> None:
    for item in pending:
        audit.report(item)
    pending.clear()


def test_what_the_watch_does_not_report_restarts_it(feeds: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_feed, "LIST_SECONDS", 0.05)
    monkeypatch.setattr(job_feed, "REPORT_SECONDS", 0.04)
    restarts: list[bool] = []
    feed = feeds(Scripted(listing(6, job("a", 5))))
    feed.on_unwatched = lambda: restarts.append(True)
    feed.expect_watch()
    feed.start()
    wait_for(lambda: bool(restarts))
    feed.observe(None, job("a", 5))
    time.sleep(0.2)
    num_restarts = len(restarts)
    time.sleep(0.2)
    assert len(restarts) == num_restarts


def test_an_unexpected_error_is_logged_with_its_traceback(feeds: Feeds, caplog: pytest.LogCaptureFixture) -> None:
    kube = Scripted(Listing(objects=(), version="none"), listing(1))
    with caplog.at_level(logging.WARNING):
        feed = feeds(kube)
        feed.start()
        wait_for(feed.synced.is_set)
    (record,) = caplog.records
    assert record.getMessage().startswith("list of pipelinejobs failed: ")
    assert record.exc_info is not None
