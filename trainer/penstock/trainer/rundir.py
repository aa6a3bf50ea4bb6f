"""Where everything of a run lies: one folder, the same names for people, ranks and tools."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.records import StepMetrics
from penstock.planner import yamltext


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run."""

    root: Path

    @property
    def job(self) -> Path:
        """The manifest as it was given."""
        return self.root / "job.yaml"

    @property
    def profile(self) -> Path:
        """What was measured."""
        return self.root / "profile.json"

    @property
    def plan(self) -> Path:
        """What was decided."""
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        """One line per step and attempt; of two lines for a step the later one counts."""
        return self.root / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """The newest sampled step."""
        return self.root / "timeline.json"

    @property
    def checkpoints(self) -> Path:
        """See `penstock.trainer.checkpoint`."""
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        """Where the prepared data lies."""
        return self.root / "data.json"

    @property
    def logs(self) -> Path:
        """What every rank of every attempt printed."""
        return self.root / "logs"

    @property
    def outbox(self) -> Path:
        """Records that wait to be shipped."""
        return self.root / "outbox"

    @property
    def status(self) -> Path:
        """One small file per rank: the step and action it is at."""
        return self.root / "status"

    @property
    def result(self) -> Path:
        """How the newest attempt ended, as rank 0 saw it."""
        return self.root / "result.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.root / "report.html"

    def create(self) -> None:
        """Make the folders; raises `UserError` where that is not allowed."""
        try:
            for folder in (self.root, self.checkpoints, self.logs, self.outbox, self.status):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                what=f"cannot be written: {error.strerror}",
                where=f"run directory {self.root}",
                remedy="choose another with --run-dir, or mend its permissions",
            ) from None

    def read_job(self) -> PipelineJob:
        """The job; raises `UserError` if this is no run directory."""
        return PipelineJob.from_manifest(yamltext.load(_read(self.job), str(self.job)))

    def read_plan(self) -> Plan:
        """The plan; raises `UserError` if it is missing or broken."""
        return Plan.from_manifest(_read_json(self.plan))

    def read_profile(self) -> Profile:
        """The profile; raises `UserError` if it is missing or broken."""
        return Profile.from_manifest(_read_json(self.profile))

    def read_metrics(self) -> list[StepMetrics]:
        """The newest entry of every step, in order; a last line that was cut short is passed over."""
        newest: dict[int, StepMetrics] = {}
        for line in self.metrics.read_text().splitlines() if self.metrics.exists() else ():
            try:
                entry = StepMetrics(**json.loads(line))
            except (ValueError, TypeError):
                continue
            newest[entry.step] = entry
        return [newest[step] for step in sorted(newest)]


def metrics_line(metrics: StepMetrics) -> str:
    """One line of metrics.jsonl, named as in Python."""
    entry = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
    return json.dumps(entry) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees all of it or the old one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, manifest: Any) -> None:
    """Plain data as JSON, atomically."""
    write_atomically(path, json.dumps(manifest, indent=1) + "\n")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(
            what=f"cannot be read: {error.strerror}",
            where=str(path),
            remedy="name the directory of a run, or run the job first",
        ) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise UserError(
            what=f"is corrupt: {error}", where=str(path), remedy="delete it to have it made again"
        ) from None
