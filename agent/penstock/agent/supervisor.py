"""The supervisor of one attempt: a process of its own, so that a service may be killed and find its jobs again.

It prepares the data, measures and trains on request, reports, and ends its processes and their orphans. If it is
killed itself, ranks die with it. Requests and reports go through a `Mailbox`: on this machine by the attempt's
folder, which it claims first, in a pod by the pod's files (`penstock.agent.pod`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from penstock.agent.attempt import Attempt
from penstock.agent.mailbox import FolderMailbox, Mailbox
from penstock.agent.metrics import Growth
from penstock.agent.process_tree import offspring_ended
from penstock.agent.progress_files import newest_checkpoint_step, profile_progress
from penstock.agent.shipper import shipping
from penstock.agent.stalling import StallWatch, Steps
from penstock.agent.workers import Workers
from penstock.core.errors import PenstockError, UserError
from penstock.core.host.stopping import StopRequestedError, StopRequests, listening
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.preparing import Reporter
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.run.claims import take, this_process
from penstock.core.run.folder import RunDir
from penstock.core.run.lock import locked
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Order, Wish

POLL_SECONDS = 0.1
STEP_GRAIN_SECONDS = 5.0
"""Times of steps are rounded up to it: otherwise the report would be rewritten with every step."""
DEADLINE = "ran longer than its deadline"


class ProfileDecider(Protocol):
    """The part of `penstock.agent.executor.Decider` that an attempt uses."""

    def find_profile(self) -> bool:
        """Whether there is a fresh profile, or a plan that needs none."""
        ...

    def keep_profile(self) -> None:
        """Keep the new profile in the run directory for later plans."""
        ...


class ClaimedError(PenstockError):
    """Another process supervises this attempt, or did."""


def claim(folder: AttemptFolder) -> None:
    """Become the attempt's supervisor; raises `ClaimedError` if another process was first, even if it has ended."""
    if not take(folder, this_process()):
        raise ClaimedError(f"attempt {folder.attempt} in {folder.root} has its supervisor")


class Supervisor:
    """Fulfils the mailbox's requests for attempt ``number``, and reports its state there.

    It ends at ``deadline_at``. ``steps`` shows whether steps are taken; with ``watch`` an attempt without has failed.
    A signal ends the attempt at once, or if it is ``graceful`` after a checkpoint. ``clock`` gives seconds since the
    epoch, ``pause`` lets some pass. ``each_turn`` is called in each turn.
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
        watch: StallWatch | None = None,
        graceful: bool = False,
        each_turn: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._run, self._mailbox = job, run, mailbox
        self._workers, self._decider, self._requests = workers, decider, requests
        self._deadline_at, self._graceful = deadline_at, graceful
        self._make_steps, self._watch, self._each_turn = steps, watch, each_turn
        self._clock, self._pause = clock, pause
        self._attempt = Attempt(job, run, number, job.spec.resources.ranks, workers)
        self._report = AttemptReport(state=AttemptState.STARTING)
        self._steps: Steps | None = None
        self._predicted_step_seconds: float | None = None
        self._measuring = False

    def run(self) -> AttemptReport:
        """Supervise until the attempt has ended, or a stop is requested; none of its processes is left then."""
        self._tell(self._report)
        try:
            self._prepare()
            while not self._report.ended:
                self._each_turn()
                self._turn()
                self._pause(POLL_SECONDS)
        except PenstockError as error:
            refused = isinstance(error, UserError)
            self._tell(replace(self._report, state=AttemptState.FAILED, message=str(error), refused=refused))
        except StopRequestedError:
            state = AttemptState.STOPPED if self._graceful else AttemptState.FAILED
            self._tell(replace(self._report, state=state, message="was ended from outside"))
        finally:
            self._attempt.kill()
        return self._report

    def _prepare(self) -> None:
        with self._requests.cutting():
            self._workers.prepare(self._job, self._run, Reporter())
            has_profile = self._decider.find_profile()
        self._tell(AttemptReport(state=AttemptState.READY, profile=Step.DONE if has_profile else Step.MISSING))

    def _turn(self) -> None:
        if not self._graceful:
            self._requests.check()
        if self._deadline_at is not None and self._clock() >= self._deadline_at:
            self._tell(replace(self._report, state=AttemptState.FAILED, message=DEADLINE))
            return
        self._heed()
        self._tell(self._watched(self._look()))

    def _heed(self) -> None:
        """Fulfil new requests."""
        mailbox = self._mailbox
        if not self._measuring and self._report.profile is Step.MISSING and mailbox.wished(Wish.MEASURE):
            self._measuring = True
            self._attempt.measure()
        if self._requests.received or mailbox.wished(Wish.STOP):
            self._stop()
        elif self._steps is None and self._report.profile is not Step.WORKING:
            self._train()

    def _stop(self) -> None:
        """Ranks might miss the signal while they start, so it is sent once they run."""
        if not self._attempt.stop_requested and self._report.state is not AttemptState.STARTING:
            self._attempt.stop()
            if self._watch is not None:
                self._watch.asked_to_stop()

    def _train(self) -> None:
        binding = self._mailbox.binding()
        if binding is None:
            return
        plan = self._run.read_plan()
        if plan.digest != binding.plan_digest:
            what = f"is bound to plan {binding.plan_digest[:12]}, the run directory holds {plan.digest[:12]}"
            raise UserError(what=what, where=f"attempt {self._attempt.number}", remedy="submit the job again")
        self._steps = self._make_steps(self._run)
        self._predicted_step_seconds = plan.prediction.step_seconds if plan.prediction else None
        self._attempt.train(plan.num_ranks, None)

    def _look(self) -> AttemptReport:
        profile = self._profile()
        state = AttemptState.FAILED if profile is Step.FAILED else self._attempt.state()
        if self._attempt.stop_requested and state is AttemptState.READY:
            state = AttemptState.STOPPED
        done, total = profile_progress(self._run) if self._measuring else (0, 0)
        return AttemptReport(
            state=state,
            profile=profile,
            num_ranks=self._attempt.num_ranks,
            message=self._attempt.message,
            last_words=self._attempt.last_words,
            done=done,
            total=total,
            last_checkpoint=newest_checkpoint_step(self._run),
            last_step_at=self._last_step_at(),
        )

    def _watched(self, report: AttemptReport) -> AttemptReport:
        """Fail the attempt if it takes no steps; no other process reports it."""
        if self._watch is None or report.state is not AttemptState.RUNNING:
            return report
        inside = self._steps is not None and self._steps.inside()
        complaint = self._watch.complaint(self._predicted_step_seconds, inside=inside)
        return replace(report, state=AttemptState.FAILED, message=complaint) if complaint else report

    def _last_step_at(self) -> float | None:
        if self._steps is None or not self._steps.seen():
            return self._report.last_step_at
        if self._watch is not None:
            self._watch.stepped()
        return math.ceil(self._clock() / STEP_GRAIN_SECONDS) * STEP_GRAIN_SECONDS

    def _profile(self) -> Step:
        if not self._measuring or self._report.profile is Step.DONE:
            return self._report.profile
        step = self._attempt.profile()
        if step is Step.DONE:
            self._decider.keep_profile()
        return step

    def _tell(self, report: AttemptReport) -> None:
        self._report = report
        self._mailbox.tell(report)


def read_order(root: Path, attempt: int) -> Order:
    """The input of an attempt's supervisor, which the service left in the run directory ``root``."""
    return Order.from_manifest(json.loads(AttemptFolder(root, attempt).order.read_text()))


def supervise(
    root: Path, order: Order, *, workers: Workers, decider: Callable[[PipelineJob, RunDir], ProfileDecider]
) -> int:
    """Claim the attempt in the run directory ``root`` and supervise it to its end; the exit code.

    Raises:
        ClaimedError: another process did so before.
        UserError: another attempt's supervisor still holds the run directory, or its files are broken.
    """
    run, folder = RunDir(root.absolute()), AttemptFolder(root.absolute(), order.attempt)
    claim(folder)
    try:
        with listening() as requests, contextlib.ExitStack() as stack:
            run.create()
            stack.enter_context(locked(run.root))
            job = run.read_job()
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
                each_turn=shipper.look,
            )
            return 0 if supervisor.run().state is not AttemptState.FAILED else 1
    except Exception as error:
        report = AttemptReport(state=AttemptState.FAILED, message=str(error), refused=isinstance(error, UserError))
        with contextlib.suppress(OSError):
            write_json(folder.report, report.to_manifest())
        raise
