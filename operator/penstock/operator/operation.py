"""The operation: watches fill the cache, the cache's news go to the queue, and the queue's turn is a reconcile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from penstock.core.errors import PenstockError
from penstock.core.instants import parse_instant
from penstock.kube.connecting import connect
from penstock.kube.names import SERVICE_LEASE, UID_LABEL
from penstock.kube.resources import JOBS, JOBSETS, LEASES, NODES, PODS
from penstock.kube.transport import KubeError, Listing
from penstock.kube.watching import Watched, Watcher
from penstock.operator.actions import Actions
from penstock.operator.announcing import Announcer
from penstock.operator.cache import Cache
from penstock.operator.kube import HttpKube, Kube
from penstock.operator.planning import Planning
from penstock.operator.reconcile import Reconciler
from penstock.operator.seen import see_jobset, see_node, see_pod
from penstock.operator.settings import Settings, settings_from
from penstock.operator.workqueue import WorkQueue
from penstock.planning.process import Planner, ProcessPlanner

log = logging.getLogger(__name__)

NUM_THREADS = 16
SYNC_SECONDS = 60.0
SERVICE_LOOK_SECONDS = 5.0
SERVICE_SILENCE_SECONDS = 30.0
MOST_SILENT_SECONDS = 180.0


class StuckError(PenstockError):
    """A watch has not been heard of for long."""


class Operation:
    """One operator on the cluster behind ``kube``. ``clock`` gives seconds since the epoch."""

    def __init__(self, kube: Kube, planner: Planner, settings: Settings, clock: Callable[[], float]) -> None:
        self._kube, self._settings, self._clock = kube, settings, clock
        self.cache = Cache(self._news)
        self._planning = Planning(planner, settings.num_planners)
        announcer = Announcer(kube, clock)
        actions = Actions(kube, self.cache, settings)
        self._reconciler = Reconciler(self.cache, actions, self._planning, clock, announcer.phase)
        self._queue = WorkQueue(self._reconcile, self._failed)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reconcile")
        self._watchers = [Watcher(kube, watched, settings.namespace, clock) for watched in self._watched()]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats: list[asyncio.Task[None]] = []

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch, and return once everything there is is known."""
        for watcher in self._watchers:
            watcher.start()
        synced = [loop.run_in_executor(self._threads, watcher.synced.wait, SYNC_SECONDS) for watcher in self._watchers]
        for watcher, done in zip(self._watchers, await asyncio.gather(*synced), strict=True):
            if not done:
                log.warning("%s cannot be listed yet; jobs wait for it", watcher.name)
        self._loop = loop
        self._beats = [loop.create_task(self._resync()), loop.create_task(self._look_for_service())]

    async def close(self) -> None:
        """Finish what is in flight, and plan no further."""
        for beat in self._beats:
            beat.cancel()
        for watcher in self._watchers:
            watcher.stop()
        await self._queue.close()
        self._planning.close()
        self._threads.shutdown(wait=False)

    def silences(self) -> dict[str, float]:
        """Seconds that each watch was silent; raises `StuckError` if one is for too long."""
        found = {watcher.name: round(watcher.silent_seconds, 1) for watcher in self._watchers}
        stuck = [name for name, seconds in found.items() if seconds > MOST_SILENT_SECONDS]
        if stuck:
            raise StuckError(f"nothing was heard of {', '.join(stuck)} for {MOST_SILENT_SECONDS:.0f} s")
        return found

    # The queue

    def _news(self, uid: str) -> None:
        """From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._queue.add, uid)

    async def _reconcile(self, uid: str) -> float | None:
        assert self._loop is not None, "news come once the operation has begun"
        return await self._loop.run_in_executor(self._threads, self._reconciler.reconcile, uid)

    def _failed(self, uid: str, error: Exception, failures: int) -> None:
        job = self.cache.job(uid)
        name = f"{job.namespace}/{job.name}" if job else uid
        if isinstance(error, PenstockError):
            log.warning("job %s: %s (%d in a row)", name, error, failures)
        else:
            log.error("job %s (%d in a row)", name, failures, exc_info=error)

    async def _resync(self) -> None:
        """Every job once a minute, and those that vanished unseen."""
        assert self._loop is not None
        while True:
            try:
                listing = partial(self._kube.list, JOBS, self._settings.namespace)
                jobs = (await self._loop.run_in_executor(self._threads, listing)).objects
                for job in jobs:
                    self.cache.put_job(job)
                self.cache.keep_jobs(job["metadata"]["uid"] for job in jobs)
            except KubeError as error:
                log.warning("jobs cannot be listed: %s", error)
            for uid in self.cache.uids():
                self._queue.add(uid)
            await asyncio.sleep(self._settings.resync_seconds)

    async def _look_for_service(self) -> None:
        """The service renews its Lease as long as it is there."""
        assert self._loop is not None
        while True:
            there = await self._loop.run_in_executor(self._threads, self._service_is_there)
            self.cache.see_service(there, self._clock())
            await asyncio.sleep(SERVICE_LOOK_SECONDS)

    def _service_is_there(self) -> bool:
        try:
            lease = self._kube.get(LEASES, self._settings.own_namespace, SERVICE_LEASE)
            renewed_at = parse_instant(lease["spec"].get("renewTime"), "renewTime") or 0.0
        except (KubeError, PenstockError):
            return False
        return self._clock() - renewed_at < SERVICE_SILENCE_SECONDS

    # Watches

    def _watched(self) -> list[Watched]:
        cache = self.cache

        def replace_jobsets(found: Listing) -> None:
            cache.replace_jobsets(map(see_jobset, found.objects))

        def replace_pods(found: Listing) -> None:
            cache.replace_pods(map(see_pod, found.objects))

        def replace_nodes(found: Listing) -> None:
            cache.replace_nodes(map(see_node, found.objects))

        return [
            Watched(
                resource=JOBSETS,
                replace=replace_jobsets,
                put=lambda found: cache.put_jobset(see_jobset(found)),
                remove=lambda found: cache.remove_jobset(see_jobset(found)),
                selector=UID_LABEL,
            ),
            Watched(
                resource=PODS,
                replace=replace_pods,
                put=lambda found: cache.put_pod(see_pod(found)),
                remove=lambda found: cache.remove_pod(see_pod(found)),
                selector=UID_LABEL,
            ),
            Watched(
                resource=NODES,
                replace=replace_nodes,
                put=lambda found: cache.put_node(see_node(found)),
                remove=lambda found: cache.remove_node(found["metadata"]["name"]),
            ),
        ]


def operation_from(clock: Callable[[], float]) -> Operation:
    """The operation that this process's environment asks for, on the cluster that it is in or that kubectl means."""
    settings = settings_from(os.environ)
    return Operation(HttpKube(connect(2 * NUM_THREADS)), ProcessPlanner(), settings, clock)
