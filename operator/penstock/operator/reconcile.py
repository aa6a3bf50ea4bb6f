"""One reconcile of one job: gather the facts, decide by the life cycle, act, and write the status.

It is idempotent: it may be interrupted anywhere and repeated at any time. Two facts are read from the cluster itself,
not from the cache: whether another attempt may be made, and whether one has come to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.core.errors import PenstockError, UserError
from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.lifecycle import (
    PLACED_IN_PART_SECONDS,
    Bind,
    Decision,
    Delete,
    Expire,
    Launch,
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
from penstock.core.status import JobStatus
from penstock.kube.transport import KubeError
from penstock.operator import binding
from penstock.operator.actions import Actions
from penstock.operator.agents import PAUSE_SECONDS, SELDOM_SECONDS, Agents, News
from penstock.operator.cache import Cache, SeenJob
from penstock.operator.facts import Facts
from penstock.operator.measurements import Measurements, is_measuring
from penstock.operator.observe import measuring, observe
from penstock.operator.pending_reasons import first_pod, placement_since
from penstock.operator.planning import Planning
from penstock.operator.statuses import begun, denied, entered, in_short, is_reported_by_service, refused, updated
from penstock.planner.worker.questions import Question

PLANNING_SECONDS = 5.0
"""Interval of polls for a plan, in case a notification is lost."""

REMIND_SECONDS = 0.5
"""Delay after an annotation until the pod's reminder is set.

A kubelet writes a pod's annotations as it knew them when it began, and when it is done takes all for written that it
has heard by then: the rest comes a minute or more later, or when the pod changes again (`MarkRemountRequired` and
`AddPodToVolume` in Kubernetes' pkg/kubelet/volumemanager/cache). For a pod that has just started it may write twice
within a fifth of a second, and three such pods in a hundred got it only after more than a minute.
"""

AGAIN_SECONDS = 0.2
MOST_ROUNDS = 12
"""Limit of successive decisions in one reconcile; a job's whole life needs fewer."""

Announce = Callable[[SeenJob, SetPhase], None]


@dataclass(slots=True)
class _Draft:
    """A job during one reconcile: ``status`` is ahead of the cluster's until it is written."""

    seen: SeenJob
    job: PipelineJob
    status: JobStatus
    untold: list[SetPhase] = field(default_factory=list)


class GoneError(PenstockError):
    """The job was deleted during its reconcile."""


class Reconciler:
    """Reconciles jobs, each in one thread at a time. ``announce`` reports a change of phase to people."""

    def __init__(
        self,
        cache: Cache,
        actions: Actions,
        planning: Planning,
        agents: Agents,
        clock: Callable[[], float],
        announce: Announce,
    ) -> None:
        self._cache, self._actions, self._planning, self._agents = cache, actions, planning, agents
        self._clock, self._announce = clock, announce
        self._questions: dict[str, str] = {}
        self._measurements = Measurements(cache, actions)
        self._unreminded: dict[str, float] = {}

    def reconcile(self, uid: str) -> float | None:
        """Reconcile the job; return the seconds until the next reconcile at the latest, none for never."""
        for _ in range(MOST_ROUNDS):
            seen = self._cache.job(uid)
            if seen is None or seen.being_deleted:
                self._forget(uid)
                return None
            try:
                return self._look(_Draft(seen, seen.job, seen.status)) if seen.job is not None else self._refuse(seen)
            except GoneError:
                return None
            except KubeError as error:
                if not error.is_conflict:
                    raise
                self._actions.refresh(seen)  # another writer was faster, and the decisions may be different now
        return AGAIN_SECONDS

    def asking(self, key: str) -> list[str]:
        """The jobs that wait for the answer to this plan request."""
        return [uid for uid, question in list(self._questions.items()) if question == key]

    def _forget(self, uid: str) -> None:
        self._questions.pop(uid, None)
        self._unreminded.pop(uid, None)
        self._measurements.forget(uid)
        self._agents.forget(uid)

    def _refuse(self, seen: SeenJob) -> float | None:
        """End a job, and its attempt, that passed the cluster's validation and is invalid by core's."""
        if seen.status.phase.terminal:
            return None
        self._actions.end_attempt(seen)
        self._actions.write_status(seen, refused(seen.status, seen.mistake, seen.generation, self._clock()))
        self._announce(seen, SetPhase(Phase.FAILED, "InvalidSpec", seen.mistake))
        return None

    def _look(self, draft: _Draft) -> float | None:
        try:
            for _ in range(MOST_ROUNDS):
                if not self._advance(draft):
                    break
            return self._finish(draft)
        except KubeError as error:
            if error.is_denial:
                self._write(draft, denied(draft.status, error, draft.seen.generation, self._clock()))
            raise

    def _advance(self, draft: _Draft) -> bool:
        """One decision; whether it changed something, so that there may be another."""
        if _has_measured(draft):
            return False
        if self._is_half_launched(draft):
            self._launch(draft)
            return True
        now = self._clock()
        facts = self._facts(draft)
        decisions = decide(draft.job.spec, observe(facts), now)
        if _plans(decisions) and not self._holds(draft, facts, now):
            return True
        if _should_confirm(draft.seen, decisions) and not self._confirmed(draft, decisions):
            return True
        changed = [self._act(draft, facts, decision, now) for decision in sorted(decisions, key=_is_effect)]
        return any(changed)

    def _holds(self, draft: _Draft, facts: Facts, now: float) -> bool:
        try:
            return self._measurements.holds(facts, now)
        except KubeError as error:
            if error.is_refusal:
                self._write(draft, denied(draft.status, error, draft.seen.generation, now))
            raise

    def _finish(self, draft: _Draft) -> float | None:
        """Write the status of the decisions and observations; return the seconds until the next reconcile."""
        now = self._clock()
        facts = self._facts(draft)
        observed = observe(facts)
        self._write(draft, updated(draft.status, facts, observed, draft.seen.generation, now))
        decisions = decide(draft.job.spec, observed, now)
        waits = [decision.until - now for decision in decisions if isinstance(decision, Wait)]
        if facts.plan is Step.WORKING:
            waits.append(PLANNING_SECONDS)
        if facts.agent is not None:
            waits.append(PAUSE_SECONDS if draft.status.phase is Phase.PROFILING else SELDOM_SECONDS)
        waits += self._remind(draft.seen.uid, facts, now)
        return max(min(waits), 0.001) if waits else None

    def _remind(self, uid: str, facts: Facts, now: float) -> list[float]:
        """Set the reminder of pods whose annotations are old enough; return the seconds until then for the others."""
        living = (pod for pod in facts.pods if pod.end is None and not pod.being_deleted)
        unsure = [pod for pod in living if pod.annotated != pod.reminder]
        if not unsure:
            self._unreminded.pop(uid, None)
            return []
        due = self._unreminded.setdefault(uid, now) + REMIND_SECONDS
        if now < due:
            return [due - now]
        self._actions.remind(unsure)
        del self._unreminded[uid]
        return []

    def _write(self, draft: _Draft, status: JobStatus) -> None:
        """Write the status to the cluster if it changed, and announce news to people.

        A launch is written together with the next change: its JobSet shows it until then. So is a checkpoint that the
        service reported.
        """
        if self._is_made(draft.seen.uid, status.attempt):
            status = replace(status, launched=status.attempt)
        before = draft.seen.status
        checkpoint = before.checkpoint if is_reported_by_service(status) else status.checkpoint
        if replace(status, launched=before.launched, checkpoint=checkpoint) != before:
            draft.seen = self._actions.write_status(draft.seen, status)
        draft.status = draft.seen.status
        for decision in draft.untold:
            self._announce(draft.seen, decision)
        draft.untold.clear()

    def _is_made(self, uid: str, attempt: int) -> bool:
        return any(jobset.attempt == attempt for jobset in self._cache.jobsets(uid))

    # Observation

    def _facts(self, draft: _Draft) -> Facts:
        uid, status = draft.seen.uid, draft.status
        jobsets = (jobset for jobset in self._cache.jobsets(uid) if jobset.attempt == status.attempt)
        pods, leftovers = self._cache.pods(uid), self._cache.leftovers(uid)
        bare = Facts(
            job=draft.job,
            status=status,
            jobset=next(jobsets, None),
            pods=tuple(pod for pod in pods if pod.attempt == status.attempt),
            nodes=self._cache.nodes(),
            service_since=self._cache.service_since,
            stepped_at=draft.seen.stepped_at,
            room=self._cache.room(uid),
            ahead_seconds=self._cache.ahead_seconds,
            hosts=frozenset(pod.node for pod in (*pods, *leftovers) if pod.node),
            leftovers=tuple(pod for pod in leftovers if pod.attempt == status.attempt),
        )
        plan, plan_message = self._plan_step(draft)
        bare = replace(self._with_places(bare), agent=self._heard(bare))
        return replace(self._measurements.located(bare), plan=plan, plan_message=plan_message)

    def _heard(self, facts: Facts) -> News | None:
        """The answer of the first rank's agent, where it is needed: of an attempt that measures, and of one that trains
        while the service is away, for its checkpoints.
        """
        uid, phase, pod = facts.job.metadata.uid, facts.status.phase, first_pod(facts)
        measures = phase is Phase.PROFILING and measuring(facts)
        trains = phase is Phase.RUNNING and facts.service_since is None
        if pod is None or not pod.address or pod.end is not None or not (measures or trains):
            if phase is not Phase.RUNNING:
                self._agents.forget(uid)
            return None
        return self._agents.look(uid, pod, measures=measures)

    def _with_places(self, facts: Facts) -> Facts:
        """The facts, with the competition of other jobs if the job waits for places."""
        if facts.status.phase is not Phase.QUEUED:
            return facts
        facts = replace(facts, competition=self._cache.competition(facts.job, facts.status))
        since = placement_since(facts)
        if since is None or self._clock() < since + PLACED_IN_PART_SECONDS:
            return facts
        return replace(facts, holders=self._cache.holders(facts.job, facts.status))

    def _plan_step(self, draft: _Draft) -> tuple[Step, str]:
        key = self._questions.get(draft.seen.uid)
        if draft.status.phase not in (Phase.PLANNING, Phase.BINDING) or key is None:
            return Step.MISSING, ""
        step, answer = self._planning.look(key)
        return step, answer.error if answer is not None else ""

    def _confirmed(self, draft: _Draft, decisions: list[Decision]) -> bool:
        """Whether the cluster itself leads to the same decisions. If not, the draft takes over the cluster's state."""
        fresh = self._actions.refresh(draft.seen)
        if fresh is None or fresh.job is None or fresh.being_deleted:
            raise GoneError(f"job {draft.seen.name} is gone")
        self._actions.refresh_children(draft.seen, with_pods=any(_gives_up(decision) for decision in decisions))
        if fresh.status != draft.seen.status or fresh.job != draft.job:
            draft.seen, draft.job, draft.status = fresh, fresh.job, fresh.status
            draft.untold.clear()
            return False
        draft.seen = fresh
        return decide(draft.job.spec, observe(self._facts(draft)), self._clock()) == decisions

    # Acting

    def _act(self, draft: _Draft, facts: Facts, decision: Decision, now: float) -> bool:
        """Whether something follows at once. Before anything else in the cluster does, the status is written."""
        if isinstance(decision, SetPhase):
            self._enter(draft, facts, decision, now)
            return True
        if isinstance(decision, Launch):
            return self._begin(draft, facts, decision, now)
        if isinstance(decision, StartPlan):
            return self._ask(draft, facts, now)
        if isinstance(decision, Wait):
            return False
        if isinstance(decision, Stop) and decision.reason == "Grow":
            draft.status = replace(draft.status, feasible_ranks=observe(facts).feasible_ranks)
        if isinstance(decision, Bind):
            draft.status = self._with_plan(draft)
        self._write(draft, draft.status)
        match decision:
            case StartProfile():
                pods = binding.in_order(facts.pods, facts.nodes)
                self._actions.bind(pods, binding.measuring_bindings(draft.job, decision.attempt, pods))
            case Bind():
                self._bind(draft, facts)
            case Stop():
                self._actions.ask_to_stop(facts.pods, now)
            case Delete():
                self._actions.end_attempt(draft.seen)
            case Expire():
                self._actions.remove_job(draft.seen)
        return isinstance(decision, Bind)

    def _enter(self, draft: _Draft, facts: Facts, decision: SetPhase, now: float) -> None:
        status = entered(draft.status, decision, now)
        if decision.phase is Phase.PLANNING:
            status = replace(status, profile=self._measurements.chosen(facts))
            status = self._measurements.remembered(status, draft.job)
        if decision.phase is Phase.BINDING:
            plan = self._plan(draft)
            status = replace(status, plan=in_short(plan) if plan else None)
        if decision.reason == "Shrink":
            status = replace(status, feasible_ranks=observe(facts).feasible_ranks)
        if decision.phase in (Phase.RECOVERING, Phase.SUSPENDED) or decision.phase.terminal:
            self._questions.pop(draft.seen.uid, None)
        observed = replace(facts, status=status)
        draft.status = updated(status, observed, observe(observed), draft.seen.generation, now)
        draft.untold.append(decision)

    def _begin(self, draft: _Draft, facts: Facts, launch: Launch, now: float) -> bool:
        """The attempt's number is written down before anything bears it, so that no other attempt ever does."""
        try:
            if not is_measuring(draft.job):
                self._actions.require_storage(draft.job, launch.ranks)
        except UserError as mistake:
            self._enter(draft, facts, SetPhase(Phase.FAILED, "UserError", str(mistake)), now)
            return True
        status = begun(draft.status, launch, bool(draft.job.spec.kubernetes.queue_name), now)
        begins = replace(facts, status=status, jobset=None, pods=())
        self._write(draft, updated(status, begins, observe(begins), draft.seen.generation, now))
        self._launch(draft)
        return True

    def _is_half_launched(self, draft: _Draft) -> bool:
        """Whether an attempt was announced, and nothing of it is there."""
        status = draft.status
        waits = status.phase is Phase.QUEUED and not draft.job.spec.run_policy.suspend
        return waits and status.attempt > status.launched and not self._is_made(draft.seen.uid, status.attempt)

    def _launch(self, draft: _Draft) -> None:
        try:
            self._actions.launch(draft.job, draft.status)
        except KubeError as error:
            if error.is_refusal:
                self._write(draft, denied(draft.status, error, draft.seen.generation, self._clock()))
            raise
        draft.status = replace(draft.status, message="")

    def _ask(self, draft: _Draft, facts: Facts, now: float) -> bool:
        """Whether a decision follows at once: no request can be made, or the answer is there.

        Equal questions of many jobs have equal keys, so the question holds nothing of the job's name.
        """
        if self._has_published(draft):
            return True
        known, spec = draft.status.profile, draft.job.spec
        if known is None:
            remedy = "submit the job again"
            raise UserError(what="there is no measurement to plan by", where="status.profile", remedy=remedy)
        try:
            profile = self._actions.profile(draft.seen.namespace, known.ref)
        except UserError as lost:
            self._measurements.lose(facts, known.ref, str(lost))
            return True
        try:
            resources = replace(spec.resources, ranks=draft.status.ranks)
            question = Question(spec=replace(spec, resources=resources, kubernetes=KubernetesSpec()), profile=profile)
        except UserError as mistake:
            self._enter(draft, facts, SetPhase(Phase.FAILED, "NoPlan", str(mistake)), now)
            return True
        self._questions[draft.seen.uid] = self._planning.ask(question, draft.seen.namespace)
        return self._plan_step(draft)[0] is not Step.WORKING

    def _has_published(self, draft: _Draft) -> bool:
        """Whether an operator that ended while it bound the pods had laid the plan out.

        Some of them may train by it, and another version of the planner answers the same question otherwise.
        """
        if draft.status.phase is not Phase.BINDING or draft.status.plan is None:
            return False
        plan = self._actions.published_plan(draft.job, draft.status.attempt)
        if plan is None or plan.digest != draft.status.plan.digest:
            return False
        self._questions[draft.seen.uid] = self._planning.remember(plan)
        return True

    def _plan(self, draft: _Draft) -> Plan | None:
        key = self._questions.get(draft.seen.uid)
        answer = self._planning.look(key)[1] if key is not None else None
        return answer.plan if answer is not None else None

    def _with_plan(self, draft: _Draft) -> JobStatus:
        """The status with the plan that is bound, which may be another one than before the operator ended."""
        plan, known = self._plan(draft), draft.status.plan
        if plan is None or (known is not None and known.digest == plan.digest):
            return draft.status
        return replace(draft.status, plan=in_short(plan))

    def _bind(self, draft: _Draft, facts: Facts) -> None:
        """Write the plan first, then the bindings: a binding makes a pod read the plan."""
        plan = self._plan(draft)
        assert plan is not None, "the life cycle binds once there is a plan"
        self._actions.publish_plan(draft.job, draft.status.attempt, plan)
        pods = binding.in_order(facts.pods, facts.nodes)
        digest = plan.for_ranks.digest
        self._actions.bind(pods, binding.training_bindings(draft.job, draft.status.attempt, pods, digest))


def _has_measured(draft: _Draft) -> bool:
    return is_measuring(draft.job) and draft.status.profile is not None


def _is_effect(decision: Decision) -> bool:
    """Phases come first: an operator that ends in between has written the reason before it acted."""
    return not isinstance(decision, SetPhase)


def _plans(decisions: list[Decision]) -> bool:
    return any(isinstance(decision, SetPhase) and decision.phase is Phase.PLANNING for decision in decisions)


def _should_confirm(seen: SeenJob, decisions: list[Decision]) -> bool:
    """Whether a decision makes an attempt after another, or gives one up.

    The first follows from nothing but the job, and its number is written under the version of the job that it follows
    from, or not at all: that is as good as a read before.
    """
    makes_another = seen.status.attempt > 0
    return any((isinstance(decision, Launch) and makes_another) or _gives_up(decision) for decision in decisions)


def _gives_up(decision: Decision) -> bool:
    if not isinstance(decision, SetPhase):
        return False
    return decision.phase.terminal or decision.phase is Phase.RECOVERING
