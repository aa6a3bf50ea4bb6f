"""One look at one job: gather what is known, ask the life cycle, act, and write the status down.

It may be cut short anywhere and asked again at any time, and then leads to the same end. Two things are looked up in
the cluster itself, not in what watches told: whether an attempt may be made, and whether a job has come to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.lifecycle import (
    Bind,
    Decision,
    Delete,
    Expire,
    Launch,
    Observed,
    Phase,
    SetPhase,
    StartPlan,
    StartProfile,
    Step,
    Stop,
    Wait,
    decide,
)
from penstock.core.plan import Plan
from penstock.core.status import JobStatus, ProfileStatus
from penstock.kube.transport import KubeError
from penstock.operator import binding
from penstock.operator.actions import Actions
from penstock.operator.cache import Cache, SeenJob
from penstock.operator.observe import Facts, measuring, observe
from penstock.operator.planning import Planning
from penstock.operator.statuses import begun, entered, in_short, not_launched, refused, told
from penstock.planning.questions import Answer, Question

log = logging.getLogger(__name__)

PLANNING_SECONDS = 5.0
"""How often to look whether a plan is there, if nobody tells."""

AGAIN_SECONDS = 0.2
MOST_ROUNDS = 12
"""Decisions that one look may lead to, one after the other; a job's whole life needs fewer."""

Announce = Callable[[SeenJob, SetPhase], None]


class Reconciler:
    """Sees to jobs, each in one thread at a time. ``announce`` tells people of a change of phase."""

    def __init__(
        self, cache: Cache, actions: Actions, planning: Planning, clock: Callable[[], float], announce: Announce
    ) -> None:
        self._cache, self._actions, self._planning = cache, actions, planning
        self._clock, self._announce = clock, announce
        self._questions: dict[str, str] = {}
        self._lost: dict[tuple[str, str], str] = {}

    def reconcile(self, uid: str) -> float | None:
        """Do what there is to do about the job; in how many seconds to look again at the latest, none for never."""
        for _ in range(MOST_ROUNDS):
            seen = self._cache.job(uid)
            if seen is None or seen.being_deleted:
                self._questions.pop(uid, None)
                return None
            try:
                wait = self._look(seen, seen.job) if seen.job is not None else self._refuse(seen)
            except KubeError as error:
                if not error.is_conflict:
                    raise
                self._actions.refresh(
                    seen
                )  # somebody else wrote meanwhile, and what follows from that may be different
                continue
            if wait is None or wait > 0:
                return wait
        return AGAIN_SECONDS

    def asking(self, key: str) -> list[str]:
        """The jobs that wait for the answer to this question."""
        return [uid for uid, asked in list(self._questions.items()) if asked == key]

    def _refuse(self, seen: SeenJob) -> float | None:
        """What the cluster's own checks let pass and core does not ends the job, and what it has begun."""
        if seen.status.phase.terminal:
            return None
        self._actions.end_attempt(seen)
        self._actions.write_status(seen, refused(seen.status, seen.mistake, seen.generation, self._clock()))
        self._announce(seen, SetPhase(Phase.FAILED, "InvalidSpec", seen.mistake))
        return None

    def _look(self, seen: SeenJob, job: PipelineJob) -> float | None:
        """One decision; zero if it changed something, so that there may be another."""
        if self._is_half_launched(seen, job):
            self._finish_launch(seen, job)
            return 0.0
        now = self._clock()
        facts = self._facts(seen, job, seen.status)
        looked = observe(facts)
        decisions = decide(job.spec, looked, now)
        if self._should_confirm(decisions) and not self._confirmed(seen, decisions):
            return 0.0
        if self._act(seen, job, facts, decisions, now):
            return 0.0
        self._tell(seen, facts, looked, now)
        return self._wait(seen.status, facts, decisions, now)

    # Looking

    def _facts(self, seen: SeenJob, job: PipelineJob, status: JobStatus) -> Facts:
        jobsets = (each for each in self._cache.jobsets(seen.uid) if each.attempt == status.attempt)
        bare = Facts(
            job=job,
            status=status,
            jobset=next(jobsets, None),
            pods=tuple(pod for pod in self._cache.pods(seen.uid) if pod.attempt == status.attempt),
            nodes=self._cache.nodes(),
            service_since=self._cache.service_since,
            stepped_at=seen.stepped_at,
            profile_message=self._lost.get(_place(job, status.profile), ""),
        )
        plan, plan_message = self._plan_step(seen)
        return replace(bare, profile=self._profile_step(bare), plan=plan, plan_message=plan_message)

    def _profile_step(self, facts: Facts) -> Step:
        status = facts.status
        if status.phase not in (Phase.QUEUED, Phase.PROFILING):
            return Step.FAILED if facts.profile_message else Step.DONE
        if facts.pods and self._known_profile(facts) is not None:
            return Step.DONE
        progress = status.progress
        if progress is not None and progress.attempt == status.attempt and progress.profile_ref and measuring(facts):
            return Step.DONE
        return Step.WORKING if measuring(facts) else Step.MISSING

    def _known_profile(self, facts: Facts) -> ProfileStatus | None:
        """A measurement of the same work on the same hosts: this job's, or another's of its namespace."""
        found = self._cache.profile(facts.job.metadata.namespace, self._profile_key(facts))
        return None if _place(facts.job, found) in self._lost else found

    def _profile_key(self, facts: Facts) -> str:
        return binding.profile_key(facts.job, binding.in_order(facts.pods, facts.nodes), facts.nodes)

    def _plan_step(self, seen: SeenJob) -> tuple[Step, str]:
        key = self._questions.get(seen.uid)
        if seen.status.phase not in (Phase.PLANNING, Phase.BINDING) or key is None:
            return Step.MISSING, ""
        step, answer = self._planning.look(key)
        return step, answer.error if answer is not None else ""

    # Acting

    @staticmethod
    def _should_confirm(decisions: list[Decision]) -> bool:
        """What makes an attempt, or gives one up."""
        return any(isinstance(each, Launch) or _gives_up(each) for each in decisions)

    def _confirmed(self, seen: SeenJob, decisions: list[Decision]) -> bool:
        """Whether the cluster itself leads to the same decisions."""
        fresh = self._actions.refresh(seen)
        if fresh is not None:
            self._actions.refresh_children(seen, with_pods=any(_gives_up(each) for each in decisions))
        if fresh is None or fresh.job is None or fresh.status.phase is not seen.status.phase:
            return False
        facts = self._facts(fresh, fresh.job, fresh.status)
        return decide(fresh.job.spec, observe(facts), self._clock()) == decisions

    def _act(self, seen: SeenJob, job: PipelineJob, facts: Facts, decisions: list[Decision], now: float) -> bool:
        """Whether something about the job changed that may lead to another decision at once."""
        changed = False
        for decision in decisions:
            match decision:
                case SetPhase():
                    self._enter(seen, facts, decision, now)
                    changed = True
                case Launch():
                    self._begin(seen, job, facts, decision, now)
                    changed = True
                case StartProfile():
                    pods = binding.in_order(facts.pods, facts.nodes)
                    self._actions.bind(pods, binding.measuring_bindings(job, decision.attempt, pods))
                case StartPlan():
                    changed |= not self._ask(seen, job)
                case Bind():
                    changed |= self._bind(seen, job, facts)
                case Stop():
                    self._actions.ask_to_stop(facts.pods, now)
                case Delete():
                    self._actions.end_attempt(seen)
                case Expire():
                    self._actions.remove_job(seen)
                case Wait():
                    pass
        return changed

    def _enter(self, seen: SeenJob, facts: Facts, decision: SetPhase, now: float) -> None:
        status = entered(seen.status, decision, now)
        if decision.phase is Phase.PLANNING:
            status = replace(status, profile=self._profile_status(facts))
        if decision.phase is Phase.BINDING:
            plan = self._plan(seen)
            status = replace(status, plan=in_short(plan) if plan else None)
        if decision.reason == "Shrink":
            status = replace(status, feasible_ranks=observe(facts).feasible_ranks)
        if decision.phase in (Phase.RECOVERING, Phase.SUSPENDED) or decision.phase.terminal:
            self._questions.pop(seen.uid, None)
        looked = observe(replace(facts, status=status))
        self._actions.write_status(seen, told(status, facts, looked, seen.generation, now))
        self._announce(seen, decision)

    def _profile_status(self, facts: Facts) -> ProfileStatus | None:
        """The measurement that is at hand: the one that was just made, or an older one of the same hosts."""
        known, progress = self._known_profile(facts), facts.status.progress
        if known is not None or progress is None:
            return known
        return ProfileStatus(ref=progress.profile_ref, key=self._profile_key(facts))

    def _begin(self, seen: SeenJob, job: PipelineJob, facts: Facts, launch: Launch, now: float) -> None:
        """The attempt's number is written down before anything bears it, so that no other attempt ever does."""
        try:
            self._actions.require_storage(job, launch.ranks)
        except UserError as mistake:
            self._enter(seen, facts, SetPhase(Phase.FAILED, "UserError", str(mistake)), now)
            return
        written = self._actions.write_status(seen, begun(seen.status, launch, now))
        self._finish_launch(written, job)

    @staticmethod
    def _is_half_launched(seen: SeenJob, job: PipelineJob) -> bool:
        waits = seen.status.phase is Phase.QUEUED and not job.spec.run_policy.suspend
        return waits and seen.status.attempt > seen.status.launched

    def _finish_launch(self, seen: SeenJob, job: PipelineJob) -> None:
        try:
            self._actions.launch(job, seen.status)
        except KubeError as error:
            self._tell_refusal(seen, error)
            raise
        self._actions.write_status(seen, replace(seen.status, launched=seen.status.attempt, message=""))

    def _tell_refusal(self, seen: SeenJob, error: KubeError) -> None:
        if not error.is_refusal:
            return
        status = not_launched(seen.status, error, seen.generation, self._clock())
        if status != seen.status:
            self._actions.write_status(seen, status)

    def _ask(self, seen: SeenJob, job: PipelineJob) -> bool:
        """Whether it could be asked; if not, the measurement is lost, and with it the attempt.

        Equal questions of many jobs have equal keys, so the question holds nothing of the job's name.
        """
        known = seen.status.profile
        if known is None:
            raise UserError(what="there is no measurement to plan by", where="status.profile", remedy="submit it anew")
        try:
            profile = self._actions.profile(seen.namespace, known.ref)
        except UserError as lost:
            self._lost[_place(job, known)] = str(lost)
            return False
        resources = replace(job.spec.resources, ranks=seen.status.ranks)
        spec = replace(job.spec, resources=resources, kubernetes=KubernetesSpec())
        self._questions[seen.uid] = self._planning.ask(Question(spec=spec, profile=profile))
        return True

    def _plan(self, seen: SeenJob) -> Plan | None:
        answer = self._answer(seen)
        return answer.plan if answer is not None else None

    def _answer(self, seen: SeenJob) -> Answer | None:
        key = self._questions.get(seen.uid)
        return self._planning.look(key)[1] if key is not None else None

    def _bind(self, seen: SeenJob, job: PipelineJob, facts: Facts) -> bool:
        """Lay the plan out first, then tell the pods: being told makes them look for it."""
        plan = self._plan(seen)
        assert plan is not None, "the life cycle binds once there is a plan"
        self._actions.publish_plan(job, seen.status.attempt, plan)
        pods = binding.in_order(facts.pods, facts.nodes)
        self._actions.bind(pods, binding.training_bindings(job, seen.status.attempt, pods, plan.digest))
        return True

    def _tell(self, seen: SeenJob, facts: Facts, looked: Observed, now: float) -> None:
        status = told(seen.status, facts, looked, seen.generation, now)
        if status != seen.status:
            self._actions.write_status(seen, status)

    def _wait(self, status: JobStatus, facts: Facts, decisions: list[Decision], now: float) -> float | None:
        waits = [max(each.until - now, 0.001) for each in decisions if isinstance(each, Wait)]
        if facts.plan is Step.WORKING or any(isinstance(each, StartPlan) for each in decisions):
            waits.append(PLANNING_SECONDS)
        return min(waits, default=None)


def _gives_up(decision: Decision) -> bool:
    if not isinstance(decision, SetPhase):
        return False
    return decision.phase.terminal or decision.phase is Phase.RECOVERING


def _place(job: PipelineJob, profile: ProfileStatus | None) -> tuple[str, str]:
    """The namespace and the name of a measurement's ConfigMap."""
    return job.metadata.namespace, profile.ref if profile is not None else ""
