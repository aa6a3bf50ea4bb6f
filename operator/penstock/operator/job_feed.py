"""Feed of PipelineJobs into the cache: from kopf's watch, and from a list every minute that checks the watch.

kopf watches, but a deletion that it missed is never reported (docs/adr/0057). So a list every `LIST_SECONDS` removes
vanished jobs and bounds the time that a change goes unnoticed.

kopf looks for kinds only when it starts. If it did not find PipelineJobs, it has no watch, which looks like a watch
without changes. Two rules detect this. First, a list that succeeds after a 404 means that the CustomResourceDefinition
is new. Second, the watch has to report every object of a list before the next list, because kopf reports all objects
when it starts, and every change after that. For example:

    list at 0 s     a at version 5, b at version 7
    watch           a at version 5, a at version 9
    list at 60 s    a at version 9, b at version 7: b was not reported, so PipelineJobs are not watched
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.core.errors import PenstockError
from penstock.kube.resources import JOBS
from penstock.kube.transport import KubeError
from penstock.kube.watching import Contact, Lists
from penstock.operator.cache import Cache

log = logging.getLogger(__name__)

LIST_SECONDS = 60.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 15.0
REPORT_SECONDS = 30.0
"""Time in which a watch has to report the objects of a list."""

MOST_NAMES = 3
"""Largest number of objects that a log message names."""

ANSWER_SECONDS = 5.0
"""Longest wait of `JobFeed.begin_watch` for its list."""


class JobFeed(Contact):
    """Passes PipelineJobs on to the cache. ``synced`` is set after the first list. Lists go on every minute, even if
    kopf's watch is dead.

    ``on_unwatched`` is called in the feed's thread if kopf has to be restarted to watch PipelineJobs. It is not called
    before the first `expect_watch`, because kopf looks for kinds only after its start handlers.
    """

    name = JOBS.plural

    def __init__(self, kube: Lists, cache: Cache, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._kube, self._cache, self._namespace = kube, cache, namespace
        self._is_missing = self._is_watch_expected = False
        self._is_ending = False
        self._changed = threading.Condition()
        self._num_requested = self._num_answered = 0
        self.synced = threading.Event()
        self.on_unwatched: Callable[[], None] = lambda: None
        self._audit = WatchAudit()
        self._thread = threading.Thread(target=self._run, name="list-pipelinejobs", daemon=True)

    def start(self) -> None:
        """Start the thread, which lists at once."""
        self._thread.start()

    def stop(self) -> None:
        """List no more. The thread does not keep the process alive."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def observe(self, kind: str | None, item: Mapping[str, Any]) -> None:
        """Take over an event of kopf's watch; ``kind`` is None for an object of kopf's own list."""
        self._received_at = self._clock()
        self._audit.report(item)
        if kind == "DELETED":
            self._cache.remove_job(item["metadata"]["uid"])
        else:
            self._cache.put_job(item)

    def expect_watch(self) -> None:
        """Forget earlier reports, because kopf is about to watch and will report every object."""
        self._audit.restart()
        self._is_watch_expected = True

    def begin_watch(self) -> None:
        """List now, because kopf is about to watch. Return after the answer or an error, at the latest after
        `ANSWER_SECONDS`.
        """
        self.expect_watch()
        with self._changed:
            self._num_requested += 1
            number = self._num_requested
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_answered >= number or self._is_ending, ANSWER_SECONDS)

    def _run(self) -> None:
        wait = FIRST_WAIT_SECONDS
        while not self._is_ending:
            number = self._num_requested
            try:
                self._list()
                pause, wait = LIST_SECONDS, FIRST_WAIT_SECONDS
            except Exception as error:  # of any kind: without lists the cache would keep vanished jobs
                self._report(error, wait)
                pause, wait = wait, min(2 * wait, LONGEST_WAIT_SECONDS)
            self._responded_at = self._clock()
            with self._changed:
                self._num_answered = number
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._num_requested > self._num_answered or self._is_ending, pause)

    def _list(self) -> None:
        listing = self._kube.list(JOBS, self._namespace)
        self._cache.replace_jobs(listing.objects, int(listing.version))
        self._received_at = self._clock()
        self.synced.set()
        is_defined_again, self._is_missing = self._is_missing, False
        if not self._is_watch_expected:
            return
        unreported = self._audit.check(listing.objects, int(listing.version), self._clock())
        if unreported:
            log.warning("the watch of %s did not report %s; starting kopf again", self.name, ", ".join(unreported))
        if is_defined_again or unreported:
            self.on_unwatched()

    def _report(self, error: Exception, wait: float) -> None:
        if isinstance(error, KubeError) and error.is_missing:
            self._is_missing = True
        unexpected = None if isinstance(error, PenstockError) else error
        log.warning("list of %s failed: %s; retrying in %.1f s", self.name, error, wait, exc_info=unexpected)


class WatchAudit:
    """Compares lists with the reports of a watch. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._listed_at: float | None = None

    def restart(self) -> None:
        """Forget all reports, because a new watch begins and reports every object."""
        with self._lock:
            self._reported, self._expected, self._listed_at = {}, {}, None

    def report(self, item: Mapping[str, Any]) -> None:
        """Record that the watch reported the object."""
        uid, version = _identity(item)
        with self._lock:
            self._reported[uid] = max(version, self._reported.get(uid, 0))

    def check(self, items: Iterable[Mapping[str, Any]], version: int, now: float) -> list[str]:
        """Return at most `MOST_NAMES` objects that the former list contained and the watch has not reported since.

        A list that comes less than `REPORT_SECONDS` after the former one is ignored.
        """
        listed = {_identity(item): item["metadata"] for item in items}
        with self._lock:
            if self._listed_at is not None and now - self._listed_at < REPORT_SECONDS:
                return []
            unreported = [
                f"{metadata.get('namespace')}/{metadata['name']}"
                for (uid, _), metadata in listed.items()
                if self._reported.get(uid, 0) < self._expected.get(uid, 0)
            ]
            self._listed_at, self._expected = now, dict(listed.keys())
            vanished = self._reported.keys() - self._expected.keys()
            for uid in [uid for uid in vanished if self._reported[uid] <= version]:
                del self._reported[uid]
        return unreported[:MOST_NAMES]


def _identity(item: Mapping[str, Any]) -> tuple[str, int]:
    return item["metadata"]["uid"], int(item["metadata"]["resourceVersion"])
