"""The folder of a run, with the same names for people, ranks and tools."""

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
from penstock.core.run.former_plan import FormerPlan
from penstock.core.serialization.files import complete_lines, make_folder, write_atomically

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run. If several hosts share ``root``, files that only this host writes are in ``host``, and
    files that ranks map into memory in ``local``, on a local disk.
    """

    root: Path
    host: Path | None = None
    local: Path | None = None

    @property
    def job(self) -> Path:
        """The manifest as submitted."""
        return self.root / "job.yaml"

    @property
    def prompt(self) -> Path:
        """The beginning of the sample at the end; a run without it uses held-out text."""
        return self.root / "prompt.txt"

    @property
    def profile(self) -> Path:
        """The measurements."""
        return self.root / "profile.json"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.root / "plan.json"

    @property
    def next_plan(self) -> Path:
        """Plan that the running ranks are to continue with; the first rank removes it once they have, or refuse it."""
        return self.root / "next-plan.json"

    @property
    def former_plan(self) -> Path:
        """The replaced plan, until ranks have made some steps by the one that replaced it."""
        return self.root / "former-plan.json"

    @property
    def metrics(self) -> Path:
        """One line per step and attempt; of two lines for a step the later one counts."""
        return self.root / "metrics.jsonl"

    @property
    def warnings(self) -> Path:
        """Warnings of a run that continues, one per line."""
        return self.root / "warnings.log"

    @property
    def timeline(self) -> Path:
        """The newest sampled step."""
        return self.root / "timeline.json"

    @property
    def timelines(self) -> Path:
        """Every sampled step, as ``step-STEP.json``; of two attempts the later one's."""
        return self.root / "timelines"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, in the layout of `penstock.trainer.checkpoint`."""
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        """The location of the prepared data."""
        return self.root / "data.json"

    @property
    def logs(self) -> Path:
        """Output of every rank of every attempt."""
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
        """The outcome of the newest attempt, from rank 0."""
        return self.root / "result.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.root / "report.html"

    def create(self) -> None:
        """Make the folders; raises `UserError` if that is not permitted."""
        try:
            for folder in (self.root, self.checkpoints, self.timelines, self.logs, self.outbox, self.status):
                make_folder(folder)
            probe = self.root / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)  # another host may have removed it
        except OSError as error:
            raise UserError(
                what=f"cannot be written: {error.strerror}",
                where=f"run directory {self.root}",
                remedy="choose another with --run-dir, or fix its permissions",
            ) from None

    @property
    def profile_progress(self) -> Path:
        """Progress of the measurements: ``{"done": points, "total": points}``."""
        return self.root / "profile-progress.json"

    def write_job(self, job: PipelineJob) -> None:
        """Write the manifest of the job."""
        from penstock.core.serialization import yamltext

        write_atomically(self.job, yamltext.dump(job.to_manifest()))

    def read_job(self) -> PipelineJob:
        """The job, to run it; raises `UserError` if it is missing, or invalid for this version."""
        from penstock.core.serialization import yamltext  # most programs that use these paths read no YAML

        return PipelineJob.from_manifest(yamltext.load(_read(self.job), str(self.job)))

    def read_recorded_job(self) -> PipelineJob:
        """The job, to show its results: without limits, since an older version may have had none."""
        with limits_lifted():
            return self.read_job()

    def read_plan(self) -> Plan:
        """The plan; raises `UserError` if it is missing or corrupt."""
        return _read_manifest(self.plan, Plan.from_manifest)

    def read_next_plan(self) -> Plan:
        """The plan to continue with; raises `UserError` if it is missing or corrupt."""
        return _read_manifest(self.next_plan, Plan.from_manifest)

    def read_former_plan(self) -> FormerPlan:
        """The replaced plan; raises `UserError` if it is missing or corrupt."""
        return _read_manifest(self.former_plan, FormerPlan.from_manifest)

    def read_profile(self) -> Profile:
        """The profile; raises `UserError` if it is missing or corrupt."""
        return _read_manifest(self.profile, Profile.from_manifest)

    def read_result(self) -> dict[str, Any]:
        """The result that the newest attempt wrote; empty if it wrote none."""
        try:
            result = jsontext.load(self.result.read_text())
        except (OSError, ValueError):
            return {}
        return result if isinstance(result, dict) else {}

    def read_metrics(self) -> list[StepMetrics]:
        """The newest entry of every step, in order; `damaged_metrics` names the lines that are left out."""
        entries = (metrics_entry(line) for line in complete_lines(self.metrics))
        newest = {entry.step: entry for entry in entries if entry is not None}
        return [newest[step] for step in sorted(newest)]

    def damaged_metrics(self) -> list[str]:
        """A sentence for each complete line that is not an entry, as after a fault of the disk."""
        lines = enumerate(complete_lines(self.metrics), start=1)
        return [f"{self.metrics}:{n} is no entry, and is left out" for n, line in lines if metrics_entry(line) is None]


def metrics_entry(line: str) -> StepMetrics | None:
    """The entry in a line of metrics.jsonl; None if it is damaged."""
    try:
        content = jsontext.load(line)
        return StepMetrics(**content) if isinstance(content["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def metrics_line(metrics: StepMetrics) -> str:
    """One line of metrics.jsonl, with Python's names; ``validation_loss`` only if it was measured."""
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
    """Read a manifest; errors name the file before the field."""
    text = _read(path)
    try:
        return read(jsontext.load(text))
    except ValueError as error:
        what, place = f"is corrupt: {error}", str(path)
    except UserError as error:
        what, place = error.what, f"{path}: {error.where}"
    raise UserError(what=what, where=place, remedy="delete it to have it made again")
