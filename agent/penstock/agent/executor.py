"""Local executor: the loop around `penstock.core.lifecycle.decide` for one run in this process.

Problem. A job is measured, planned, started, watched, restarted after failures, and stopped, and any of these steps may
be cut short: by Ctrl-C, a crash, a lost machine. The same job runs in three places, under `penstock run`, under the
service on one machine, and on Kubernetes, and must behave alike in all of them.

Idea. All decisions are in one pure function, `decide(spec, observed, now)`. Around it there are three loops of the same
form, which only observe and act:

    observe -> decide -> act -> observe ...          until nothing follows, then wait

    loop                                    observes                          acts by
    penstock.agent.executor (this one)      its own child processes           starting and stopping them
    penstock.api.executor.executor          the store and attempts' files     supervisors, which outlive the service
    penstock.operator.reconcile             the cluster, through a cache      objects of Kubernetes

None of them keeps a decision in memory. A loop that was killed starts again from what it observes, and `decide` returns
the same decisions, or none if they were carried out. The state of this loop is state.json in the run directory: phase,
number of the attempt, failures and times. It is replaced atomically before an attempt starts, so a number is never used
twice. Processes are no state: they end with this process, and a restart observes none.

Example of ``penstock run`` with one crash and a stop by the user:

    observed                               decided                                       state.json
    Pending                                SetPhase(Queued)                              Queued
    Queued; then data is prepared          Launch(1), SetPhase(Profiling)                Profiling, attempt 1
    attempt ready, no profile              StartProfile
    profile done                           SetPhase(Planning), then StartPlan            Planning
    plan done                              SetPhase(Binding), then Bind: ranks start     Binding
    attempt running                        SetPhase(Running)                             Running
    rank 3 was killed in step 120          SetPhase(Recovering, AttemptFailed)           Recovering, failures 1
    nothing of attempt 1 is left           SetPhase(Queued), Launch(2, from step 100)    attempt 2; profile and plan
    stay
    Ctrl-C (suspend is set in the spec)    Stop: a checkpoint after this step
    attempt stopped                        SetPhase(Suspended)                           Suspended; exit code 130

On one machine a run is admitted once its data is prepared, and a stop request of the user suspends it; a second request
kills the ranks at once.

Complexity. One round reads the status files of the ranks and the growth of metrics.jsonl, `POLL_SECONDS` apart while
nothing follows. Measuring and planning run in other processes; preparing data and planning block the loop, and a stop
request cuts them short.

Rejected designs:

- A state machine whose transitions act themselves: after a crash it would have to know which of its actions happened.
- One executor class with a backend for each place: the three observe such different things that the interface would be
  as large as `Observed` and the list of decisions, which already are the interface.
- Supervisors here as under the service: a run in the foreground should end with its terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from penstock.agent.attempt import Attempt
from penstock.agent.metrics import LineFollower, MetricsFollower
from penstock.agent.progress_files import newest_checkpoint_step, profile_progress
from penstock.agent.run_observer import RunObserver
from penstock.agent.run_state import PhaseChange, RunState, write_state
from penstock.agent.workers import Workers
from penstock.core.errors import UserError
from penstock.core.host.stopping import StopRequestedError, StopRequests
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.lifecycle import (
    LOSSES,
    AttemptState,
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
from penstock.core.run.folder import RunDir
from penstock.planner.worker.searching import Report

POLL_SECONDS = 0.05


class Decider(Protocol):
    """The executor's profile and plan, which `penstock.agent.plans` provides."""

    def find_profile(self) -> bool:
        """Whether there is a fresh profile, then written to the run directory, or a plan that needs none."""
        ...

    def keep_profile(self) -> None:
        """Store the new profile of the run directory for other runs."""
        ...

    def find_plan(self) -> Plan | None:
        """Return the plan in the run directory, if it matches the job."""
        ...

    def plan(self, report: Report) -> Plan:
        """Make a plan and write it to the run directory; ``report`` gets the progress of the search.

        Raises `UserError` when nothing fits or the search is too large.
        """
        ...


class Executor:
    """Runs ``job`` in the directory ``run`` from ``state`` on, with the directory's lock held by the caller.

    ``clock`` returns seconds since the epoch, ``pause`` sleeps.
    """

    def __init__(
        self,
        job: PipelineJob,
        run: RunDir,
        state: RunState,
        *,
        workers: Workers,
        decider: Decider,
        show: RunObserver,
        requests: StopRequests,
        metrics_port: int | None = None,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._run, self.state = job, run, state
        self._workers, self._decider, self._show, self._requests = workers, decider, show, requests
        self._metrics_port, self._clock, self._pause = metrics_port, clock, pause
        self._metrics, self._warnings = MetricsFollower(run.metrics), LineFollower(run.warnings)
        self._attempt: Attempt | None = None
        self._plan: Plan | None = None
        self._profiled = False
        self._admitted = False

    def run(self) -> RunState:
        """Run until a terminal phase or suspension; no process is left then, also after an error.

        Raises:
            UserError: a mistake that a retry cannot fix; the run has failed.
        """
        try:
            while not self._is_over:
                self._reconcile()
        except UserError as mistake:
            self._kill()
            self._enter(SetPhase(Phase.FAILED, "UserError", str(mistake)))
            raise
        finally:
            self._kill()
            self._show.close()
        return self.state

    @property
    def _is_over(self) -> bool:
        return self.state.phase.terminal or (self._spec.run_policy.suspend and self.state.phase is Phase.SUSPENDED)

    @property
    def _spec(self) -> JobSpec:
        """Return the spec, suspended after a stop request."""
        spec = self._job.spec
        if not self._requests.received:
            return spec
        return dataclasses.replace(spec, run_policy=dataclasses.replace(spec.run_policy, suspend=True))

    def _reconcile(self) -> None:
        """Observe, decide and act once."""
        if len(self._requests.received) > 1:
            self._kill()
        self._follow()
        decisions = decide(self._spec, self._observe(), self._clock())
        for decision in decisions:
            self._apply(decision)
        if self.state.phase is Phase.QUEUED and not self._admitted:
            self._admit()
        elif all(isinstance(decision, Wait) for decision in decisions):
            self._pause(POLL_SECONDS)

    # Observation

    def _follow(self) -> None:
        for line in self._warnings.new():
            self._show.note(line)
        for metrics in self._metrics.new():
            if self._attempt is not None:
                self._attempt.last_step_at = self._clock()
            self._show.stepped(metrics)

    def _observe(self) -> Observed:
        attempt, state = self._attempt, self.state
        prediction = self._plan.prediction if self._plan else None
        return Observed(
            phase=state.phase,
            attempt=state.attempt,
            attempt_state=attempt.state() if attempt else AttemptState.NONE,
            attempt_gone=attempt is None or not attempt.alive,
            attempt_ranks=attempt.num_ranks if attempt else 0,
            stop_requested=attempt is not None and attempt.stop_requested,
            admitted=self._admitted,
            profile=self._profile(),
            plan=Step.DONE if self._plan else Step.MISSING,
            failures=state.failures,
            message=attempt.message if attempt else "",
            active_since=state.started_at,
            failed_at=state.failed_at,
            finished_at=state.finished_at,
            last_step_at=attempt.last_step_at if attempt else None,
            predicted_step_seconds=prediction.step_seconds if prediction else None,
            last_checkpoint=newest_checkpoint_step(self._run),
        )

    def _profile(self) -> Step:
        if not self._profiled and self._attempt is not None:
            step = self._attempt.profile()
            if step is Step.WORKING:
                self._show.measured(*profile_progress(self._run))
            if step is not Step.DONE:
                return step
            self._decider.keep_profile()
            self._profiled = True
        return Step.DONE if self._profiled else Step.MISSING

    # Doing

    def _apply(self, decision: Decision) -> None:
        match decision:
            case SetPhase():
                self._enter(decision)
            case Launch():
                self._launch(decision)
            case StartProfile():
                self._current.measure()
            case StartPlan():
                self._make_plan()
            case Bind():
                self._bind()
            case Stop():
                self._current.stop()
                self._show.note(
                    "stopping after this step and saving a checkpoint; press Ctrl-C again to stop now without one"
                )
            case Delete():
                self._kill()
            case Expire() | Wait():
                pass  # the executor ends before a run expires, and observes again soon enough

    @property
    def _current(self) -> Attempt:
        assert self._attempt is not None, "the life cycle launches before it decides about an attempt"
        return self._attempt

    def _enter(self, decision: SetPhase) -> None:
        self._follow()
        now = self._clock()
        change = PhaseChange(phase=decision.phase, at=now, reason=decision.reason, message=decision.message)
        state = self.state.entered(change)
        if decision.reason in LOSSES:
            state = dataclasses.replace(state, failures=state.failures + 1, failed_at=now)
        self._keep(state)
        self._show.entered(change)
        if decision.reason in LOSSES and self._attempt is not None:
            self._show.lost(self._attempt.last_words)

    def _keep(self, state: RunState) -> None:
        self.state = state
        write_state(self._run.root, state)

    def _launch(self, decision: Launch) -> None:
        self._attempt = Attempt(self._job, self._run, decision.attempt, decision.ranks, self._workers)
        started = self.state.started_at or self._clock()
        self._keep(dataclasses.replace(self.state, attempt=decision.attempt, started_at=started))
        self._show.launched(decision.attempt, decision.resume_from or 0)

    def _admit(self) -> None:
        with contextlib.suppress(StopRequestedError), self._requests.cutting():
            self._workers.prepare(self._job, self._run, self._show.data)
            self._profiled = self._decider.find_profile()
            self._plan = self._decider.find_plan()
            self._admitted = True

    def _make_plan(self) -> None:
        with contextlib.suppress(StopRequestedError), self._requests.cutting():
            self._plan = self._decider.plan(self._show.searching)
            self._show.planned(self._plan)

    def _bind(self) -> None:
        assert self._plan is not None, "planning comes before binding"
        self._current.train(self._plan.num_ranks, self._metrics_port)

    def _kill(self) -> None:
        if self._attempt is not None:
            self._attempt.kill()
