"""Workers without processes: each attempt follows a script, a step at every poll, and leaves what real ranks leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.agent.launch import Failure, Outcome, Ranks
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.preparing import Reporter
from penstock.core.records import StepMetrics
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.run.rank_status import State, StatusFile, read_status, status_path
from penstock.core.serialization.files import write_json
from tests.support.sample_run import sample_profile

FINE = Outcome(exit_code=0, failure=None)


def killed(rank: int = 1, step: int = 5) -> Outcome:
    """The end of an attempt whose rank vanished."""
    message = f"rank {rank} (process 4711) was killed in step {step} at 1F0.0"
    return Outcome(exit_code=1, failure=Failure(rank=rank, step=step, action="1F0.0", message=message))


def refused(what: str, remedy: str) -> Outcome:
    """The end of an attempt that found a mistake of the user's."""
    message = str(UserError(what=what, remedy=remedy))
    return Outcome(exit_code=2, failure=Failure(rank=0, step=-1, action="", message=message, refused=True))


@dataclass(frozen=True, kw_only=True)
class Script:
    """What an attempt does: steps up to ``until`` (none: to the job's last), then ``end``; none stays silent.

    ``deaf`` ranks do not stop when asked; ``before`` runs when the attempt starts.
    """

    until: int | None = None
    end: Outcome | None = FINE
    outcome: str = "succeeded"
    deaf: bool = False
    before: Callable[[], None] = lambda: None


class FakeRanks(Ranks):
    """Follows a script; never two processes, so that every test sees the same."""

    def __init__(
        self,
        script: Script,
        step: Callable[[], bool],
        finish: Callable[[str], None],
        started: Callable[[], bool] = lambda: True,
    ) -> None:
        self._script, self._step, self._finish, self._started = script, step, finish, started
        self._ended: Outcome | None = None
        self.stop_requested = False
        self.killed = False

    def poll(self) -> Outcome | None:
        if self._ended is None and self.stop_requested and not self._script.deaf:
            self._end(FINE, "stopped")
        elif self._ended is None and not self._step() and self._script.end is not None:
            self._end(self._script.end, self._script.outcome)
        return self._ended

    def _end(self, outcome: Outcome, result: str) -> None:
        self._ended = outcome
        if outcome.failure is None:
            self._finish(result)

    def wait(self, timeout_seconds: float | None = None) -> Outcome | None:
        return self.poll()

    def stop(self) -> None:
        self.stop_requested = True

    def kill(self) -> None:
        self.killed = True
        self._ended = self._ended or killed()

    def all_started(self) -> bool:
        return self._started()

    def log_path(self, rank: int, stream: str = "stderr") -> Path | None:
        return None


@dataclass
class FakeWorkers:
    """The seam's other side. Training attempts follow ``scripts`` in turn, the last one again and again."""

    scripts: list[Script] = field(default_factory=lambda: [Script()])
    profile_ends: list[Outcome] = field(default_factory=lambda: [FINE])
    prepare_with: Callable[[], None] = lambda: None
    started: list[str] = field(default_factory=list)
    ranks: list[FakeRanks] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether anything that was started has not ended."""
        return any(ranks._ended is None for ranks in self.ranks)

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        self.started.append("prepare")
        self.prepare_with()

    def profile(self, job: PipelineJob, run: RunDir, attempt: int) -> Ranks:
        self.started.append(f"profile {attempt}")
        end = self.profile_ends.pop(0) if len(self.profile_ends) > 1 else self.profile_ends[0]
        return self._add(
            Script(end=end), lambda: False, lambda _: write_json(run.profile, sample_profile().to_manifest())
        )

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        self.started.append(f"train {attempt} on {num_ranks}")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        script.before()
        return self._add(script, *_training(script, job, run, attempt, num_ranks), lambda: _all_started(run, num_ranks))

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        self.started.append("rehearse")
        return self._add(Script(), lambda: False, lambda _: None)

    def _add(
        self,
        script: Script,
        step: Callable[[], bool],
        finish: Callable[[str], None],
        started: Callable[[], bool] = lambda: True,
    ) -> FakeRanks:
        self.ranks.append(FakeRanks(script, step, finish, started))
        return self.ranks[-1]


def _all_started(run: RunDir, num_ranks: int) -> bool:
    found = (read_status(status_path(run.status, rank)) for rank in range(num_ranks))
    return all(status is not None and status.state is not State.STARTING for status in found)


def _training(
    script: Script, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int
) -> tuple[Callable[[], bool], Callable[[str], None]]:
    """A step at a time from the newest checkpoint; the losses depend on the step alone."""
    spec = job.spec
    statuses = [StatusFile(status_path(run.status, rank), 1) for rank in range(num_ranks)]
    for status in statuses:
        status.start(["0F0.0"])
    folders = [int(path.parent.name.removeprefix("step-")) for path in run.checkpoints.glob("a*/step-*/manifest.json")]
    done = max(folders, default=0)

    def step() -> bool:
        nonlocal done
        if done >= (spec.training.steps if script.until is None else script.until):
            return False
        with run.metrics.open("a") as file:
            file.write(metrics_line(fake_metrics(done, attempt)))
        for status in statuses:
            status.cursor[0] = done
        done += 1
        if done % spec.checkpoint.every_steps == 0:
            save()
        return True

    def save() -> None:
        folder = run.checkpoints / f"a{attempt}" / f"step-{done}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")

    def finish(outcome: str) -> None:
        save()
        run.result.write_text(json.dumps({"outcome": outcome, "step": done}))

    return step, finish


def fake_metrics(step: int, attempt: int = 1) -> StepMetrics:
    """The metrics of a step; only the attempt differs from one attempt to the next."""
    return StepMetrics(
        step=step,
        loss=5.0 / (1 + step),
        step_seconds=0.25,
        tokens_per_second=4096 / 0.25,
        learning_rate=1e-3,
        gradient_norm=1.0,
        peak_bytes=2**28,
        attempt=attempt,
    )
