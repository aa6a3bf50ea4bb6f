"""Watches of objects: a list first, then what changes, and a list again whenever the thread was lost.

What vanished unseen is missed in the next list, which kopf's own watches do not tell (docs/adr/0013).
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
"""Of a moment after all that a cluster ever tells."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 15.0
SHORTEST_WATCH_SECONDS = 1.0
"""Watches that end sooner are asked for with pauses; a cluster lets one go on for minutes."""


class Source(Protocol):
    """What a watch asks of a cluster; see `penstock.kube.transport.Transport`."""

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """All objects with the labels that ``selector`` names."""
        ...

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """What changes after ``version``, for some minutes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What to watch, and who is told: of everything there is, of one that came or changed, of one that went.

    Whoever is told may raise an error to be told everything again. An ``optional`` kind is one that a cluster may do
    without: it has no objects there. Of any other nothing is told until the cluster knows it again.
    """

    resource: Resource
    replace: Callable[[Listing], None]
    put: Callable[[Object], None]
    remove: Callable[[Object], None]
    selector: str = ""
    optional: bool = False


class Watcher:
    """One watch in a thread of its own. ``synced`` is set once everything there is was told."""

    def __init__(self, kube: Source, watched: Watched, namespace: str, clock: Callable[[], float]) -> None:
        self._kube, self._watched, self._namespace, self._clock = kube, watched, namespace, clock
        self._ending = threading.Event()
        self._heard_at = self._turned_at = clock()
        self.synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{watched.resource.plural}", daemon=True)

    @property
    def name(self) -> str:
        """What is watched."""
        return self._watched.resource.plural

    @property
    def silent_seconds(self) -> float:
        """How long nothing was heard from the cluster; a watch is asked for again each minute."""
        return self._clock() - self._heard_at

    @property
    def stuck_seconds(self) -> float:
        """How long the thread has neither heard anything nor found that it cannot: a cluster that is away is no fault
        of the watch's.
        """
        return self._clock() - self._turned_at

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Tell nothing of what is heard next, and end then. The thread does not keep the process alive."""
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
            except Exception as error:  # whatever it is: without this watch the others have half of the truth
                version = ""
                self._complain(error, wait)
            self._turned_at = self._clock()
            self._ending.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _complain(self, error: Exception, wait: float) -> None:
        if isinstance(error, KubeError) and error.is_expired:
            return
        unforeseen = None if isinstance(error, PenstockError) else error
        log.warning("watching %s: %s; again in %.1f s", self.name, error, wait, exc_info=unforeseen)

    def _list(self) -> str:
        watched = self._watched
        namespace = self._namespace if watched.resource.namespaced else ""
        try:
            listing = self._kube.list(watched.resource, namespace, watched.selector)
        except KubeError as error:
            if error.is_missing and watched.optional:
                watched.replace(Listing(objects=(), version=LAST_VERSION))
                self.synced.set()
            raise
        watched.replace(listing)
        self._heard_at = self._turned_at = self._clock()
        self.synced.set()
        return listing.version

    def _follow(self, version: str) -> str:
        """What changes after ``version``; the version that was heard of last."""
        watched = self._watched
        namespace = self._namespace if watched.resource.namespaced else ""
        for change in self._kube.watch(watched.resource, version, namespace, watched.selector):
            self._heard_at = self._turned_at = self._clock()
            if self._ending.is_set():
                break
            version = change.version
            self._tell(change)
        return version

    def _tell(self, change: Change) -> None:
        if change.found is None:
            return
        if change.removed:
            self._watched.remove(change.found)
        else:
            self._watched.put(change.found)
