"""Polls the agents in pods for the progress of measuring, the measurement and the newest checkpoint (docs/adr/0030).

A job that measures needs its measurement to go on. The service delivers it, and may be down, with its node. So the
operator fetches it from the pod itself, in separate threads: no reconcile waits for a pod. A job's agent is polled
at most every `PAUSE_SECONDS`, and less often after failures. A namespace has few of the threads at once, so that its
pods cannot delay those of others by answering slowly.

Only pods that belong to the job by their owners (`penstock.operator.ownership`) may be polled. Their answers are
untrusted all the same: they are bounded (`penstock.operator.fetching`, `penstock.core.packing`) and must name the
pod, job and attempt of the request. An unusable answer is reported on its job only.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import PenstockError, UserError
from penstock.core.lifecycle import Step
from penstock.core.packing import UnpackError, unpack
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, AgentReport
from penstock.core.profile import Profile
from penstock.operator.fetching import AgentError, fetch, require_pod_address
from penstock.operator.snapshots import PodSnapshot

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Seconds between two requests to a job's agent."""

SELDOM_SECONDS = 60.0
"""Seconds between two requests where only a checkpoint may be new, and after many failures."""

MOST_DOUBLINGS = 4
MOST_OF_A_NAMESPACE = 4
"""Limit of concurrent requests for the jobs of one namespace."""

Fetch = Callable[[str, str], bytes]
"""Fetches the document of that name from an address; raises `AgentError`."""
Submit = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentAnswer:
    """The last answer of a pod's agent: its ``report``, and the ``profile`` once it has measured.

    ``problem`` is the reason why the last request failed, empty if it succeeded. ``since`` is the time of the last new
    answer, or of the first request to the pod.
    """

    since: float
    report: AgentReport | None = None
    profile: Profile | None = None
    problem: str = ""


@dataclass(slots=True)
class _Agent:
    """One job's agent: its pod, its last answer, and the time of the next request."""

    pod_uid: str
    answer: AgentAnswer
    next_at: float
    failures: int = 0
    has_open_request: bool = False


def fetch_from_pod(address: str, name: str) -> bytes:
    """Return the document of that name from the agent of the pod at that address; raises `AgentError`."""
    require_pod_address(address)
    return fetch(address, name)


class Agents:
    """Polls agents by ``fetch``, in threads of ``submit``. ``notify`` is called with the uid of a job that has a new
    answer.

    Threads may share it.
    """

    def __init__(self, fetch: Fetch, clock: Callable[[], float], submit: Submit, notify: Callable[[str], None]) -> None:
        self._fetch, self._clock, self._submit, self._notify = fetch, clock, submit, notify
        self._lock, self._unpack_lock = threading.Lock(), threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._busy: Counter[str] = Counter()

    def poll(self, pod: PodSnapshot, *, measures: bool) -> AgentAnswer:
        """Return the last answer of the agent in that pod, which belongs to its job. Poll it again if that answer is
        old. If the job ``measures``, its measurement is fetched too.
        """
        now = self._clock()
        with self._lock:
            agent = self._agents.get(pod.job_uid)
            if agent is None or agent.pod_uid != pod.uid:
                agent = self._agents[pod.job_uid] = _Agent(pod.uid, AgentAnswer(since=now), next_at=now)
            answer, is_due = agent.answer, now >= agent.next_at and not agent.has_open_request
            if not is_due or self._busy[pod.namespace] >= MOST_OF_A_NAMESPACE:
                return answer
            agent.has_open_request, agent.next_at = True, now + (PAUSE_SECONDS if measures else SELDOM_SECONDS)
            self._busy[pod.namespace] += 1
        self._submit(lambda: self._send(pod, measures, answer))
        with self._lock:
            return agent.answer

    def forget(self, job_uid: str) -> None:
        """Stop polling the agent of this job."""
        with self._lock:
            self._agents.pop(job_uid, None)

    def _send(self, pod: PodSnapshot, measures: bool, before: AgentAnswer) -> None:
        try:
            report, profile = self._fetch_answer(pod, measures, before)
            answer = AgentAnswer(since=self._clock(), report=report, profile=profile)
        except AgentError as error:
            answer = AgentAnswer(since=0.0, problem=_single_line(error))
        except (UnpackError, UserError) as error:
            answer = AgentAnswer(since=0.0, problem=f"gave an answer that cannot be read: {_single_line(error)}")
        except Exception as error:
            log.exception(
                "pod %s/%s: the answer of its agent could not be processed; the agent is polled again with backoff",
                pod.namespace,
                pod.name,
            )
            answer = AgentAnswer(since=0.0, problem=f"gave an answer that failed: {type(error).__name__}")
        is_changed = self._keep(pod, answer)
        if is_changed:
            self._notify(pod.job_uid)

    def _keep(self, pod: PodSnapshot, answer: AgentAnswer) -> bool:
        """Store the answer; return whether it is new."""
        with self._lock:
            self._busy[pod.namespace] -= 1
            agent = self._agents.get(pod.job_uid)
            if agent is None or agent.pod_uid != pod.uid:
                return False
            agent.has_open_request, before = False, agent.answer
            if answer.problem:
                agent.failures += 1
                pause = min(PAUSE_SECONDS * 2 ** min(agent.failures, MOST_DOUBLINGS), SELDOM_SECONDS)
                agent.next_at = max(agent.next_at, self._clock() + pause)
                agent.answer = replace(before, problem=answer.problem)
            else:
                agent.failures = 0
                is_same = (answer.report, answer.profile) == (before.report, before.profile)
                agent.answer = replace(answer, since=before.since if is_same else answer.since)
            return agent.answer != before

    def _fetch_answer(
        self, pod: PodSnapshot, measures: bool, before: AgentAnswer
    ) -> tuple[AgentReport, Profile | None]:
        """The agent's current answer. A measurement is fetched once.

        Raises `AgentError` if another pod answered: an address may have been reassigned.
        """
        report = AgentReport.from_manifest(self._read(self._fetch(pod.address, AGENT_REPORT)), "report")
        if (report.pod_uid, report.job_uid, report.attempt) != (pod.uid, pod.job_uid, pod.attempt):
            raise AgentError("answered for another pod, job or attempt")
        if not measures or report.profile is not Step.DONE or not report.measurement:
            return report, None
        if before.profile is not None and before.report is not None and before.report.measurement == report.measurement:
            return report, before.profile
        packed = self._fetch(pod.address, AGENT_MEASUREMENT)
        if hashlib.sha256(packed).hexdigest() != report.measurement:
            raise AgentError("served another measurement than announced: its SHA-256 differs")
        return report, Profile.from_manifest(self._read(packed), "measurement")

    def _read(self, packed: bytes) -> Any:
        """Unpack one document at a time: the largest allowed one takes about a hundred megabytes meanwhile."""
        with self._unpack_lock:
            return unpack(packed)


def _single_line(error: PenstockError) -> str:
    return " ".join(str(error).split())[:300]
