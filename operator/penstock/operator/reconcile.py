"""The operator's backend of `penstock.core.engine`, and the loop of steps that reconciles one job.

Problem. A PipelineJob changes for many reasons: its user edits it, a pod ends, a node is lost, a plan is finished, the
service reports a step. Watches deliver these events late, in any order, or not at all, and the operator itself may be
killed between any two of its calls. No attempt may then exist twice, and no attempt may be given up without a reason.

Idea. Events carry no meaning: each one only enqueues the job's uid. A reconcile takes steps of the engine until nothing
follows at once, writes the status, and returns the number of seconds after which time alone may change a decision. For
each step, the whole state is read from the cache (`_facts`) and translated into the engine's observation
(`penstock.operator.observe`). The rules of the engine apply as follows:

1. The status is written before the action that it announces. Phases are collected in a draft of the status, which every
   action writes first. Attempt N is written as ``attempt: N`` under the resource version of the snapshot, and only then
   are its ConfigMap and JobSet created, under names that follow from N.
2. A live phase ends with the deletion of the JobSet. That of a succeeded job stays: people read the logs of its pods.
3. After a crash in a launch, ``attempt > launched`` shows that it is half done, and the attempt is started again.
4. The cache may be behind, and a pod that is not cached yet looks like a lost one. So for a decision that is final, the
   job and its children are read from the cluster first (`_refresh`).
5. Every action may be repeated: objects have fixed names and are created or left alone, a delete names a uid, and an
   annotation that a pod has is not written again.

Example: a job of two pods, from its creation on. ``D`` is the decision, ``W`` a write to the cluster.

    event                      decisions and writes
    job applied             D SetPhase(Queued)  D Launch(1)  W status attempt=1  W ConfigMap and JobSet a1
    pod 0 runs              none: the attempt is complete with pod 1
    pod 1 runs              D SetPhase(Profiling)  D StartProfile  W status  W 2 annotations (epoch 0)
    measurement stored      D SetPhase(Planning)  D StartPlan  W status; the plan request is queued
    plan request finished   D SetPhase(Binding)  D Bind  W status  W plan  W 2 annotations (epoch 1)
                            D SetPhase(Running)  W status
    node of pod 1 deleted   D SetPhase(Recovering), confirmed by 4 reads  W status  D Delete(1)  W delete JobSet a1

If the operator is killed after ``W status attempt=1``, the next one reads attempt 1 and launched 0, and no JobSet: it
creates ConfigMap and JobSet a1 again. If it is killed after the JobSet too, it reads launched 0 and a JobSet a1, and
goes on to wait for pods.

Complexity. One reconcile takes time linear in the number of the job's pods: a job of p pods and an event for each costs
O(p) per event and O(p^2) in total, which is 100 x 100 small comparisons for 100 pods. The whole cluster is never
scanned. At most `MOST_ROUNDS` steps are taken in one reconcile; a job's whole life needs fewer.

Rejected designs:

- Handlers for each event (kopf's own): a handler sees one object and not the attempt, is lost with the process, and two
  of them for one job run concurrently (docs/adr/0013, docs/adr/0023).
- State in annotations of the operator's own: the status already shows it to users, and one place cannot contradict
  itself.
- Reading the cluster instead of the cache in every reconcile: with 1,000 jobs the resync alone would be thousands of
  calls a minute. Only the decisions of rule 4 need fresh state.
- Confirming a first launch also: its number is written under the job's resource version, which fails if the job has
  changed. That is as good as a read (docs/adr/0015).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.core.clocks import Reading
from penstock.core.engine import step
from penstock.core.errors import PenstockError, UserError
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.lifecycle import PLACED_IN_PART_SECONDS, Launch, Observation, Phase, SetPhase, Step
from penstock.core.plan import Plan
from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH
from penstock.core.status import JobStatus
from penstock.kube.transport import KubeError
from penstock.operator import binding
from penstock.operator.actions import Actions
from penstock.operator.agents import PAUSE_SECONDS, SELDOM_SECONDS, AgentAnswer, Agents
from penstock.operator.cache import Cache, JobSnapshot
from penstock.operator.facts import Facts
from penstock.operator.measurements import Measurements, is_measuring
from penstock.operator.observe import is_closed, is_gone, measuring, observe
from penstock.operator.pending_reasons import first_pod, placement_since
from penstock.operator.planning import Planning
from penstock.operator.restart_benefit import feasible_ranks
from penstock.operator.statuses import (
    begin_attempt,
    compute_status,
    denied,
    enter_phase,
    is_reported_by_service,
    refused,
    summarize,
    without_future,
)
from penstock.planner.worker.protocol import PlanningRequest

PLANNING_SECONDS = 5.0
"""Interval of polls for a plan, in case a notification is lost."""

REMIND_SECONDS = 0.5
"""Delay after an annotation until the pod's reminder is set.

A kubelet writes the annotations that it knew when the write began, but when the write ends it marks as written all that
it has received by then. Those that arrived in between are written a minute or more later, or when the pod changes again
(`MarkRemountRequired` and `AddPodToVolume` in Kubernetes' pkg/kubelet/volumemanager/cache). For a pod that has just
started it may write twice within a fifth of a second. Without a reminder, three such pods in a hundred got their
annotation only after more than a minute.
"""

RETRY_SECONDS = 0.2
MOST_ROUNDS = 12
"""Limit of successive steps in one reconcile; a job's whole life needs fewer."""

RecordPhase = Callable[[JobSnapshot, SetPhase], None]


@dataclass(slots=True)
class _Draft:
    """A job during one reconcile: ``status`` is ahead of the cluster's until it is written.

    ``facts`` are those of the last step. ``deleted`` is the attempt whose JobSet this reconcile has deleted; the JobSet
    may still be in the cache.
    """

    snapshot: JobSnapshot
    job: PipelineJob
    status: JobStatus
    facts: Facts = field(init=False)
    deleted: int = 0
    unrecorded: list[SetPhase] = field(default_factory=list)

    @property
    def spec(self) -> JobSpec:
        """The job's spec."""
        return self.job.spec

    @property
    def record(self) -> JobStatus:
        """The job's record for the engine: the status, including changes that are not written yet."""
        return self.status


class GoneError(PenstockError):
    """The job was deleted during its reconcile."""


class Reconciler:
    """Reconciles jobs, each in one thread at a time. ``record_phase`` publishes a change of phase as an event.

    It is the `penstock.core.engine.Backend` of these jobs.
    """

    def __init__(
        self,
        cache: Cache,
        actions: Actions,
        planning: Planning,
        agents: Agents,
        clock: Callable[[], float],
        record_phase: RecordPhase,
    ) -> None:
        self._cache, self._actions, self._planning, self._agents = cache, actions, planning, agents
        self._clock, self._record_phase = clock, record_phase
        self._plan_keys: dict[str, tuple[int, str]] = {}
        """The newest plan request of each job: its attempt and its key.

        A request outlives its attempt's end, which may fail to be written: the attempt then must not plan again.
        """
        self._plan_mistakes: dict[str, tuple[int, str]] = {}
        """Why no plan can be requested for a job's attempt."""
        self._measurements = Measurements(cache, actions)
        self._outdated_since: dict[str, float] = {}

    def reconcile(self, uid: str) -> float | None:
        """Reconcile the job; return the longest time until the next reconcile in seconds, None to wait for an event."""
        for _ in range(MOST_ROUNDS):
            snapshot = self._cache.job(uid)
            if snapshot is None or snapshot.being_deleted:
                self._forget(uid)
                return None
            try:
                return (
                    self._reconcile_draft(
                        _Draft(snapshot, snapshot.job, without_future(snapshot.status, self._clock()))
                    )
                    if snapshot.job is not None
                    else self._refuse(snapshot)
                )
            except GoneError:
                return None
            except KubeError as error:
                if not error.is_conflict:
                    raise
                self._actions.refresh(snapshot)  # another writer was faster, and the decisions may be different now
        return RETRY_SECONDS

    def waiting_for(self, key: str) -> list[str]:
        """Return the jobs that wait for the answer to this plan request."""
        return [uid for uid, (_, plan_key) in list(self._plan_keys.items()) if plan_key == key]

    def _forget(self, uid: str) -> None:
        self._plan_keys.pop(uid, None)
        self._plan_mistakes.pop(uid, None)
        self._outdated_since.pop(uid, None)
        self._measurements.forget(uid)
        self._agents.forget(uid)

    def _refuse(self, snapshot: JobSnapshot) -> float | None:
        """Fail a job whose spec passed the cluster's validation but not core's, and end its attempt."""
        if snapshot.status.phase.terminal:
            return None
        self._actions.end_attempt(snapshot)
        self._actions.write_status(
            snapshot, refused(snapshot.status, snapshot.mistake, snapshot.generation, self._clock())
        )
        self._record_phase(snapshot, SetPhase(Phase.FAILED, "InvalidSpec", snapshot.mistake))
        return None

    def _reconcile_draft(self, draft: _Draft) -> float | None:
        try:
            return self._finish(draft, self._settle(draft))
        except KubeError as error:
            if error.is_denial or error.is_refusal:
                self._write(draft, denied(draft.status, error, draft.snapshot.generation, self._clock()))
            raise

    def _settle(self, draft: _Draft) -> float | None:
        """Take steps until none follows at once; return the seconds until the next one."""
        for _ in range(MOST_ROUNDS):
            if is_measuring(draft.job) and draft.status.profile is not None:
                break
            wait = step(self, draft, Reading(wall=self._clock()))
            if wait != 0.0:
                return wait
        draft.facts = self._facts(draft)
        return None

    def _finish(self, draft: _Draft, wait: float | None) -> float | None:
        """Write the status of the decisions and observations; return the seconds until the next reconcile."""
        now, facts = self._clock(), draft.facts
        self._write(draft, compute_status(draft.status, facts, draft.snapshot.generation, now))
        waits = [] if wait is None else [wait]
        if facts.plan is Step.WORKING:
            waits.append(PLANNING_SECONDS)
        if facts.agent is not None:
            waits.append(PAUSE_SECONDS if draft.status.phase is Phase.PROFILING else SELDOM_SECONDS)
        waits += self._remind(draft.snapshot.uid, facts, now)
        return max(min(waits), 0.001) if waits else None

    def _remind(self, uid: str, facts: Facts, now: float) -> list[float]:
        """Set the reminder of pods whose annotations are old enough; return the seconds until then for the others."""
        living = (pod for pod in facts.pods if pod.end is None and not pod.being_deleted)
        outdated = [pod for pod in living if pod.annotated != pod.reminder]
        if not outdated:
            self._outdated_since.pop(uid, None)
            return []
        due = self._outdated_since.setdefault(uid, now) + REMIND_SECONDS
        if now < due:
            return [due - now]
        self._actions.remind(outdated)
        del self._outdated_since[uid]
        return []

    def _write(self, draft: _Draft, status: JobStatus) -> None:
        """Write the status to the cluster if it changed, and publish events about new phases.

        ``launched`` is written with the next change: the JobSet shows it until then. The same holds for a checkpoint
        that the service reported.
        """
        if any(jobset.attempt == status.attempt for jobset in self._cache.jobsets(draft.snapshot.uid)):
            status = replace(status, launched=status.attempt)
        before = draft.snapshot.status
        checkpoint = before.checkpoint if is_reported_by_service(status) else status.checkpoint
        if replace(status, launched=before.launched, checkpoint=checkpoint) != before:
            draft.snapshot = self._actions.write_status(draft.snapshot, status)
        draft.status = draft.snapshot.status
        for decision in draft.unrecorded:
            self._record_phase(draft.snapshot, decision)
        draft.unrecorded.clear()

    # Backend: observation

    def observe(self, draft: _Draft, now: Reading, *, fresh: bool = False) -> Observation:
        """Observe the job in the cache, which is refreshed first for a ``fresh`` observation."""
        if fresh:
            self._refresh(draft)
        draft.facts = self._facts(draft)
        return observe(draft.facts, fresh=fresh)

    def _refresh(self, draft: _Draft) -> None:
        """Read the job and its children from the cluster. If the job has changed, the draft takes over its state."""
        fresh = self._actions.refresh(draft.snapshot)
        if fresh is None or fresh.job is None or fresh.being_deleted:
            raise GoneError(f"job {draft.snapshot.namespace}/{draft.snapshot.name} was deleted during its reconcile")
        self._actions.refresh_children(draft.snapshot)
        if fresh.status != draft.snapshot.status or fresh.job != draft.job:
            draft.job, draft.status = fresh.job, without_future(fresh.status, self._clock())
            draft.unrecorded.clear()
        draft.snapshot = fresh

    def _facts(self, draft: _Draft) -> Facts:
        uid, status = draft.snapshot.uid, draft.status
        jobsets = (jobset for jobset in self._cache.jobsets(uid) if jobset.attempt == status.attempt)
        pods, leftovers = self._cache.pods(uid), self._cache.leftovers(uid)
        bare = Facts(
            job=draft.job,
            status=status,
            jobset=next(jobsets, None),
            pods=tuple(pod for pod in pods if pod.attempt == status.attempt),
            nodes=self._cache.nodes(),
            service_since=self._cache.service_since,
            stepped_at=draft.snapshot.stepped_at,
            capacity=self._cache.capacity(uid),
            ahead_seconds=self._cache.ahead_seconds,
            hosts=frozenset(pod.node for pod in (*pods, *leftovers) if pod.node),
            leftovers=tuple(pod for pod in leftovers if pod.attempt == status.attempt),
        )
        plan, plan_message = self._plan_step(draft)
        bare = replace(self._with_places(bare), agent=self._agent_answer(bare))
        return replace(self._measurements.with_profile(bare), plan=plan, plan_message=plan_message)

    def _agent_answer(self, facts: Facts) -> AgentAnswer | None:
        """Return the answer of the first rank's agent, where it is needed: in an attempt that measures, and in one that
        trains while the service is not running, for its checkpoints.
        """
        uid, phase, pod = facts.job.metadata.uid, facts.status.phase, first_pod(facts)
        measures = phase is Phase.PROFILING and measuring(facts)
        trains = phase is Phase.RUNNING and facts.service_since is None
        if pod is None or not pod.address or pod.end is not None or not (measures or trains):
            if phase is not Phase.RUNNING:
                self._agents.forget(uid)
            return None
        return self._agents.poll(pod, measures=measures)

    def _with_places(self, facts: Facts) -> Facts:
        """Return the facts with the competition of other jobs, if the job waits for places."""
        if facts.status.phase is not Phase.QUEUED:
            return facts
        facts = replace(facts, competition=self._cache.competition(facts.job, facts.status))
        since = placement_since(facts)
        if since is None or self._clock() < since + PLACED_IN_PART_SECONDS:
            return facts
        return replace(facts, holders=self._cache.holders(facts.job, facts.status))

    def _plan_key(self, draft: _Draft) -> str | None:
        """Return the key of the newest attempt's plan request."""
        attempt, key = self._plan_keys.get(draft.snapshot.uid, (0, None))
        return key if attempt == draft.status.attempt else None

    def _plan_step(self, draft: _Draft) -> tuple[Step, str]:
        if draft.status.phase not in (Phase.PLANNING, Phase.BINDING):
            return Step.MISSING, ""
        attempt, mistake = self._plan_mistakes.get(draft.snapshot.uid, (0, ""))
        if attempt == draft.status.attempt:
            return Step.FAILED, mistake
        key = self._plan_key(draft)
        if key is None:
            return Step.MISSING, ""
        step, answer = self._planning.status(key)
        return step, answer.error if answer is not None else ""

    # Backend: actions

    def enter(self, draft: _Draft, entered: SetPhase, now: Reading) -> None:
        """Enter the phase in the draft, except Planning if the measurement for the plan proves to be lost."""
        if entered.phase is not Phase.PLANNING or self._measurements.holds(draft.facts, now.wall):
            self._enter(draft, entered, now.wall)

    def _enter(self, draft: _Draft, entered: SetPhase, now: float) -> None:
        status = enter_phase(draft.status, entered, now)
        if entered.phase is Phase.PLANNING:
            status = replace(status, profile=self._measurements.chosen(draft.facts))
            status = self._measurements.retained(status, draft.job)
        if entered.phase is Phase.BINDING:
            plan = self._answered(draft)
            status = replace(status, plan=summarize(plan) if plan else None)
        if entered.reason == "Shrink":
            status = replace(status, feasible_ranks=feasible_ranks(draft.facts))
        draft.status = compute_status(status, draft.facts, draft.snapshot.generation, now)
        draft.unrecorded.append(entered)

    def launch(self, draft: _Draft, launch: Launch, entered: SetPhase | None, now: Reading) -> _Draft:
        """Write the attempt's number before any object has it, so that no two attempts share one."""
        if not is_measuring(draft.job):
            self._actions.require_storage(draft.job, launch.ranks)
        status = begin_attempt(draft.status, launch, bool(draft.spec.kubernetes.queue_name), now.wall)
        bare = replace(draft.facts, jobset=None, pods=())
        self._write(draft, compute_status(status, bare, draft.snapshot.generation, now.wall))
        return draft

    def start(self, draft: _Draft) -> None:
        """Create the objects of the newest attempt."""
        self._actions.launch(draft.job, draft.status)
        draft.status = replace(draft.status, message="")

    def measure(self, draft: _Draft) -> None:
        """Annotate each pod with the request to measure."""
        self._write(draft, draft.status)
        pods = binding.in_order(draft.facts.pods, draft.facts.nodes)
        self._actions.bind(pods, binding.bindings(draft.job, draft.status.attempt, MEASURE_EPOCH, pods))

    def bind(self, draft: _Draft) -> None:
        """Write the plan first, then the bindings: a binding makes a pod read the plan.

        The plan may differ from that of the status after a restart of the operator.
        """
        plan, known = self._answered(draft), draft.status.plan
        assert plan is not None, "the life cycle binds once there is a plan"
        if known is None or known.digest != plan.digest:
            draft.status = replace(draft.status, plan=summarize(plan))
        self._write(draft, draft.status)
        self._actions.publish_plan(draft.job, draft.status.attempt, plan)
        pods = binding.in_order(draft.facts.pods, draft.facts.nodes)
        digest = plan.for_ranks.digest
        self._actions.bind(pods, binding.bindings(draft.job, draft.status.attempt, TRAIN_EPOCH, pods, digest))

    def stop(self, draft: _Draft, reason: str) -> None:
        """Request a checkpoint and the end from each pod."""
        if reason == "Grow":
            draft.status = replace(draft.status, feasible_ranks=feasible_ranks(draft.facts))
        self._write(draft, draft.status)
        self._actions.request_stop(draft.facts.pods, self._clock())

    def delete(self, draft: _Draft) -> None:
        """Delete the JobSet of the newest attempt, unless the job succeeded and no rank is left."""
        facts, attempt = replace(draft.facts, status=draft.status), draft.status.attempt
        is_kept = draft.status.phase is Phase.SUCCEEDED and is_gone(facts)
        if not (is_kept or is_closed(facts) or draft.deleted == attempt):
            self._write(draft, draft.status)
            self._actions.end_attempt(draft.snapshot)
            draft.deleted = attempt

    def expire(self, draft: _Draft) -> None:
        """Delete the job."""
        self._write(draft, draft.status)
        self._actions.remove_job(draft.snapshot)

    def plan(self, draft: _Draft) -> None:
        """Request a plan. Equal requests of many jobs have equal keys: a request does not contain the job's name."""
        if self._has_published(draft):
            return
        try:
            question = self._question(draft)
        except UserError as mistake:
            self._plan_mistakes[draft.snapshot.uid] = (draft.status.attempt, str(mistake))
            return
        if question is not None:
            key = self._planning.request(question, draft.snapshot.namespace)
            self._plan_keys[draft.snapshot.uid] = (draft.status.attempt, key)

    def _question(self, draft: _Draft) -> PlanningRequest | None:
        """The request for the attempt's plan, which is refused if the job cannot be planned; none if its measurement
        proves to be lost.
        """
        known, spec = draft.status.profile, draft.spec
        assert known is not None, "the life cycle plans once there is a measurement"
        try:
            profile = self._actions.profile(draft.snapshot.namespace, known.ref)
        except UserError as lost:
            self._measurements.lose(draft.facts, known.ref, str(lost))
            return None
        resources = replace(spec.resources, ranks=draft.status.ranks)
        planned = replace(spec, resources=resources, kubernetes=KubernetesSpec())
        planned = planned.to_plan(has_checkpoint=draft.status.checkpoint is not None)
        return PlanningRequest(spec=planned, profile=profile)

    def _has_published(self, draft: _Draft) -> bool:
        """Whether an earlier operator published a plan and ended while it bound the pods.

        Some pods may train by that plan, and another version of the planner may answer the same request differently.
        """
        if draft.status.phase is not Phase.BINDING or draft.status.plan is None:
            return False
        plan = self._actions.published_plan(draft.job, draft.status.attempt)
        if plan is None or plan.digest != draft.status.plan.digest:
            return False
        self._plan_keys[draft.snapshot.uid] = (draft.status.attempt, self._planning.remember(plan))
        return True

    def _answered(self, draft: _Draft) -> Plan | None:
        key = self._plan_key(draft)
        answer = self._planning.status(key)[1] if key is not None else None
        return answer.plan if answer is not None else None
