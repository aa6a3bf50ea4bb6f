"""What a run tells the world: metrics.jsonl, timelines, records in the outbox, Prometheus. The first rank speaks."""

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


class Teller:
    """Hears what an attempt began from, and of every step and checkpoint. This one does nothing with it."""

    def began(self, restored: Restored) -> None:
        """The attempt begins from there."""

    def stepped(self, metrics: StepMetrics, timeline: Timeline | None) -> None:
        """A step was taken; sampled ones come with their timeline."""

    def saving(self) -> None:
        """A checkpoint is about to be written."""

    def saved(self, step: int) -> None:
        """A checkpoint was written."""


class Silent(Teller):
    """The other ranks, which report nothing."""


class Announcer(Teller):
    """The first rank; a context, since it holds files open."""

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
        """Into the rank's log, from where a shipper takes it, and to whoever watches the run directory."""
        print(f"WARNING: {text}", flush=True)  # noqa: T201
        with append_lines(self._run.warnings) as file:
            file.write(f"{text}\n")

    def stepped(self, metrics: StepMetrics, timeline: Timeline | None) -> None:
        # The record comes first: a rank that is killed in between leaves no step in metrics.jsonl that no service has.
        self._outbox.put(RecordKind.METRICS, metrics=metrics)
        self._metrics.write(metrics_line(metrics))
        self._metrics.flush()
        self._exporter.update(metrics, self._plan.speed(metrics.step_seconds))
        if timeline is not None:
            for path in (self._run.timelines / f"step-{metrics.step}.json", self._run.timeline):
                write_json(path, timeline.to_manifest())
            self._outbox.put(RecordKind.TIMELINE, timeline=timeline)

    def saving(self) -> None:
        """Sync the steps reported so far, so that after a power cut no checkpoint is there without the steps before it.
        The next attempt takes the steps after it again, and reports them again.
        """
        sync_file(self._metrics)
        self._outbox.sync()

    def saved(self, step: int) -> None:
        progress = Progress(step=step, num_steps=self._num_steps, phase="Running", last_checkpoint=step)
        self._outbox.put(RecordKind.PROGRESS, progress=progress)
        print(f"step {step} of {self._num_steps}: checkpoint written")  # noqa: T201, a rank's log is a file
