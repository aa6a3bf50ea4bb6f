"""Reports of the agents in pods: progress of measuring, the measurement, and the newest checkpoint (docs/adr/0030).

A job that measures cannot go on without its measurement. The service brings it, and may be away, with its node. So the
operator fetches it from the pod itself, in separate threads: no reconcile waits for a pod. A job's agent is polled
every `PAUSE_SECONDS` at most, and after failures less often; a namespace has few of the threads at once, so that its
pods cannot keep the others' waiting by answering slowly.

Only pods that are the job's by their owners (`penstock.operator.ownership`) may be given to `look`. Their answers are
untrusted all the same: they are bounded (`penstock.operator.fetching`, `penstock.core.packing`) and have to name the
pod, job and attempt of the request. An answer that cannot be used is reported on its job alone.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import PenstockError, UserError
from penstock.core.lifecycle import Step
from penstock.core.packing import UnpackError, unpack
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, AgentReport
from penstock.core.profile import Profile
from penstock.operator.fetching import AgentError, fetch, require_pod_address
from penstock.operator.snapshots import SeenPod

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Between two requests to a job's agent."""

SELDOM_SECONDS = 60.0
"""Between two, where all that may be new is a checkpoint; and after many failures."""

MOST_DOUBLINGS = 4
NUM_THREADS = 16
MOST_OF_A_NAMESPACE = 4
"""Requests of one namespace's jobs that are on their way at once."""

Fetch = Callable[[str, str], bytes]
"""Fetches the document of that name from an address; raises `AgentError`."""
Later = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """The last answer of a pod's agent: its ``report``, and the ``profile`` once it has measured.

    ``problem`` is why the last request was of no use, empty if it was. ``since`` is when something new was heard, or
    when the first request was sent to the pod.
    """

    since: float
    report: AgentReport | None = None
    profile: Profile | None = None
    problem: str = ""


@dataclass(slots=True)
class _Agent:
    """One job's agent: its pod, its last answer, and the time of the next request."""

    pod_uid: str
    news: News
    next_at: float
    failures: int = 0
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    job_uid: str
    pod: SeenPod
    measures: bool
    before: News


def fetch_from_pod(address: str, name: str) -> bytes:
    """The document that the agent of the pod at that address serves; raises `AgentError`."""
    require_pod_address(address)
    return fetch(address, name)


class Agents:
    """Polls agents by ``fetch``, in threads of ``later``. ``notify`` is called with a job's uid when there is news for
    it. Threads may share it.
    """

    def __init__(self, fetch: Fetch, clock: Callable[[], float], later: Later, notify: Callable[[str], None]) -> None:
        self._fetch, self._clock, self._later, self._notify = fetch, clock, later, notify
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._busy: Counter[str] = Counter()

    def look(self, job_uid: str, pod: SeenPod, *, measures: bool) -> News:
        """The last answer of the job's agent in that pod. It is polled again if that is long ago, and where the job
        ``measures``, for its measurement.
        """
        now = self._clock()
        with self._lock:
            agent = self._agents.get(job_uid)
            if agent is None or agent.pod_uid != pod.uid:
                agent = self._agents[job_uid] = _Agent(pod.uid, News(since=now), next_at=now)
            news, is_due = agent.news, now >= agent.next_at and not agent.is_asked
            if not is_due or self._busy[pod.namespace] >= MOST_OF_A_NAMESPACE:
                return news
            agent.is_asked, agent.next_at = True, now + (PAUSE_SECONDS if measures else SELDOM_SECONDS)
            self._busy[pod.namespace] += 1
        self._later(lambda: self._ask(_Request(job_uid, pod, measures, news)))
        with self._lock:
            return agent.news

    def forget(self, job_uid: str) -> None:
        """The job needs no agent any more."""
        with self._lock:
            self._agents.pop(job_uid, None)

    def _ask(self, request: _Request) -> None:
        try:
            report, profile = self._answered(request)
            news = News(since=self._clock(), report=report, profile=profile)
        except AgentError as error:
            news = News(since=0.0, problem=_in_a_line(error))
        except (UnpackError, UserError) as error:
            news = News(since=0.0, problem=f"gave an answer that cannot be read: {_in_a_line(error)}")
        except Exception as error:
            log.exception("pod %s/%s: reading its agent's answer failed", request.pod.namespace, request.pod.name)
            news = News(since=0.0, problem=f"gave an answer that failed: {type(error).__name__}")
        is_news = self._keep(request, news)
        if is_news:
            self._notify(request.job_uid)

    def _keep(self, request: _Request, news: News) -> bool:
        """Store the answer; return whether it is new."""
        with self._lock:
            self._busy[request.pod.namespace] -= 1
            agent = self._agents.get(request.job_uid)
            if agent is None or agent.pod_uid != request.pod.uid:
                return False
            agent.is_asked, before = False, agent.news
            if news.problem:
                agent.failures += 1
                pause = min(PAUSE_SECONDS * 2 ** min(agent.failures, MOST_DOUBLINGS), SELDOM_SECONDS)
                agent.next_at = max(agent.next_at, self._clock() + pause)
                agent.news = replace(before, problem=news.problem)
            else:
                agent.failures = 0
                is_same = (news.report, news.profile) == (before.report, before.profile)
                agent.news = replace(news, since=before.since if is_same else news.since)
            return agent.news != before

    def _answered(self, request: _Request) -> tuple[AgentReport, Profile | None]:
        """The agent's current answer. A measurement is fetched once."""
        address = request.pod.address
        report = AgentReport.from_manifest(self._read(self._fetch(address, AGENT_REPORT)), "report")
        _require_identity(report, request)
        if not request.measures or report.profile is not Step.DONE or not report.measurement:
            return report, None
        before = request.before
        if before.profile is not None and before.report is not None and before.report.measurement == report.measurement:
            return report, before.profile
        packed = self._fetch(address, AGENT_MEASUREMENT)
        if hashlib.sha256(packed).hexdigest() != report.measurement:
            raise AgentError("served another measurement than it had announced")
        return report, Profile.from_manifest(self._read(packed), "measurement")

    def _read(self, packed: bytes) -> Any:
        """One document at a time: the largest that may be built takes a hundred megabytes while it is read."""
        with self._reading:
            return unpack(packed)


def _require_identity(report: AgentReport, request: _Request) -> None:
    """An address may be another pod's by now."""
    said = (report.pod_uid, report.job_uid, report.attempt)
    if said != (request.pod.uid, request.job_uid, request.pod.attempt):
        raise AgentError("answered for another pod, job or attempt")


def _in_a_line(error: PenstockError) -> str:
    return " ".join(str(error).split())[:300]


def pool() -> ThreadPoolExecutor:
    """Threads in which agents are polled."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="agents")
