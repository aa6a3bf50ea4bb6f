"""A watch hears of everything in the end, whatever the cluster says and however the line breaks."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.kube import watching
from penstock.kube.resources import PODS, Resource
from penstock.kube.transport import Change, KubeError, Listing, Object
from penstock.kube.watching import Watched, Watcher

LONG = 5.0
Script = Listing | KubeError | list[Change | Exception | float]


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team"}}


def listing(version: str, *names: str) -> Listing:
    return Listing(objects=tuple(pod(name) for name in names), version=version)


class Scripted:
    """A cluster that answers lists and watches one after the other as written; the last watch lasts."""

    def __init__(self, *script: Script) -> None:
        self.script = list(script)
        self.asked: list[str] = []
        self.over = threading.Event()

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        self.asked.append(f"list {resource.plural} {namespace} {selector}")
        answer = self._next()
        if isinstance(answer, KubeError):
            raise answer
        assert isinstance(answer, Listing)
        return answer

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        self.asked.append(f"watch {version}")
        answer = self._next()
        if isinstance(answer, KubeError):
            raise answer
        assert not isinstance(answer, Listing)
        for each in answer:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, float):
                self.over.wait(each)
            else:
                yield each

    def _next(self) -> Script:
        return self.script.pop(0) if self.script else [LONG]


class Notified:
    """What is known, by all that was told."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.replaced = 0

    def replace(self, listed: Listing) -> None:
        self.names, self.replaced = {each["metadata"]["name"] for each in listed.objects}, self.replaced + 1

    def put(self, found: Object) -> None:
        if found["metadata"]["name"] == "poison":
            raise ValueError("nobody can read this")
        if found["metadata"]["name"] == "again":
            raise UserError(what="tell me everything again")
        self.names.add(found["metadata"]["name"])

    def remove(self, found: Object) -> None:
        self.names.discard(found["metadata"]["name"])


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(watching, "LONGEST_WAIT_SECONDS", 0.02)


def watch(kube: Scripted, until: Callable[[Notified, Scripted], bool], *, optional: bool = False) -> Notified:
    """Watch until something is so; fails if it does not come to be."""
    told = Notified()
    watched = Watched(
        resource=PODS,
        replace=told.replace,
        put=told.put,
        remove=told.remove,
        selector="penstock.dev/job",
        optional=optional,
    )
    watcher = Watcher(kube, watched, "team", time.time)
    watcher.start()
    began = time.monotonic()
    while not until(told, kube) and time.monotonic() < began + LONG:
        time.sleep(0.005)
    watcher.stop()
    kube.over.set()
    assert until(told, kube), (told.names, kube.asked)
    return told


def test_a_list_and_what_changes_after_it() -> None:
    changes: list[Change | Exception | float] = [
        Change(version="6", object=pod("b")),
        Change(version="7", object=pod("a"), removed=True),
        Change(version="8"),
        LONG,
    ]
    kube = Scripted(listing("5", "a"), changes)
    watch(kube, lambda told, _: told.names == {"b"})
    assert kube.asked == ["list pods team penstock.dev/job", "watch 5"]


def test_it_goes_on_where_it_ended() -> None:
    kube = Scripted(listing("5"), [Change(version="6"), 1.1], [LONG])
    watch(kube, lambda _, kube: "watch 6" in kube.asked)
    assert kube.asked == ["list pods team penstock.dev/job", "watch 5", "watch 6"]


@pytest.mark.parametrize(
    "break_", [KubeError(410, "Expired", "too old"), KubeError(0, "Unreachable", "reset"), ValueError("half a line")]
)
def test_a_broken_line_is_followed_by_a_list_which_misses_what_vanished(break_: Exception) -> None:
    kube = Scripted(listing("5", "a", "b"), [Change(version="6"), break_], listing("9", "b"), [LONG])
    watch(kube, lambda told, kube: told.names == {"b"} and kube.asked[-1] == "watch 9")


def test_a_cluster_that_is_away_is_asked_again() -> None:
    away = KubeError(503, "Unavailable", "")
    watch(Scripted(away, away, listing("5", "a"), [LONG]), lambda told, _: told.names == {"a"})


UNKNOWN = KubeError(404, "Not Found", "page not found")


def test_an_optional_kind_that_the_cluster_does_not_know_has_no_objects() -> None:
    script = Scripted(UNKNOWN, listing("5", "a"), [LONG])
    told = watch(script, lambda told, _: told.names == {"a"}, optional=True)
    assert told.replaced == 2


def test_a_cluster_without_an_optional_kind_is_not_silent_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its answer is an answer: the age of the watch, which has an alert, does not grow."""
    kube, times = Scripted(*[UNKNOWN] * 50), itertools.count(0.0)
    known = Notified()
    watched = Watched(
        resource=PODS, replace=known.replace, put=known.put, remove=known.remove, selector="", optional=True
    )
    watcher = Watcher(kube, watched, "team", lambda: next(times))
    with caplog.at_level(logging.INFO):
        watcher.start()
        deadline = time.monotonic() + LONG
        while len(kube.asked) < 20 and time.monotonic() < deadline:
            time.sleep(0.005)
        watcher.stop()
        kube.over.set()
    assert len(kube.asked) >= 20
    assert watcher.silent_seconds < 10
    assert [record.getMessage() for record in caplog.records] == [
        "the cluster has no pods; looking for them every 0.02 s"
    ]


def test_a_definition_that_is_gone_says_nothing_of_its_objects() -> None:
    """Or anyone who begins to follow meanwhile would take them all for deleted."""
    script = Scripted(UNKNOWN, UNKNOWN, listing("5", "a"), [LONG])
    told = watch(script, lambda told, _: told.names == {"a"})
    assert told.replaced == 1


@pytest.mark.parametrize("name", ["poison", "again"])
def test_an_object_that_nobody_can_read_does_not_end_it(name: str) -> None:
    kube = Scripted(listing("5"), [Change(version="6", object=pod(name))], listing("7", "a"), [LONG])
    watch(kube, lambda told, _: told.names == {"a"})


def test_watches_that_end_at_once_are_asked_for_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(watching, "LONGEST_WAIT_SECONDS", 0.05)
    kube = Scripted(listing("5"), *([] for _ in range(100)))
    began = time.monotonic()
    watch(kube, lambda _, kube: len(kube.asked) >= 6)
    assert time.monotonic() - began >= 0.2


def test_silence_and_being_stuck() -> None:
    """A cluster that is away is silent; only a thread that does nothing is stuck."""
    now = [0.0]
    kube = Scripted(*(KubeError(0, "Unreachable", "") for _ in range(10_000)))
    told = Notified()
    watched = Watched(resource=PODS, replace=told.replace, put=told.put, remove=told.remove)
    watcher = Watcher(kube, watched, "", lambda: now[0])
    now[0] = 500.0
    assert watcher.stuck_seconds == watcher.silent_seconds == 500.0
    watcher.start()
    while len(kube.asked) < 3:
        time.sleep(0.005)
    assert (watcher.stuck_seconds, watcher.silent_seconds) == (0.0, 500.0)
    assert not watcher.synced.is_set()
    watcher.stop()
