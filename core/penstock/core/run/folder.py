"""Where everything of a run lies: one folder, the same names for people, ranks and tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.manifest import limits_lifted
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.records import StepMetrics
from penstock.core.serialization.files import complete_lines, make_folder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run. Where several hosts share ``root``, what this host alone writes lies in ``host``, and what
    ranks map into memory in ``local``, on a disk of its own.
    """

    root: Path
    host: Path | None = None
    local: Path | None = None

    @property
    def job(self) -> Path:
        """The manifest as it was given."""
        return self.root / "job.yaml"

    @property
    def prompt(self) -> Path:
        """What the sample at the end begins with; a run without it takes text that was held out."""
        return self.root / "prompt.txt"

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
    def warnings(self) -> Path:
        """What people should know of a run that goes on, a line each."""
        return self.root / "warnings.log"

    @property
    def timeline(self) -> Path:
        """The newest sampled step."""
        return self.root / "timeline.json"

    @property
    def timelines(self) -> Path:
        """Every sampled step, as ``step-STEP.json``; of two attempts' the later one's."""
        return self.root / "timelines"

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
        return (self.host or self.root) / "logs"

    @property
    def outbox(self) -> Path:
        """Records that wait to be shipped."""
        return (self.host or self.root) / "outbox"

    @property
    def status(self) -> Path:
        """One small file per rank: the step and action it is at."""
        return (self.local or self.root) / "status"

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
            for folder in (self.root, self.checkpoints, self.timelines, self.logs, self.outbox, self.status):
                make_folder(folder)
            probe = self.root / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)  # another host may have been here
        except OSError as error:
            raise UserError(
                what=f"cannot be written: {error.strerror}",
                where=f"run directory {self.root}",
                remedy="choose another with --run-dir, or mend its permissions",
            ) from None

    @property
    def profile_progress(self) -> Path:
        """How far the measurements are: ``{"done": points, "total": points}``."""
        return self.root / "profile-progress.json"

    def read_job(self) -> PipelineJob:
        """The job, to run it; raises `UserError` if there is none, or none that this version takes."""
        from penstock.core.serialization import yamltext  # most of those who name files of a run read no YAML

        return PipelineJob.from_manifest(yamltext.load(_read(self.job), str(self.job)))

    def read_recorded_job(self) -> PipelineJob:
        """The job, to show what came of it: held to no limits, as an older version may have had none."""
        with limits_lifted():
            return self.read_job()

    def read_plan(self) -> Plan:
        """The plan; raises `UserError` if it is missing or broken."""
        return _read_manifest(self.plan, Plan.from_manifest)

    def read_profile(self) -> Profile:
        """The profile; raises `UserError` if it is missing or broken."""
        return _read_manifest(self.profile, Profile.from_manifest)

    def read_metrics(self) -> list[StepMetrics]:
        """The newest entry of every step, in order; `damaged_metrics` names the lines that are left out."""
        entries = (metrics_entry(line) for line in complete_lines(self.metrics))
        newest = {entry.step: entry for entry in entries if entry is not None}
        return [newest[step] for step in sorted(newest)]

    def damaged_metrics(self) -> list[str]:
        """A sentence for each whole line that is no entry, as a fault of the disk leaves it."""
        lines = enumerate(complete_lines(self.metrics), start=1)
        return [f"{self.metrics}:{n} is no entry, and is left out" for n, line in lines if metrics_entry(line) is None]


def metrics_entry(line: str) -> StepMetrics | None:
    """The entry that a line of metrics.jsonl holds; none if it is damaged."""
    try:
        content = jsontext.load(line)
        return StepMetrics(**content) if isinstance(content["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def metrics_line(metrics: StepMetrics) -> str:
    """One line of metrics.jsonl, named as in Python; ``validation_loss`` is there where it was taken."""
    entry = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
    return json.dumps(entry) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            what=f"cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="name the directory of a run, or run the job first",
        ) from None


def _read_manifest(path: Path, read: Callable[[Any], T]) -> T:
    """Errors name the file before the field."""
    text = _read(path)
    try:
        return read(jsontext.load(text))
    except ValueError as error:
        what, place = f"is corrupt: {error}", str(path)
    except UserError as error:
        what, place = error.what, f"{path}: {error.where}"
    raise UserError(what=what, where=place, remedy="delete it to have it made again")
