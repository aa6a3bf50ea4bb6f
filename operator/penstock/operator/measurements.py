"""Which measurement an attempt goes by: its own, or an older one of the same work on the same hosts.

An older one is looked at before the attempt goes by it. What is gone by then, too old, or older than a drift that the
job is to be planned anew for, is measured again in the same attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.core.errors import UserError
from penstock.core.fitness import ANY_GLOBAL_BATCH, stale
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase, Step
from penstock.core.pod import MEASURES_LABEL
from penstock.core.profile import Profile
from penstock.core.status import ProfileStatus
from penstock.operator import binding
from penstock.operator.actions import Actions
from penstock.operator.cache import Cache
from penstock.operator.drift import drifted_since
from penstock.operator.facts import Facts
from penstock.operator.observe import measuring


@dataclass(frozen=True, slots=True)
class _Lost:
    """What an attempt has looked for in vain, by the ConfigMaps' names, and what became of each."""

    attempt: int
    messages: dict[str, str] = field(default_factory=dict)


class Measurements:
    """Of all jobs, each in one thread at a time."""

    def __init__(self, cache: Cache, actions: Actions) -> None:
        self._cache, self._actions = cache, actions
        self._lost: dict[str, _Lost] = {}

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._lost.pop(job_uid, None)

    def told(self, facts: Facts) -> Facts:
        """The facts, with where measuring is."""
        found = replace(facts, profile_message=self._message(facts))
        return replace(found, profile=self._step(found))

    def holds(self, facts: Facts, now: float) -> bool:
        """Whether the attempt may go by what it has found: an older one is looked at, and given up if it is lost."""
        known = self._known(facts)
        if known is None:
            return True
        try:
            profile = self._actions.profile(facts.job.metadata.namespace, known.ref)
        except UserError as lost:
            self.lose(facts, known.ref, str(lost))
            return False
        is_shared = "/" in known.ref  # for how long it holds, its ClusterProfile says
        outdated = (not is_shared and stale(profile, now)) or _outdrifted(facts, profile)
        if outdated:
            self.lose(facts, known.ref, f"ConfigMap {known.ref} {outdated}: it is measured again")
        return not outdated

    def chosen(self, facts: Facts) -> ProfileStatus | None:
        """The measurement that is at hand: an older one, or the one that was just made."""
        known, progress = self._known(facts), facts.progress
        if known is not None or progress is None:
            return known
        self._lost_by(facts).pop(progress.profile_ref, None)  # another of that name was lost before
        return ProfileStatus(ref=progress.profile_ref, key=_key(facts))

    def lose(self, facts: Facts, ref: str, message: str) -> None:
        """Have the attempt go by another, or measure. A later one looks again: there may be one of that name then."""
        uid, attempt = facts.job.metadata.uid, facts.status.attempt
        if uid not in self._lost or self._lost[uid].attempt != attempt:
            self._lost[uid] = _Lost(attempt)
        self._lost_by(facts)[ref] = message

    def _step(self, facts: Facts) -> Step:
        status, progress = facts.status, facts.progress
        if status.phase not in (Phase.QUEUED, Phase.PROFILING):
            is_lost = status.profile is None and status.phase in (Phase.PLANNING, Phase.BINDING)
            return Step.FAILED if facts.profile_message or is_lost else Step.DONE
        if facts.pods and self._known(facts) is not None:
            return Step.DONE
        if progress is not None and progress.profile_ref and measuring(facts):
            return Step.DONE
        return Step.WORKING if measuring(facts) else Step.MISSING

    def _known(self, facts: Facts) -> ProfileStatus | None:
        """An older one: this job's, which may have been made because another was outdated, or another's of its
        namespace, or everybody's.
        """
        if is_measuring(facts.job):
            return None
        key, own = _key(facts), facts.status.profile
        found = [own if own is not None and own.key == key else None]
        found += self._cache.profiles(facts.job.metadata.namespace, key)
        found.append(self._cache.shared_profile(_key(facts, ANY_GLOBAL_BATCH)))
        lost = self._lost_by(facts)
        return next((each for each in found if each is not None and each.ref not in lost), None)

    def _message(self, facts: Facts) -> str:
        """Why it is measured again, or why an attempt that has gone by it cannot go on."""
        lost, status = self._lost_by(facts), facts.status
        if status.phase in (Phase.QUEUED, Phase.PROFILING):
            return next(iter(lost.values()), "")
        return lost.get(status.profile.ref, "") if status.profile is not None else ""

    def _lost_by(self, facts: Facts) -> dict[str, str]:
        lost = self._lost.get(facts.job.metadata.uid)
        return lost.messages if lost is not None and lost.attempt == facts.status.attempt else {}


def is_measuring(job: PipelineJob) -> bool:
    """Whether the job is there to measure, and for nothing else."""
    return MEASURES_LABEL in job.metadata.labels


def _outdrifted(facts: Facts, profile: Profile) -> str:
    since = drifted_since(facts.status)
    is_older = since is not None and profile.measured_at < since
    return "is older than the drift" if facts.job.spec.run_policy.replan_on_drift and is_older else ""


def _key(facts: Facts, global_batch: int | None = None) -> str:
    return binding.profile_key(facts.job, binding.in_order(facts.pods, facts.nodes), facts.nodes, global_batch)
