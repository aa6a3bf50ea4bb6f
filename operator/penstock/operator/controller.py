"""Controller loop: kopf and watches update the cache, cache events enqueue job keys, workers reconcile them.

Four tasks run periodically: a resync of all jobs, which also updates the free capacity; the poll of the service's
Lease; the reconcile of ClusterProfiles; and the poll of the planner, which enqueues the jobs that wait for a finished
plan request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from penstock.core.errors import PenstockError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase, SetPhase
from penstock.kube.connecting import connect
from penstock.kube.resources import NODES, PODS
from penstock.kube.transport import KubeError
from penstock.kube.watching import Contact, Watcher
from penstock.operator.actions import Actions
from penstock.operator.agents import Agents, fetch_from_pod
from penstock.operator.cache import Cache, JobSnapshot
from penstock.operator.capacity import Offer, num_pods, offers
from penstock.operator.cluster_profiles import ClusterProfiles
from penstock.operator.events import EventRecorder, log_fields
from penstock.operator.job_feed import JobFeed
from penstock.operator.kube import HttpKube, Kube
from penstock.operator.metrics import MeteredKube, Metrics
from penstock.operator.planning import Planning
from penstock.operator.reconcile import Reconciler
from penstock.operator.service_lease import ServiceLease
from penstock.operator.settings import Settings
from penstock.operator.watches import watched
from penstock.operator.workqueue import Level, WorkQueue, backoff_seconds
from penstock.planner.worker.process import Planner, ProcessPlanner

log = logging.getLogger(__name__)

NUM_LAUNCHERS, NUM_THREADS = 32, 6
"""Limits of concurrent reconciles: of jobs before their first attempt, and of others.

A busy apiserver divides its time among concurrent calls. First launches get most of them, because users wait for these.
"""

NUM_POLLERS = 16
"""Limit of concurrent requests to agents."""

FLUSH_SECONDS = 5.0
SYNC_SECONDS = 60.0
SYNC_POLL_SECONDS = 0.05
UNSYNCED_SECONDS = 1.0
SERVICE_POLL_SECONDS = 5.0
PLANNING_POLL_SECONDS = 0.1
PROFILES_POLL_SECONDS = 5.0
MOST_STUCK_SECONDS = 180.0


class NotStartedError(PenstockError):
    """The controller still waits for the first list of all objects, or has ended."""


class StuckError(PenstockError):
    """A watch or list has got neither an answer nor an error for too long."""


class Controller:
    """One operator on the cluster behind ``kube``. ``clock`` gives seconds since the epoch."""

    def __init__(self, kube: Kube, planner: Planner, settings: Settings, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._metrics = Metrics(self.registry, has_service=bool(settings.service))
        self._kube, self._settings = MeteredKube(kube, self._metrics), settings
        self.cache = Cache(clock, self._notify)
        self._planning = Planning(planner, settings.num_planners, self._metrics.planning.observe)
        self._event_writer = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._events = EventRecorder(self._kube, clock, self._event_writer.submit)
        actions = Actions(self._kube, self.cache, settings, clock)
        self._profiles = ClusterProfiles(self._kube, self.cache, actions, settings.measuring_namespace, clock)
        self._agent_threads = ThreadPoolExecutor(NUM_POLLERS, thread_name_prefix="agents")
        agents = Agents(fetch_from_pod, clock, self._agent_threads.submit, self._notify)
        self._reconciler = Reconciler(self.cache, actions, self._planning, agents, clock, self._record_phase)
        self._queue = WorkQueue(
            self._reconcile, self._failed, num_workers=NUM_THREADS, num_first=NUM_LAUNCHERS, is_first=self._is_new
        )
        self._threads = ThreadPoolExecutor(NUM_LAUNCHERS + NUM_THREADS, thread_name_prefix="reconcile")
        self.jobs = JobFeed(self._kube, self.cache, settings.namespace, clock)
        watchers = [Watcher(self._kube, resource, settings.namespace, clock) for resource in watched(self.cache)]
        self._watchers: list[JobFeed | Watcher] = [self.jobs, *watchers]
        self._service_lease, self._clock = ServiceLease(self._kube, settings.own_namespace, clock), clock
        self._is_lease_held: bool | None = None
        self._is_watching = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._periodic: list[asyncio.Task[None]] = []
        self._export_gauges()

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch, and return once the cache is synced, after `SYNC_SECONDS` at the latest.

        May be called again. After a cancelled start the watches still run, and the call waits for the sync. After a
        completed start it only lists all jobs, because kopf did not watch them between its runs.
        """
        if self._loop is not None:
            await asyncio.to_thread(self.jobs.begin_watch)
            return
        if not self._is_watching:
            self._is_watching = True
            for watcher in self._watchers:
                watcher.start()
        await self._sync()
        self.jobs.expect_watch()
        self._loop = loop
        periodic = {
            self._resync: self._settings.resync_seconds,
            self._poll_service: SERVICE_POLL_SECONDS,
            self._poll_plans: PLANNING_POLL_SECONDS,
            self._reconcile_profiles: PROFILES_POLL_SECONDS,
        }
        self._periodic = [loop.create_task(_every(seconds, task)) for task, seconds in periodic.items()]

    async def _sync(self) -> None:
        """Wait by polling: a thread that waits would keep the process from ending."""
        deadline = time.monotonic() + SYNC_SECONDS
        while not self._is_synced() and time.monotonic() < deadline:
            await asyncio.sleep(SYNC_POLL_SECONDS)
        for watcher in self._watchers:
            if not watcher.synced.is_set():
                log.warning(
                    "%s could not be listed within %.0f s; no job is reconciled until the watch has synced",
                    watcher.name,
                    SYNC_SECONDS,
                )

    async def close(self) -> None:
        """Finish reconciles in flight, and plan no further."""
        for task in self._periodic:
            task.cancel()
        for watcher in self._watchers:
            watcher.stop()
        await self._queue.close()
        self._loop = None
        self._planning.close()
        self._threads.shutdown(wait=False)
        self._agent_threads.shutdown(wait=False, cancel_futures=True)
        await self._flush_events()

    async def _flush_events(self) -> None:
        """Write pending events, for `FLUSH_SECONDS` at most."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self._event_writer.shutdown), FLUSH_SECONDS)
        except TimeoutError:
            self._event_writer.shutdown(wait=False, cancel_futures=True)

    def probe(self) -> dict[str, float]:
        """`watch_ages` for the liveness probe; raises `NotStartedError` before the first `start` has returned."""
        if self._loop is None:
            raise NotStartedError("the first list of all objects has not ended")
        return self.watch_ages()

    def watch_ages(self) -> dict[str, float]:
        """Return the seconds since the last answer of each watch; raises `StuckError` if one is stuck."""
        stuck = [watcher.name for watcher in self._watchers if watcher.stuck_seconds > MOST_STUCK_SECONDS]
        if stuck:
            raise StuckError(
                f"the watch or list of {', '.join(stuck)} got neither an answer nor an error "
                f"for {MOST_STUCK_SECONDS:.0f} s"
            )
        return {watcher.name: round(watcher.silent_seconds, 1) for watcher in self._watchers}

    def _export_gauges(self) -> None:
        """Let every scrape read the current values."""
        gauges = self._metrics
        gauges.queued.set_function(lambda: self._queue.num_waiting)
        gauges.in_flight.set_function(lambda: self._queue.num_in_flight)
        gauges.plans.labels("working").set_function(lambda: self._planning.num_working)
        gauges.plans.labels("waiting").set_function(lambda: self._planning.num_waiting)
        gauges.lease_held.set_function(self._lease_held)
        for phase in Phase:
            gauges.jobs.labels(phase.value).set_function(functools.partial(self._num_jobs, phase))
        for watcher in self._watchers:
            gauges.watch_ages.labels(watcher.name).set_function(functools.partial(_silent_seconds, watcher))

    def _lease_held(self) -> float:
        """1 or 0; no number before the first look, which an alert would take for a lost Lease."""
        return math.nan if self._is_lease_held is None else float(self._is_lease_held)

    def _num_jobs(self, phase: Phase) -> int:
        return sum(job.status.phase is phase for job in self.cache.jobs())

    # The queue

    def _notify(self, uid: str) -> None:
        """Enqueue the job; may be called from any thread."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._queue.add, uid)

    async def _reconcile(self, uid: str) -> float | None:
        """Reconcile the job if the cache is synced: before that, a pod that is not cached yet would count as lost."""
        if not self._is_synced():
            return UNSYNCED_SECONDS
        began = asyncio.get_running_loop().time()
        result = "failed"
        try:
            wait = await asyncio.get_running_loop().run_in_executor(self._threads, self._reconciler.reconcile, uid)
            result = "done"
            return wait
        finally:
            self._metrics.reconciles.labels(result).observe(asyncio.get_running_loop().time() - began)

    def _is_synced(self) -> bool:
        return all(watcher.synced.is_set() for watcher in self._watchers)

    def _is_new(self, uid: str) -> bool:
        """Whether the job waits for its first attempt: such jobs have workers of their own."""
        job = self.cache.job(uid)
        return job is not None and job.status.attempt == 0

    def _failed(self, uid: str, error: Exception, failures: int) -> None:
        self._metrics.retries.inc()
        job = self.cache.job(uid)
        name = f"{job.namespace}/{job.name}" if job else uid
        wait, extra = backoff_seconds(failures), log_fields(job) if job else {}
        if isinstance(error, PenstockError):
            message = "job %s: reconcile failed: %s; retrying in %.1f s (%d failures in a row)"
            log.warning(message, name, error, wait, failures, extra=extra)
        else:
            message = "job %s: reconcile failed unexpectedly; retrying in %.1f s (%d failures in a row)"
            log.error(message, name, wait, failures, exc_info=error, extra=extra)

    def _record_phase(self, job: JobSnapshot, decision: SetPhase) -> None:
        self._metrics.ended(decision)
        self._events.phase(job, decision)

    # Periodic work

    async def _resync(self) -> None:
        """Enqueue every job, after those with changes. A job that no operator has reconciled yet counts as changed."""
        while not self._is_synced():
            await asyncio.sleep(UNSYNCED_SECONDS)
        for job in self.cache.jobs():
            self._queue.add(job.uid, Level.EVENT if job.status.phase is Phase.PENDING else Level.RESYNC)
        await asyncio.to_thread(self._update_capacities)

    def _update_capacities(self) -> None:
        """Compute free capacity from all nodes and pods, only while some job runs on fewer ranks than it requests.

        An operator of one namespace may lack the permission to list nodes and all pods. It then finds no free capacity.
        """
        small = [job for job in map(_shrunken, self.cache.jobs()) if job is not None]
        pods_by_job: dict[str, int] = {}
        if small:
            left = self._offers()
            pods_by_job = {job.metadata.uid: num_pods(job, left) for job in small}
        self.cache.set_capacities(pods_by_job, self._clock())

    def _offers(self) -> list[Offer]:
        """Free capacity of all nodes; empty where this operator may not read other pods."""
        try:
            return offers(self._kube.list(NODES).objects, self._kube.list(PODS).objects)
        except KubeError as error:
            if not error.is_denial:
                raise
            log.info("jobs that shrank cannot grow, because this operator may not list all nodes and pods: %s", error)
            return []

    async def _poll_service(self) -> None:
        self._is_lease_held = await asyncio.to_thread(self._service_lease.is_held)
        self.cache.set_service(self._is_lease_held, self._clock())

    async def _reconcile_profiles(self) -> None:
        await asyncio.to_thread(self._profiles.reconcile_all)

    async def _poll_plans(self) -> None:
        for key in await asyncio.to_thread(self._planning.take_answered):
            for uid in self._reconciler.waiting_for(key):
                self._queue.add(uid)


def _silent_seconds(contact: Contact) -> float:
    return contact.silent_seconds


def _shrunken(snapshot: JobSnapshot) -> PipelineJob | None:
    """The job, if it runs on fewer ranks than it requests."""
    job, status = snapshot.job, snapshot.status
    if job is None or job.spec.resources.min_ranks is None or status.phase is not Phase.RUNNING:
        return None
    return job if status.ranks < job.spec.resources.ranks else None


async def _every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    """Repeat the work, also after errors."""
    while True:
        try:
            await act()
        except PenstockError as error:
            log.warning("%s failed: %s; retrying in %.1f s", act.__name__.strip("_"), error, seconds)
        except Exception:
            log.exception("%s failed unexpectedly; retrying in %.1f s", act.__name__.strip("_"), seconds)
        await asyncio.sleep(seconds)


def controller_from(settings: Settings, clock: Callable[[], float]) -> Controller:
    """Return the controller of ``settings``, on the cluster of this process's pod or of kubectl's current context."""
    return Controller(HttpKube(connect(2 * (NUM_LAUNCHERS + NUM_THREADS))), ProcessPlanner(), settings, clock)
