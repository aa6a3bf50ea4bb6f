"""Writes the reports of a run, on its first rank: metrics.jsonl, timelines, outbox records and Prometheus metrics."""

from __future__ import annotations

import contextlib
import time
from typing import Self

from penstock.core.host.ports import LOOPBACK
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.records import Progress, RecordKind, StepMetrics
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.run.outbox import Outbox
from penstock.core.serialization.files import append_lines, sync_file, sync_folder, write_json
from penstock.core.timeline import Timeline
from penstock.trainer.exporter import Exporter
from penstock.trainer.resume import Restored


class TrainingListener:
    """Callbacks of the training loop, which do nothing by default: only the first rank reports."""

    def began(self, restored: Restored) -> None:
        """Called when the attempt starts from ``restored``."""

    def stepped(self, metrics: StepMetrics, timeline: Timeline | None) -> None:
        """Called after every step. Sampled steps have a timeline."""

    def changed_plan(self, plan: Plan, problem: str) -> None:
        """Called between two steps after a change of plan was requested. ``plan`` is that of the following steps; with
        a ``problem`` it is still the old one.
        """

    def saving(self) -> None:
        """Called before a checkpoint is written."""

    def saved(self, step: int) -> None:
        """Called after a checkpoint was written."""


class MetricsWriter(TrainingListener):
    """Writes the reports of the first rank. A context manager, since it keeps files open."""

    def __init__(self, run: RunDir, job: PipelineJob, plan: Plan, attempt: int, metrics_port: int | None) -> None:
        self._run, self._plan, self._num_steps = run, plan, job.spec.training.steps
        self._exporter = Exporter(job.metadata.name)
        if plan.prediction is not None:
            self._exporter.predict(plan.prediction.step_seconds)
        if metrics_port is not None:
            self._exporter.serve(LOOPBACK, metrics_port)
        self._metrics = append_lines(run.metrics)
        sync_folder(run.root)
        uid = job.metadata.uid or job.metadata.name
        self._outbox = Outbox(run.outbox, uid=uid, attempt=attempt, source="rank-0", clock=time.time)
        if plan.profile_digest:
            self._outbox.put(RecordKind.PROFILE, profile_digest=plan.profile_digest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.closing(self._outbox), self._metrics:
            sync_file(self._metrics)

    def began(self, restored: Restored) -> None:
        for description in restored.corrupt:
            self._warn(f"checkpoint {description}; it was set aside, and the run goes on from step {restored.step}")

    def _warn(self, text: str) -> None:
        """Write a warning to the rank's log, which is uploaded, and to the run directory's file of warnings."""
        print(f"WARNING: {text}", flush=True)  # noqa: T201
        with append_lines(self._run.warnings) as file:
            file.write(f"{text}\n")

    def stepped(self, metrics: StepMetrics, timeline: Timeline | None) -> None:
        # The record comes first: if the rank is killed in between, metrics.jsonl has no step that the service lacks.
        self._outbox.put(RecordKind.METRICS, metrics=metrics)
        self._metrics.write(metrics_line(metrics))
        self._metrics.flush()
        self._exporter.update(metrics, self._plan.speed(metrics.step_seconds))
        if timeline is not None:
            for path in (self._run.timelines / f"step-{metrics.step}.json", self._run.timeline):
                write_json(path, timeline.to_manifest())
            self._outbox.put(RecordKind.TIMELINE, timeline=timeline)

    def changed_plan(self, plan: Plan, problem: str) -> None:
        """Write plan.json, with which a later attempt resumes, and report its prediction from now on."""
        if problem:
            self._warn(f"the run keeps its plan; the new one was refused: {problem}")
            self._run.next_plan.unlink(missing_ok=True)
            return
        write_json(self._run.plan, plan.to_manifest())
        self._run.next_plan.unlink(missing_ok=True)  # last, since its absence says that plan.json is up to date
        self._plan = plan
        if plan.prediction is not None:
            self._exporter.predict(plan.prediction.step_seconds)
        if plan.profile_digest:
            self._outbox.put(RecordKind.PROFILE, profile_digest=plan.profile_digest)
        print(f"the run continues with plan {plan.digest[:12]}", flush=True)  # noqa: T201, a rank's log is a file

    def saving(self) -> None:
        """Sync the steps reported so far, so that after a power cut every checkpoint has the steps before it.

        The next attempt repeats the steps after the checkpoint and reports them again.
        """
        sync_file(self._metrics)
        self._outbox.sync()

    def saved(self, step: int) -> None:
        progress = Progress(step=step, num_steps=self._num_steps, phase="Running", last_checkpoint=step)
        self._outbox.put(RecordKind.PROGRESS, progress=progress)
        print(f"step {step} of {self._num_steps}: checkpoint written")  # noqa: T201, a rank's log is a file
