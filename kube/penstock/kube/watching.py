"""Watches of objects: a list first, then changes, and a re-list after every gap.

An object deleted during a gap is missing from the next list; kopf's own watches do not report it (docs/adr/0013).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.kube.resources import Resource
from penstock.kube.transport import Change, KubeError, Listing, Object

log = logging.getLogger(__name__)

LAST_VERSION = str(2**63 - 1)
"""A resource version later than any that a cluster reports."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 15.0
SHORTEST_WATCH_SECONDS = 1.0
"""A watch that ends sooner is followed by a backoff; a cluster normally keeps one open for minutes."""


class Lists(Protocol):
    """A cluster whose objects can be listed, such as `penstock.kube.transport.Transport`."""

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """All objects with the labels that ``selector`` names."""
        ...


class Watches(Lists, Protocol):
    """A cluster whose objects can be listed and watched."""

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """Changes after ``version``, for a minute at most."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A resource to watch, with callbacks: for a full list, for an object added or modified, for an object removed.

    A callback may raise to force a full re-list. A cluster need not define an ``optional`` kind: its list is empty
    there. For any other kind no callback runs until the cluster defines it again.
    """

    resource: Resource
    replace: Callable[[Listing], None]
    put: Callable[[Object], None]
    remove: Callable[[Object], None]
    selector: str = ""
    optional: bool = False


class Contact:
    """Times of the last contact with the cluster. Subclasses update ``_received_at`` at every list or event, and
    ``_responded_at`` at every answer or error.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._received_at = self._responded_at = clock()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the cluster last sent a list or an event. At least one comes every minute, because watches are
        renewed and lists repeated.
        """
        return self._clock() - self._received_at

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the last answer or error: an unreachable cluster does not count as stuck."""
        return self._clock() - self._responded_at


class Watcher(Contact):
    """One watch in a thread of its own. ``synced`` is set after the first full list."""

    def __init__(self, kube: Watches, watched: Watched, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._kube, self._watched, self._namespace = kube, watched, namespace
        self._ending = threading.Event()
        self._is_reported_missing = False
        self.synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{watched.resource.plural}", daemon=True)

    @property
    def name(self) -> str:
        """The plural of the watched resource."""
        return self._watched.resource.plural

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ignore further changes and end at the next. The thread does not keep the process alive."""
        self._ending.set()

    def _run(self) -> None:
        wait, version = FIRST_WAIT_SECONDS, ""
        while not self._ending.is_set():
            began_at = self._clock()
            try:
                version = version or self._list()
                version = self._follow(version)
                if self._clock() - began_at >= SHORTEST_WATCH_SECONDS:
                    wait = FIRST_WAIT_SECONDS
                    continue
            except Exception as error:  # of any kind: without this watch the cache is incomplete
                version = ""
                self._report(error, wait)
            self._responded_at = self._clock()
            self._ending.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _report(self, error: Exception, wait: float) -> None:
        if isinstance(error, KubeError) and error.is_expired:
            return
        if self._is_missing_optional(error):
            if not self._is_reported_missing:
                log.info("the cluster has no %s; looking for them every %g s", self.name, LONGEST_WAIT_SECONDS)
            self._is_reported_missing = True
            return
        unexpected = None if isinstance(error, PenstockError) else error
        log.warning("watch of %s failed: %s; retrying in %.1f s", self.name, error, wait, exc_info=unexpected)

    def _is_missing_optional(self, error: Exception) -> bool:
        """Whether the cluster answered that it does not have this kind, and need not have it."""
        return isinstance(error, KubeError) and error.is_missing and self._watched.optional

    def _list(self) -> str:
        watched = self._watched
        namespace = self._namespace if watched.resource.namespaced else ""
        try:
            listing = self._kube.list(watched.resource, namespace, watched.selector)
        except KubeError as error:
            if self._is_missing_optional(error):
                watched.replace(Listing(objects=(), version=LAST_VERSION))
                self._received_at = self._clock()
                self.synced.set()
            raise
        watched.replace(listing)
        self._is_reported_missing = False
        self._received_at = self._responded_at = self._clock()
        self.synced.set()
        return listing.version

    def _follow(self, version: str) -> str:
        """Pass on changes after ``version``; return the last version."""
        watched = self._watched
        namespace = self._namespace if watched.resource.namespaced else ""
        for change in self._kube.watch(watched.resource, version, namespace, watched.selector):
            self._received_at = self._responded_at = self._clock()
            if self._ending.is_set():
                break
            version = change.version
            self._notify(change)
        return version

    def _notify(self, change: Change) -> None:
        if change.object is None:
            return
        if change.removed:
            self._watched.remove(change.object)
        else:
            self._watched.put(change.object)
