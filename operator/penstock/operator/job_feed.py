"""PipelineJobs as kopf's watch reports them, and as a list every minute finds them.

kopf watches, but a deletion that it missed is never reported, and a watch that ended says nothing at all
(docs/adr/0057). So a list every `LIST_SECONDS` removes vanished jobs and bounds the time that a change goes unnoticed.
A list is also how the operator learns whether the cluster defines PipelineJobs: kopf looks only when it starts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.core.errors import PenstockError
from penstock.kube.resources import JOBS, Resource
from penstock.kube.transport import KubeError, Listing
from penstock.operator.cache import Cache

log = logging.getLogger(__name__)

LIST_SECONDS = 60.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 15.0
ANSWER_SECONDS = 5.0
"""Longest wait of `JobFeed.refresh` for its list."""


class Lister(Protocol):
    """The call that lists PipelineJobs, which `penstock.kube.transport.Transport` makes."""

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """All objects of the namespace, or of all namespaces if it is empty."""
        ...


class JobFeed:
    """Passes PipelineJobs on to the cache. ``synced`` is set after the first list.

    ``on_defined`` is called in the feed's thread when the cluster serves PipelineJobs that it did not serve before.
    """

    name = JOBS.plural

    def __init__(self, kube: Lister, cache: Cache, namespace: str, clock: Callable[[], float]) -> None:
        self._kube, self._cache, self._namespace, self._clock = kube, cache, namespace, clock
        self._received_at = self._responded_at = clock()
        self._is_missing = False
        self._is_ending = False
        self._changed = threading.Condition()
        self._num_requested = self._num_answered = 0
        self.synced = threading.Event()
        self.on_defined: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="list-pipelinejobs", daemon=True)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the cluster last sent a list or an event."""
        return self._clock() - self._received_at

    @property
    def stuck_seconds(self) -> float:
        """Seconds since a list or an event last arrived or a list failed: an unreachable cluster is not stuck."""
        return self._clock() - self._responded_at

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
        self._received_at = self._responded_at = self._clock()
        if kind == "DELETED":
            self._cache.remove_job(item["metadata"]["uid"])
        else:
            self._cache.put_job(item)

    def refresh(self) -> None:
        """List now, and return when the cluster has answered or failed to, after `ANSWER_SECONDS` at the latest."""
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
        if self._is_missing:
            self._is_missing = False
            self.on_defined()

    def _report(self, error: Exception, wait: float) -> None:
        if isinstance(error, KubeError) and error.is_missing:
            self._is_missing = True
        unexpected = None if isinstance(error, PenstockError) else error
        log.warning("list of %s failed: %s; retrying in %.1f s", self.name, error, wait, exc_info=unexpected)
