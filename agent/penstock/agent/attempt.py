"""One attempt of a job, for a supervisor or the local executor: its processes, their progress and their result."""

from __future__ import annotations

from typing import Protocol

from penstock.agent.launch import Failure, Outcome, Ranks
from penstock.agent.progress_files import newest_checkpoint_step, profile_progress
from penstock.agent.workers import Workers, end, refusal
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.run.folder import RunDir
from penstock.core.supervision import AttemptReport

MOST_LAST_LINES = 12
_ENDS = {"succeeded": AttemptState.SUCCEEDED, "stopped": AttemptState.STOPPED}


class ProfileDecider(Protocol):
    """The profile of an attempt, which `penstock.agent.plans` provides."""

    def find_profile(self) -> bool:
        """Whether there is a fresh profile, which is then in the run directory, or a plan, which needs no profile."""

    def keep_profile(self) -> None:
        """Store the new profile of the run directory for other runs."""


class Attempt:
    """Attempt ``number`` on the job's ranks: ready, perhaps measuring first, then training.

    ``profile`` is the state of measuring; a new profile goes to ``decider``. ``last_step`` is the last step that a
    caller observed. ``message`` is the cause of the failure, and ``last_words`` are the last lines of the rank at
    fault.
    """

    def __init__(
        self,
        job: PipelineJob,
        run: RunDir,
        number: int,
        workers: Workers,
        decider: ProfileDecider,
        profile: Step = Step.MISSING,
    ) -> None:
        self._job, self._run, self._workers, self._decider = job, run, workers, decider
        self.number, self.num_ranks = number, job.spec.resources.ranks
        self.profile = profile
        self._measuring: Ranks | None = None
        self._training: Ranks | None = None
        self.stop_requested = False
        self.last_step: int | None = None
        self.message = ""
        self.last_words: tuple[str, ...] = ()

    def measure(self) -> None:
        """Start measuring the machine."""
        self.profile = Step.WORKING
        self._measuring = self._workers.profile(self._job, self._run, self.number)

    def train(self, num_ranks: int, metrics_port: int | None) -> None:
        """Start training by the plan, which may use fewer ranks."""
        self.num_ranks = num_ranks
        self._run.result.unlink(missing_ok=True)
        self._training = self._workers.train(self._job, self._run, self.number, num_ranks, metrics_port)

    def report(self) -> AttemptReport:
        """Return the attempt's report; raises `UserError` if measuring or training failed by a mistake of the user."""
        self._follow_profile()
        state = self._state()
        done, total = profile_progress(self._run) if self._measuring else (0, 0)
        return AttemptReport(
            state=state,
            profile=self.profile,
            done=done,
            total=total,
            num_ranks=self.num_ranks,
            message=self.message,
            last_words=self.last_words,
            last_checkpoint=newest_checkpoint_step(self._run),
        )

    def _follow_profile(self) -> None:
        if self._measuring is None or self.profile is not Step.WORKING:
            return
        outcome = self._measuring.poll()
        if outcome is not None and outcome.failure is not None:
            self._note(self._measuring, outcome.failure)
            self.profile = Step.FAILED
        elif outcome is not None:
            self._decider.keep_profile()
            self.profile = Step.DONE

    def _state(self) -> AttemptState:
        if self._training is None:
            return AttemptState.FAILED if self.profile is Step.FAILED else AttemptState.READY
        outcome = self._training.poll()
        if outcome is None:
            started = self.last_step is not None or self._training.all_started()
            return AttemptState.RUNNING if started else AttemptState.STARTING
        state = None if outcome.failure else _ENDS.get(str(self._run.read_result().get("outcome")))
        if state is not None:
            return state
        self._note(self._training, outcome.failure or _no_result(outcome))
        return AttemptState.FAILED

    def _note(self, ranks: Ranks, failure: Failure) -> None:
        if failure.refused:
            raise refusal(failure)
        if self.message:
            return
        self.message = _named(failure)
        log = ranks.log_path(failure.rank or 0)
        if log is not None:
            self.last_words = tuple(log.read_text(errors="replace").rstrip().splitlines()[-MOST_LAST_LINES:])

    def stop(self) -> None:
        """Request a checkpoint and an end."""
        self.stop_requested = True
        if self._training is not None:
            self._training.stop()

    def kill(self) -> None:
        """Kill the remaining ranks, and wait for their end as `end` does."""
        for ranks in (self._measuring, self._training):
            if ranks is not None:
                end(ranks)


def _named(failure: Failure) -> str:
    """Message of a failure, with the rank, step and action that unexpected errors lack."""
    if failure.rank is None or failure.message.startswith(f"rank {failure.rank}"):
        return failure.message
    place = f" in step {failure.step} at {failure.action}" if failure.action else ""
    return f"rank {failure.rank} failed{place}: {failure.message}"


def _no_result(outcome: Outcome) -> Failure:
    message = f"the ranks ended with code {outcome.exit_code} without writing a result"
    return Failure(rank=None, step=-1, action="", message=message)
