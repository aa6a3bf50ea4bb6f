"""Supervise one attempt: prepare data, measure and train on request, report, and leave no process behind.

Problem. An attempt runs for hours, and the service that started it may be restarted at any time: for an upgrade, after
a crash, or with ``kill -9``. Training has to go on meanwhile, and the next service has to be able to observe and stop
it. When the attempt itself ends, for any reason, no rank may keep running: an orphaned rank holds its device and may
write to the same checkpoints as the next attempt.

Idea. Each attempt has a supervisor, a separate process in a session of its own. It communicates with the service only
by files, through a `Mailbox`: requests (``measure``, ``stop``, a binding with the plan's digest) and one report, which
is replaced atomically. On one machine these are files in the attempt's folder; in a pod they are annotations and a
ConfigMap, which the kubelet writes (`penstock.agent.pod_mailbox`). A request is a file that is created once and never
removed. So reading it is idempotent, and it is not lost if either side is down for a while.

An attempt never has a second supervisor. Before anything else, `claim` creates the claim file exclusively and durably.
The file has the process id, its start time and the boot id, so that a service can distinguish a running supervisor from
a later process with the same id. A second supervisor fails with `ClaimedError`, even after the first one has ended: the
life cycle counts a lost supervisor as a failed attempt, and launches the attempt with the next number.

The main loop polls every `POLL_SECONDS`: fulfil requests, observe processes and files, report if something changed. Two
guards limit the lifetime of processes. `offspring_ended` makes this process the subreaper of everything that a rank
forks, and ends all of it at the end of the block. A parent-death signal ends the ranks if this process is killed.

Example of an attempt on one machine (``->`` a request that appears, ``<-`` a report):

    0.0 s   claim; <- starting; prepare the data
    4.1 s   <- ready, profile missing
    4.5 s   -> measure.wish             the service has no profile of this machine
    4.6 s   <- ready, profile working, 0 of 212 points
    71 s    <- ready, profile done      profile.json is in the run directory
    73 s    -> binding.json             the service wrote plan.json before
    73.1 s  <- running                  ranks were started by torchrun
    80 s    the service is killed with SIGKILL: nothing happens here
    95 s    -> stop.wish                the next service read the claim and the report
    97 s    <- stopped                  the ranks finished their step and saved a checkpoint

Complexity. A poll reads the status files of this host's ranks and a few other small files, in about 0.1 ms for few
ranks. At 10 polls per second this costs 0.1 % of one core. A report is written only when it differs from the last one.
The time of the last step is rounded up to `STEP_GRAIN_SECONDS`, so training writes a report every 5 s and not with
every step.

Rejected designs:

- Ranks as children of the service: they would end with it, or it would have to find them again by process ids alone.
- A socket between service and supervisor: messages are lost while either side is down, so both would need a protocol
  for reconnection and deduplication. Files need neither.
- A systemd unit for each attempt: not available in containers, nor to unprivileged users.
- Restarting ranks inside the attempt (torchrun's elastic mode): the plan depends on the hosts, so a restart may need a
  new measurement and a new plan, and only the life cycle decides about those.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.agent.attempt import Attempt, ProfileDecider
from penstock.agent.local_launch import holding
from penstock.agent.mailbox import FolderMailbox, Mailbox
from penstock.agent.metrics import Growth, MetricsFollower
from penstock.agent.process_tree import offspring_ended
from penstock.agent.replanner import Replanner
from penstock.agent.shipper import shipping
from penstock.agent.stalling import Steps
from penstock.agent.workers import Workers
from penstock.core.errors import PenstockError, RunError, UserError
from penstock.core.host.launches import InUseError
from penstock.core.host.stopping import StopRequestedError, StopRequests, listening
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.plan import Plan
from penstock.core.preparing import Reporter
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.run.claims import take, this_process
from penstock.core.run.folder import RunDir
from penstock.core.run.lock import locked
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Order, SupervisorRequest
from penstock.planner.worker.process import Planner, ProcessPlanner

POLL_SECONDS = 0.1
STEP_GRAIN_SECONDS = 5.0
"""Granularity of the last step's time in the report, so that the report is not rewritten with every step."""
DEADLINE = "exceeded spec.runPolicy.activeDeadlineSeconds"


class ClaimedError(PenstockError):
    """Another process supervises this attempt, or did."""


def claim(folder: AttemptFolder) -> None:
    """Become the attempt's supervisor; raises `ClaimedError` if another process was first, even if it has ended."""
    if not take(folder, this_process()):
        raise ClaimedError(f"attempt {folder.attempt} in {folder.root} already has a supervisor")


class Supervisor:
    """Fulfils the mailbox's requests for attempt ``number``, and reports its state there.

    The attempt fails at ``deadline_at``. ``steps`` creates the source of progress in steps for a run directory, by
    which the attempt fails if it is stalled. A signal ends the attempt immediately, or after a checkpoint
    if ``graceful`` is set. ``clock`` returns seconds since the epoch, ``seconds`` those of a monotonic clock, and
    ``pause`` sleeps. ``each_poll`` is called before each poll. With a ``planner``, the attempt is planned again while
    it runs (`penstock.agent.replanner`).
    """

    def __init__(
        self,
        job: PipelineJob,
        run: RunDir,
        number: int,
        mailbox: Mailbox,
        *,
        workers: Workers,
        decider: ProfileDecider,
        requests: StopRequests,
        deadline_at: float | None = None,
        steps: Callable[[RunDir], Steps] = lambda run: Growth(run.metrics),
        graceful: bool = False,
        each_poll: Callable[[], None] = lambda: None,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.time,
        seconds: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._run, self._mailbox = job, run, mailbox
        self._workers, self._decider, self._requests = workers, decider, requests
        limit = job.spec.run_policy.active_deadline_seconds
        if deadline_at is not None and limit:
            deadline_at = min(deadline_at, clock() + limit)  # the clock may have been set back since it was computed
        self._deadline_at, self._graceful = deadline_at, graceful
        self._make_steps, self._each_poll = steps, each_poll
        self._clock, self._pause = clock, pause
        self._attempt = Attempt(job, run, number, workers, decider)
        self._report = AttemptReport(state=AttemptState.STARTING)
        self._steps: Steps | None = None
        self._predicted_step_seconds: float | None = None
        self._metrics = MetricsFollower(run.metrics)
        self._replanner = Replanner(job.spec, run, planner, seconds, self._note, num_searches=number - 1)
        self._note_text, self._plan_digest = "", ""

    def run(self) -> AttemptReport:
        """Supervise the attempt until it has ended; return the last report. No process of the attempt is left then."""
        self._publish(self._report)
        try:
            self._prepare()
            while not self._report.ended:
                self._each_poll()
                self._poll_once()
                self._pause(POLL_SECONDS)
        except PenstockError as error:
            refused = isinstance(error, UserError)
            self._end(replace(self._report, state=AttemptState.FAILED, message=str(error), refused=refused))
        except StopRequestedError:
            state = AttemptState.STOPPED if self._graceful else AttemptState.FAILED
            message = "the supervisor received a signal and ended the attempt"
            self._end(replace(self._report, state=state, message=message), is_failure=False)
        finally:
            self._attempt.kill()
            self._replanner.close()
        return self._report

    def _prepare(self) -> None:
        with self._requests.cutting():
            self._workers.prepare(self._job, self._run, Reporter())
            if self._decider.find_profile():
                self._attempt.profile = Step.DONE
        self._publish(self._attempt.report())

    def _poll_once(self) -> None:
        if not self._graceful:
            self._requests.check()
        if self._deadline_at is not None and self._clock() >= self._deadline_at:
            self._end(replace(self._report, state=AttemptState.FAILED, message=DEADLINE), is_failure=False)
            return
        self._fulfil_requests()
        self._replan()
        report = self._watched(self._observe())
        if report.ended:
            self._end(report)
        else:
            self._publish(report)

    def _end(self, report: AttemptReport, *, is_failure: bool = True) -> None:
        """End what is left of the attempt, write the plan of the next one, and publish the last report, which names it.

        With ``is_failure``, a failed attempt may return to the former plan.
        """
        has_failed = is_failure and report.state is AttemptState.FAILED and not self._attempt.stop_requested
        self._attempt.kill()
        has_succeeded = report.state is AttemptState.SUCCEEDED
        self._name_plan(self._replanner.end(has_failed=has_failed, has_succeeded=has_succeeded))
        self._publish(report)

    def _fulfil_requests(self) -> None:
        """Fulfil new requests: stop, measure, or train once the attempt is bound to a plan."""
        mailbox = self._mailbox
        if self._attempt.profile is Step.MISSING and mailbox.is_requested(SupervisorRequest.MEASURE):
            self._attempt.measure()
        if self._requests.received or mailbox.is_requested(SupervisorRequest.STOP):
            self._stop()
        elif self._steps is None and self._attempt.profile is not Step.WORKING:
            self._train()

    def _stop(self) -> None:
        """Request the end of the attempt, except while ranks start: they might miss the signal."""
        if not self._attempt.stop_requested and self._report.state is not AttemptState.STARTING:
            self._attempt.stop()
            if self._steps is not None:
                self._steps.record_stop_request()

    def _train(self) -> None:
        binding = self._mailbox.binding()
        if binding is None:
            return
        plan = self._run.read_plan()
        if plan.digest != binding.plan_digest:
            what = f"is bound to plan {binding.plan_digest[:12]}, but the run directory has plan {plan.digest[:12]}"
            remedy = "do not edit plan.json of a running attempt; submit the job again"
            raise UserError(what=what, where=f"attempt {self._attempt.number}", remedy=remedy)
        self._steps = self._make_steps(self._run)
        self._predicted_step_seconds = plan.prediction.step_seconds if plan.prediction else None
        self._replanner.begin(plan)
        self._attempt.train(plan.num_ranks, None)

    def _observe(self) -> AttemptReport:
        report = self._attempt.report()
        is_stopped = self._attempt.stop_requested and report.state is AttemptState.READY
        return replace(
            report,
            state=AttemptState.STOPPED if is_stopped else report.state,
            last_step_at=self._last_step_at(),
            better_plan=self._replanner.better is not None,
        )

    def _replan(self) -> None:
        """Follow the steps, and name a plan that the ranks have changed to."""
        if self._report.state is AttemptState.RUNNING and self._replanner.is_watching:
            for metrics in self._metrics.new():
                self._replanner.stepped(metrics)
            self._name_plan(self._replanner.poll())

    def _name_plan(self, plan: Plan | None) -> None:
        """Name the plan in the reports, if it is not the one of the binding."""
        if plan is not None:
            self._plan_digest = plan.digest

    def _note(self, text: str) -> None:
        self._note_text = text

    def _watched(self, report: AttemptReport) -> AttemptReport:
        """Return the report, as failed if the attempt is stalled."""
        if self._steps is None or report.state is not AttemptState.RUNNING:
            return report
        message = self._steps.stall_message(self._predicted_step_seconds)
        return replace(report, state=AttemptState.FAILED, message=message) if message else report

    def _last_step_at(self) -> float | None:
        if self._steps is None or not self._steps.has_advanced():
            return self._report.last_step_at
        return math.ceil(self._clock() / STEP_GRAIN_SECONDS) * STEP_GRAIN_SECONDS

    def _publish(self, report: AttemptReport) -> None:
        self._report = replace(report, replanning=self._note_text, plan_digest=self._plan_digest)
        self._mailbox.report(self._report)


def read_order(root: Path, attempt: int) -> Order:
    """Read the service's order for the supervisor from the run directory ``root``.

    Raises `UserError` if the order is missing or malformed.
    """
    path = AttemptFolder(root, attempt).order
    try:
        return Order.from_manifest(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else f"is not JSON: {error}"
        remedy = "start the attempt through the service, or use penstock run, which needs no order"
        raise UserError(what=reason, where=str(path), remedy=remedy) from None


def supervise(
    root: Path, order: Order, *, workers: Workers, decider: Callable[[PipelineJob, RunDir], ProfileDecider]
) -> int:
    """Claim the attempt in the run directory ``root`` and supervise it to its end; return the exit code.

    Raises:
        ClaimedError: another process claimed the attempt before.
        RunError: another program holds resources that the attempt needs.
        UserError: another attempt's supervisor still holds the run directory, or files in it are malformed.
    """
    run, folder = RunDir(root.absolute()), AttemptFolder(root.absolute(), order.attempt)
    claim(folder)
    try:
        with listening() as requests, contextlib.ExitStack() as stack:
            run.create()
            stack.enter_context(locked(run.root))
            job = run.read_job()
            what = f"job {job.metadata.namespace}/{job.metadata.name} of a service"
            try:
                stack.enter_context(holding(job.spec, what, uid=order.uid, devices=order.devices))
            except InUseError as error:
                raise RunError(error.what) from None  # a later attempt may succeed
            shipper = stack.enter_context(shipping(run.root, order))
            stack.enter_context(offspring_ended(lambda: shipper.pids))
            supervisor = Supervisor(
                job,
                run,
                order.attempt,
                FolderMailbox(folder),
                workers=workers,
                decider=decider(job, run),
                requests=requests,
                deadline_at=order.deadline_at,
                each_poll=shipper.ensure_running,
                planner=ProcessPlanner(),
            )
            return 0 if supervisor.run().state is not AttemptState.FAILED else 1
    except Exception as error:
        report = AttemptReport(state=AttemptState.FAILED, message=str(error), refused=isinstance(error, UserError))
        with contextlib.suppress(OSError):
            write_json(folder.report, report.to_manifest())
        raise
