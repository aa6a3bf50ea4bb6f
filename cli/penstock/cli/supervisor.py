"""The supervisor of one attempt: a process of its own, so that a service may be killed and find its jobs again.

It claims the attempt, prepares the data, measures and trains when asked, reports, and ends what it started and what
that left behind. If it is killed itself, ranks die with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from penstock.api.executor.claims import take, this_process
from penstock.api.executor.folder import AttemptFolder
from penstock.cli.attempt import Attempt
from penstock.cli.executor import Decider, newest_checkpoint_step, profile_progress
from penstock.cli.metrics import Growth
from penstock.cli.offspring import offspring_ended
from penstock.cli.state import locked
from penstock.cli.stopping import StopRequestedError, StopRequests, listening
from penstock.cli.workers import Workers
from penstock.core.errors import PenstockError, UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.supervision import AttemptReport, Binding, Order, Wish
from penstock.trainer.data.reporter import Reporter
from penstock.trainer.rundir import RunDir, write_json

POLL_SECONDS = 0.1
STEP_GRAIN_SECONDS = 5.0
"""Times of steps are rounded up to it: the report would be written anew with every step otherwise."""
DEADLINE = "ran longer than its deadline"


class ClaimedError(PenstockError):
    """Another process supervises this attempt, or did."""


def claim(folder: AttemptFolder) -> None:
    """Become the attempt's supervisor; raises `ClaimedError` if another process was first, whatever became of it."""
    if not take(folder, this_process()):
        raise ClaimedError(f"attempt {folder.attempt} in {folder.root} has its supervisor")


class Supervisor:
    """Does what the files of ``folder`` ask, and tells in its report where it is.

    ``clock`` gives seconds since the epoch, ``pause`` lets some pass.
    """

    def __init__(
        self,
        job: PipelineJob,
        run: RunDir,
        order: Order,
        *,
        workers: Workers,
        decider: Decider,
        requests: StopRequests,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._run, self._order = job, run, order
        self._folder = AttemptFolder(run.root, order.attempt)
        self._workers, self._decider, self._requests = workers, decider, requests
        self._clock, self._pause = clock, pause
        self._attempt = Attempt(job, run, order.attempt, job.spec.resources.ranks, workers)
        self._report = AttemptReport(state=AttemptState.STARTING)
        self._told: AttemptReport | None = None
        self._steps: Growth | None = None
        self._measuring = False

    def run(self) -> AttemptReport:
        """Supervise until the attempt has ended, or this process is asked to end it; nothing of it is left then."""
        self._tell(self._report)
        try:
            self._prepare()
            while not self._report.ended:
                self._turn()
                self._pause(POLL_SECONDS)
        except PenstockError as error:
            refused = isinstance(error, UserError)
            self._tell(replace(self._report, state=AttemptState.FAILED, message=str(error), refused=refused))
        except StopRequestedError:
            self._tell(replace(self._report, state=AttemptState.FAILED, message="was ended from outside"))
        finally:
            self._attempt.kill()
        return self._report

    def _prepare(self) -> None:
        with self._requests.cutting():
            self._workers.prepare(self._job, self._run, Reporter())
            found = self._decider.find_profile()
        self._tell(AttemptReport(state=AttemptState.READY, profile=Step.DONE if found else Step.MISSING))

    def _turn(self) -> None:
        self._requests.check()
        if self._order.deadline_at is not None and self._clock() >= self._order.deadline_at:
            self._tell(replace(self._report, state=AttemptState.FAILED, message=DEADLINE))
            return
        self._heed()
        self._tell(self._look())

    def _heed(self) -> None:
        """Do what was asked for and not done yet."""
        if self._folder.wish(Wish.MEASURE).exists() and not self._measuring and self._report.profile is Step.MISSING:
            self._measuring = True
            self._attempt.measure()
        if self._folder.wish(Wish.STOP).exists():
            self._stop()
        elif self._folder.binding.exists() and self._steps is None:
            self._train()

    def _stop(self) -> None:
        """Ranks that still start might not hear it, so they are told once they run."""
        if not self._attempt.stop_requested and self._report.state is not AttemptState.STARTING:
            self._attempt.stop()

    def _train(self) -> None:
        binding = Binding.from_manifest(json.loads(self._folder.binding.read_text()))
        plan = self._run.read_plan()
        if plan.digest != binding.plan_digest:
            what = f"is of plan {binding.plan_digest[:12]}, the run directory holds {plan.digest[:12]}"
            raise UserError(what=what, where=str(self._folder.binding), remedy="submit the job anew")
        self._steps = Growth(self._run.metrics)
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

    def _last_step_at(self) -> float | None:
        """See `AttemptReport`. Ranks leave a line for each step."""
        if self._steps is None or not self._steps.seen():
            return self._report.last_step_at
        return math.ceil(self._clock() / STEP_GRAIN_SECONDS) * STEP_GRAIN_SECONDS

    def _profile(self) -> Step:
        if not self._measuring or self._report.profile is Step.DONE:
            return self._report.profile
        step = self._attempt.profile()
        if step is Step.DONE:
            self._decider.keep_profile()
        return step

    def _tell(self, report: AttemptReport) -> None:
        """A full disk ends no attempt that goes on: it is told at a later turn then."""
        self._report = report
        if report == self._told and self._folder.report.exists():
            return
        try:
            write_json(self._folder.report, report.to_manifest())
        except OSError:
            if report.ended:
                raise
            return
        self._told = report


@contextlib.contextmanager
def shipping(root: Path, order: Order) -> Iterator[None]:
    """A process that ships the run's records during the block, and goes on after it until all are acknowledged."""
    if not order.address_file:
        yield
        return
    command = [sys.executable, "-m", "penstock.cli", "ship", str(root)]
    command += ["--address-file", order.address_file, "--token-file", order.token_file]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with process.stdin:  # it goes on until this end is closed, by this block or by the death of this process
        yield


def read_order(root: Path, attempt: int) -> Order:
    """What the service left for an attempt's supervisor in the run directory ``root``."""
    return Order.from_manifest(json.loads(AttemptFolder(root, attempt).order.read_text()))


def supervise(root: Path, order: Order, *, workers: Workers, decider: Callable[[PipelineJob, RunDir], Decider]) -> int:
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
            stack.enter_context(shipping(run.root, order))
            stack.enter_context(offspring_ended())  # but the shipper, which goes on
            supervisor = Supervisor(job, run, order, workers=workers, decider=decider(job, run), requests=requests)
            return 0 if supervisor.run().state is not AttemptState.FAILED else 1
    except Exception as error:
        report = AttemptReport(state=AttemptState.FAILED, message=str(error), refused=isinstance(error, UserError))
        with contextlib.suppress(OSError):
            write_json(folder.report, report.to_manifest())
        raise
