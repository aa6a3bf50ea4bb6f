"""The training loop of one rank: steps, validation, checkpoints, and timelines of sampled steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from penstock.core.records import StepMetrics
from penstock.core.replanning import WINDOW, is_drifted, is_sampled
from penstock.core.timeline import Source, Timeline
from penstock.trainer.interpreter import SILENT
from penstock.trainer.metrics_writer import TrainingListener
from penstock.trainer.optimizer import learning_rate
from penstock.trainer.optimizer_step import Notice, Totals, loss_of
from penstock.trainer.recorder import gather_marks, gather_times, make_recorder, merge
from penstock.trainer.session import Session

TIMELINES = 8
"""Largest number of steps with a timeline, spread over the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of an attempt: the number of steps, whether it was stopped on request, and if not, the held-out loss."""

    step: int
    stopped: bool
    validation_loss: float | None


def train(session: Session, attempt: int, listener: TrainingListener) -> Outcome:
    """Train from the newest complete checkpoint to the last step, or until any rank is asked to stop. Ends with a
    checkpoint.

    Steps count from 0; a checkpoint of step s holds the model after s steps.
    """
    training, checkpoint_every = session.job.spec.training, session.job.spec.checkpoint.every_steps
    stopwatch = Stopwatch(session)
    restored = session.restore()
    session.warm_up()
    listener.began(restored)
    step, validation, stopped = restored.step, None, False
    while step < training.steps and not stopped:
        totals, seconds, timeline = stopwatch.step(step)
        step += 1
        stopped = totals.stop and step < training.steps
        validation = _validation(session, step) if not stopped else None
        listener.stepped(_metrics(session, step - 1, totals, seconds, validation, attempt), timeline)
        if stopped or step == training.steps or step % checkpoint_every == 0:
            listener.saving()
            listener.saved(session.save(step, attempt).step)
        if Notice.NEW_PLAN in totals.notice and not stopped and step < training.steps:
            problem = session.change_plan()
            listener.changed_plan(session.plan, problem)
            stopwatch = Stopwatch(session)
    if validation is None and not stopped:
        validation = session.validation_loss(step)  # an earlier attempt ended before it
    return Outcome(step=step, stopped=stopped, validation_loss=validation)


def _validation(session: Session, step: int) -> float | None:
    training = session.job.spec.training
    is_due = training.validate_every and step % training.validate_every == 0
    return session.validation_loss(step) if is_due or step == training.steps else None


def sampled_steps(num_steps: int) -> frozenset[int]:
    """The steps with a timeline: spread evenly, including the last one."""
    return frozenset(max(num_steps * (i + 1) // TIMELINES - 1, 0) for i in range(TIMELINES))


class DriftSampling:
    """Requests timelines of steps that have drifted from the prediction (`penstock.core.replanning`)."""

    def __init__(self, predicted_seconds: float) -> None:
        self._predicted_seconds = predicted_seconds
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._num_drifted = 0

    def wants_timeline(self, step_seconds: float) -> bool:
        """Take a step. Returns whether one of the following steps is to be recorded."""
        self._recent.append(step_seconds)
        was_drifted = self._num_drifted > 0
        if is_drifted(list(self._recent), self._predicted_seconds, was_drifted=was_drifted):
            self._num_drifted += 1
        else:
            self._num_drifted = 0
        return is_sampled(self._num_drifted)


def _drift_sampling(session: Session) -> DriftSampling | None:
    """On the first rank of a job that may be planned again; None on the others."""
    prediction, policy = session.plan.prediction, session.job.spec.run_policy
    if session.worker.rank != 0 or prediction is None or not policy.replan_on_drift:
        return None
    return DriftSampling(prediction.step_seconds)


class Stopwatch:
    """Runs steps by the session's present plan and measures their time; for sampled steps also a timeline of all ranks,
    on one clock. The first rank also requests samples of steps that have drifted.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._drift, self._is_requested = _drift_sampling(session), False
        self._sampled = sampled_steps(session.job.spec.training.steps)
        own_program = session.program.ranks[session.mesh.pipeline_rank(session.worker.rank)]
        self._recorder = make_recorder(len(own_program.instructions), session.runtime.waits)

    def step(self, step: int) -> tuple[Totals, float, Timeline | None]:
        """Run one step. Returns its totals, its seconds on this rank, and a timeline if the step is sampled."""
        session, is_sampled = self._session, self._is_requested or step in self._sampled
        begin = time.perf_counter()  # the device is idle at the beginning and at the end of a step
        totals = session.runtime.train_step(
            step, session.batch(step), self._recorder if is_sampled else SILENT, partial(session.read_ahead, step + 1)
        )
        seconds = time.perf_counter() - begin
        self._is_requested = Notice.SAMPLE in totals.notice
        if self._drift is not None and self._drift.wants_timeline(seconds):
            session.notice |= Notice.SAMPLE
        return totals, seconds, self._timeline(step, totals) if is_sampled else None

    def _timeline(self, step: int, totals: Totals) -> Timeline:
        program, mesh = self._session.program, self._session.mesh
        everyone, recorder = self._session.everyone, self._recorder
        times = gather_times(recorder.times_ns(), program, mesh, everyone)
        waits = gather_marks(recorder.waits_ns(), program, mesh, everyone) if mesh.tp > 1 else ()
        peak_bytes = totals.peak_bytes
        return merge(program, mesh, times, source=Source.MEASURED, step=step, peak_bytes=peak_bytes, waits_ns=waits)


def _metrics(
    session: Session, step: int, totals: Totals, seconds: float, validation: float | None, attempt: int
) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss_of(totals, session.num_tokens),
        step_seconds=seconds,
        tokens_per_second=session.num_tokens / seconds,
        learning_rate=learning_rate(session.job.spec.training, step),
        gradient_norm=totals.gradient_norm,
        peak_bytes=max(totals.peak_bytes),
        validation_loss=validation,
        attempt=attempt,
    )
