"""Choice of the measurement that an attempt uses: its own, or an older one of the same work on the same hosts.

The service stores an attempt's own measurement in a ConfigMap. If the agent of the first pod delivers it first
(`penstock.operator.agents`), the operator stores it. The status names the measurements of the last `MOST_KEPT` attempts
that measured, so that another operator finds them; older ConfigMaps are removed.

A stored measurement is checked before the attempt uses it. The attempt measures again if the measurement is gone, too
old, older than a drift for which the job has to be planned again, or lacks a degree of parallelism that the job pins:
keys do not contain pinned degrees.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase, Step
from penstock.core.pod import MEASURES_LABEL
from penstock.core.profile import Profile
from penstock.core.profile_matching import ANY_GLOBAL_BATCH, stale, unfit_degrees
from penstock.core.status import JobStatus, ProfileStatus
from penstock.kube.names import profile_prefix
from penstock.operator import binding
from penstock.operator.actions import Actions
from penstock.operator.cache import Cache
from penstock.operator.drift import drifted_since
from penstock.operator.facts import Facts
from penstock.operator.observe import measuring

MOST_KEPT = 8


@dataclass(slots=True)
class _Memory:
    """State of one attempt: the ConfigMap in which its measurement was ``kept``, and the reasons why it could not use
    the measurements that it ``lost``, by their ConfigMaps.
    """

    attempt: int
    kept: str = ""
    lost: dict[str, str] = field(default_factory=dict)


class Measurements:
    """Measurements of all jobs. Calls for one job are made by one thread at a time."""

    def __init__(self, cache: Cache, actions: Actions) -> None:
        self._cache, self._actions = cache, actions
        self._memories: dict[str, _Memory] = {}

    def forget(self, job_uid: str) -> None:
        """Drop the state of a job that is gone."""
        self._memories.pop(job_uid, None)

    def with_profile(self, facts: Facts) -> Facts:
        """Return the facts with the state and the message of measuring."""
        explained = replace(facts, profile_message=self._message(facts))
        return replace(explained, profile=self._step(explained))

    def holds(self, facts: Facts, now: float) -> bool:
        """Whether the attempt may use its measurement. An older one is read first, and dropped unless it fits; one from
        the agent is written to its ConfigMap first.
        """
        known = self._known(facts)
        if known is None:
            self._keep(facts)
            return True
        try:
            profile = self._actions.profile(facts.job.metadata.namespace, known.ref)
        except UserError as lost:
            self.lose(facts, known.ref, str(lost))
            return False
        is_shared = "/" in known.ref  # its ClusterProfile limits its age
        outdated = (not is_shared and stale(profile, now)) or _outdrifted(facts, profile)
        reason = outdated or unfit_degrees(profile, facts.job.spec)
        if reason:
            self.lose(facts, known.ref, f"ConfigMap {known.ref} {reason}: the attempt measures again")
        return not reason

    def chosen(self, facts: Facts) -> ProfileStatus | None:
        """Return the current measurement: an older one, or the attempt's own."""
        known, ref = self._known(facts), self._own_ref(facts)
        if known is not None or not ref:
            return known
        self._memory(facts).lost.pop(ref, None)  # another of that name was lost before
        return ProfileStatus(ref=ref, key=_key(facts))

    def retained(self, status: JobStatus, job: PipelineJob) -> JobStatus:
        """Return the status with the attempt's own measurement in the job's list. Delete the ConfigMaps of measurements
        beyond `MOST_KEPT`.
        """
        chosen = status.profile
        if chosen is None or not chosen.ref.removeprefix(profile_prefix(job.metadata.name)).isdecimal():
            return status
        others = [measurement for measurement in status.measurements if measurement.ref != chosen.ref]
        for measurement in others[: -(MOST_KEPT - 1)]:
            self._actions.forget_profile(job, measurement.ref)
        return replace(status, measurements=(*others[-(MOST_KEPT - 1) :], chosen))

    def _keep(self, facts: Facts) -> None:
        """Store the agent's measurement, unless the service has stored it."""
        agent, job, attempt = facts.agent, facts.job, facts.status.attempt
        if self._own_ref(facts) or agent is None or agent.profile is None:
            return
        self._memory(facts).kept = self._actions.keep_profile(job, attempt, agent.profile)

    def _own_ref(self, facts: Facts) -> str:
        """The ConfigMap with the attempt's measurement; empty if there is none yet."""
        if facts.progress is not None and facts.progress.profile_ref:
            return facts.progress.profile_ref
        return self._memory(facts).kept

    def lose(self, facts: Facts, ref: str, message: str) -> None:
        """Make the attempt use another measurement, or measure. A later attempt may try that ConfigMap again."""
        self._memory(facts).lost[ref] = message

    def _step(self, facts: Facts) -> Step:
        status, agent = facts.status, facts.agent
        if status.phase not in (Phase.QUEUED, Phase.PROFILING):
            is_lost = status.profile is None and status.phase in (Phase.PLANNING, Phase.BINDING)
            return Step.FAILED if facts.profile_message or is_lost else Step.DONE
        if facts.pods and self._known(facts) is not None:
            return Step.DONE
        is_there = bool(self._own_ref(facts)) or (agent is not None and agent.profile is not None)
        if is_there and measuring(facts):
            return Step.DONE
        return Step.WORKING if measuring(facts) else Step.MISSING

    def _known(self, facts: Facts) -> ProfileStatus | None:
        """Return an older measurement: this job's, another job's of its namespace, or a ClusterProfile's."""
        if is_measuring(facts.job):
            return None
        key, own = _key(facts), facts.status.profile
        candidates = [own if own is not None and own.key == key else None]
        candidates += self._cache.profiles(facts.job.metadata.namespace, key)
        candidates.append(self._cache.shared_profile(_key(facts, ANY_GLOBAL_BATCH)))
        lost = self._memory(facts).lost
        return next((profile for profile in candidates if profile is not None and profile.ref not in lost), None)

    def _message(self, facts: Facts) -> str:
        """Reason for a new measurement, or reason why an attempt that used the old one cannot go on."""
        lost, status = self._memory(facts).lost, facts.status
        if status.phase in (Phase.QUEUED, Phase.PROFILING):
            return next(iter(lost.values()), "")
        return lost.get(status.profile.ref, "") if status.profile is not None else ""

    def _memory(self, facts: Facts) -> _Memory:
        """The state of the newest attempt. That of an earlier one is dropped."""
        known = self._memories.get(facts.job.metadata.uid)
        if known is None or known.attempt != facts.status.attempt:
            known = self._memories[facts.job.metadata.uid] = _Memory(facts.status.attempt)
        return known


def is_measuring(job: PipelineJob) -> bool:
    """Whether the job only measures, for a ClusterProfile."""
    return MEASURES_LABEL in job.metadata.labels


def _outdrifted(facts: Facts, profile: Profile) -> str:
    """Reason if the measurement, made by the clock of its pod, is older than the drift by this process's clock.

    A measurement of another job has no other time that can be compared. If the clocks differ, an attempt measures once
    more, or uses a measurement from before the drift until the next one makes it measure again. What an attempt itself
    measured is not compared.
    """
    since = drifted_since(facts.status)
    is_older = since is not None and profile.measured_at < since
    return "is older than the drift" if facts.job.spec.run_policy.replan_on_drift and is_older else ""


def _key(facts: Facts, global_batch: int | None = None) -> str:
    return binding.profile_key(facts.job, binding.in_order(facts.pods, facts.nodes), facts.nodes, global_batch)
