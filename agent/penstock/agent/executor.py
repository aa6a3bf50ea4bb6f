"""Local executor: the loop around `penstock.core.engine.step` for one run in this process, and its backend.

Problem. A job is measured, planned, started, watched, restarted after failures, and stopped, and any of these steps may
be cut short: by Ctrl-C, a crash, a lost machine. The same job runs in three places, under `penstock run`, under the
service on one machine, and on Kubernetes, and must behave alike in all of them.

Idea. All decisions are in one pure function, `penstock.core.lifecycle.decide`. It is called in one place,
`penstock.core.engine.step`, which observes and acts through a `Backend`:

    observe -> decide -> act -> observe ...          until nothing follows, then wait

    loop                                    observes                          acts by
    penstock.agent.executor (this one)      its own child processes           starting and stopping them
    penstock.api.executor.executor          the store and attempts' files     supervisors, which outlive the service
    penstock.operator.reconcile             the cluster, through a cache      objects of Kubernetes

An attempt here and the supervisor of one report by the same code, `penstock.agent.attempt`.

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
    nothing of attempt 1 is left           SetPhase(Queued), Launch(2, from step 100)    attempt 2; profile, plan stay
    Ctrl-C (suspend is set in the spec)    Stop: a checkpoint after this step
    attempt stopped                        SetPhase(Suspended)                           Suspended; exit code 130

On one machine a run is admitted once its data is prepared, and a stop request of the user suspends it; a second request
kills the ranks at once.

Complexity. One round reads the status files of the ranks and the growth of metrics.jsonl, `POLL_SECONDS` apart while
nothing follows. Measuring and planning run in other processes; preparing data and planning block the loop, and a stop
request cuts them short.

Rejected designs:

- A state machine whose transitions act themselves: after a crash it would have to know which of its actions happened.
- Supervisors here as under the service: a run in the foreground should end with its terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.agent.attempt import Attempt, ProfileDecider
from penstock.agent.metrics import LineFollower, MetricsFollower
from penstock.agent.progress_files import newest_checkpoint_step
from penstock.agent.replanner import Replanner
from penstock.agent.run_observer import RunObserver
from penstock.agent.run_state import PhaseChange, RunState, write_state
from penstock.agent.workers import Workers
from penstock.core.clocks import Ages, Reading
from penstock.core.engine import Job, step
from penstock.core.errors import UserError
from penstock.core.host.clocks import read_clocks
from penstock.core.host.stopping import StopRequestedError, StopRequests
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.lifecycle import LOSSES, AttemptState, Launch, Observation, Phase, SetPhase, Step
from penstock.core.plan import Plan
from penstock.core.processes import ProcessState, failure_changes, observation
from penstock.core.run.folder import RunDir
from penstock.core.supervision import AttemptReport
from penstock.planner.worker.process import Planner
from penstock.planner.worker.searching import Report

POLL_SECONDS = 0.05
STOPPING = "stopping after this step and saving a checkpoint; press Ctrl-C again to stop now without one"


class Decider(ProfileDecider, Protocol):
    """The executor's profile and plan, which `penstock.agent.plans` provides."""

    def find_plan(self) -> Plan | None:
        """Return the plan in the run directory, if it matches the job."""

    def plan(self, report: Report) -> Plan:
        """Make a plan and write it to the run directory; ``report`` gets the progress of the search.

        Raises `UserError` when nothing fits or the search is too large.
        """


_Run = Job[RunState]


class Executor:
    """Runs ``job`` in the directory ``run`` from ``state`` on, with the directory's lock held by the caller.

    It is the `penstock.core.engine.Backend` of this one run. With a ``planner``, a running attempt may be planned again
    (`penstock.agent.replanner`). ``pause`` sleeps.
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
        planner: Planner | None = None,
        clock: Callable[[], Reading] = read_clocks,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._run, self.state = job, run, state
        self._workers, self._decider, self._show, self._requests = workers, decider, show, requests
        self._metrics_port, self._clock, self._pause = metrics_port, clock, pause
        self._metrics, self._warnings = MetricsFollower(run.metrics), LineFollower(run.warnings)
        self._ages = Ages()
        self._attempt: Attempt | None = None
        self._plan: Plan | None = None
        self._profile = Step.MISSING
        self._admitted = False
        self._replanner = Replanner(job.spec, run, planner, lambda: self._clock().boottime, show.note)

    def run(self) -> RunState:
        """Run until a terminal phase or suspension; no process is left then, also after an error.

        Raises:
            UserError: a mistake that a retry cannot fix; the run has failed.
        """
        try:
            while not self._is_over:
                self._turn()
        except UserError as mistake:
            self._end_attempt()
            self._enter(SetPhase(Phase.FAILED, "UserError", str(mistake)), self._clock())
            raise
        finally:
            self._end_attempt()
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

    def _turn(self) -> None:
        """Take a step of the run, prepare it once it is queued, or wait."""
        if len(self._requests.received) > 1:
            self._end_attempt()
        wait = step(self, _Run(spec=self._spec, record=self.state), self._clock())
        if self.state.phase is Phase.QUEUED and not self._admitted:
            self._admit()
        elif wait != 0.0:
            self._pause(POLL_SECONDS)

    def _admit(self) -> None:
        with contextlib.suppress(StopRequestedError), self._requests.cutting():
            self._workers.prepare(self._job, self._run, self._show)
            self._profile = Step.DONE if self._decider.find_profile() else Step.MISSING
            self._plan = self._decider.find_plan()
            self._admitted = True

    # Observation

    def _follow(self) -> None:
        for line in self._warnings.new():
            self._show.note(line)
        for metrics in self._metrics.new():
            if self._attempt is not None:
                self._attempt.last_step = metrics.step
            self._show.stepped(metrics)
            self._replanner.stepped(metrics)

    def observe(self, run: _Run, now: Reading, *, fresh: bool = False) -> Observation:
        """Observe the processes; an attempt is alive until it is deleted, as this process supervises it.

        The run may start once it is prepared: the machine is its own.
        """
        self._follow()
        if self.state.phase is Phase.RUNNING:
            self._plan = self._replanner.poll() or self._plan
        attempt = self._attempt
        prediction = self._plan.prediction if self._plan else None
        if attempt is not None:
            report = attempt.report()
            self._profile = Step.DONE if report.profile is Step.DONE else Step.MISSING
        else:
            newest = newest_checkpoint_step(self._run)
            report = AttemptReport(state=AttemptState.NONE, profile=self._profile, last_checkpoint=newest)
        if report.profile is Step.WORKING:
            self._show.measured(report.done, report.total)
        state = ProcessState(
            claimed=attempt is not None,
            alive=attempt is not None,
            admitted=self._admitted,
            stop_requested=attempt is not None and attempt.stop_requested,
            report=report,
            mark=attempt.last_step if attempt else None,
            plan=Step.DONE if self._plan else Step.MISSING,
            predicted_step_seconds=prediction.step_seconds if prediction else None,
            better_plan=self._replanner.better is not None,
        )
        return observation(run, state, self._ages, now)

    # Actions

    def enter(self, run: _Run, entered: SetPhase, now: Reading) -> None:
        """Write the phase to state.json, and show it with the last lines of a lost attempt."""
        self._enter(entered, now)
        if entered.reason in LOSSES and self._attempt is not None:
            self._show.lost(self._attempt.last_words)

    def _enter(self, entered: SetPhase, now: Reading, **changes: Any) -> None:
        self._follow()
        change = PhaseChange(phase=entered.phase, at=now.wall, reason=entered.reason, message=entered.message)
        changes |= failure_changes(self.state, entered, now)
        self.state = dataclasses.replace(self.state.entered(change), **changes)
        write_state(self._run.root, self.state)
        self._show.entered(change)

    def launch(self, run: _Run, launch: Launch, entered: SetPhase | None, now: Reading) -> _Run:
        """Write the attempt's number and its phase to state.json."""
        assert entered is not None, "attempts wait for nothing here"
        self._show.launched(launch.attempt, launch.resume_from or 0)
        self._enter(entered, now, attempt=launch.attempt, started_at=self.state.started_at or now.wall)
        return dataclasses.replace(run, record=self.state)

    def start(self, run: _Run) -> None:
        """Become ready to measure or to train: no process runs before."""
        number, profile = run.record.attempt, self._profile
        self._attempt = Attempt(self._job, self._run, number, self._workers, self._decider, profile)

    @property
    def _current(self) -> Attempt:
        assert self._attempt is not None, "the life cycle launches before it decides about an attempt"
        return self._attempt

    def measure(self, run: _Run) -> None:
        """Start measuring."""
        self._current.measure()

    def plan(self, run: _Run) -> None:
        """Plan. A stop request ends the search."""
        with contextlib.suppress(StopRequestedError), self._requests.cutting():
            self._plan = self._decider.plan(self._show.searching)
            self._show.planned(self._plan)

    def bind(self, run: _Run) -> None:
        """Start training."""
        assert self._plan is not None, "planning comes before binding"
        self._replanner.begin(self._plan)
        self._current.train(self._plan.num_ranks, self._metrics_port)

    def stop(self, run: _Run, reason: str) -> None:
        """Request a checkpoint. A user who stopped the run learns how to end it without one."""
        self._current.stop()
        if self._requests.received:
            self._show.note(STOPPING)

    def delete(self, run: _Run) -> None:
        """Kill what is left of the attempt."""
        self._end_attempt()

    def expire(self, run: _Run) -> None:
        """Keep the run: its loop ends before its time to live does, and its directory is the user's."""

    def _end_attempt(self) -> None:
        if self._attempt is None:
            return
        is_stopped = self._attempt.stop_requested or bool(self._requests.received)
        self._attempt.kill()
        self._attempt = None
        has_succeeded = self._run.read_result().get("outcome") == "succeeded"
        has_failed = not is_stopped and not has_succeeded
        self._plan = self._replanner.end(has_failed=has_failed, has_succeeded=has_succeeded) or self._plan
