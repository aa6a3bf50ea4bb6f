"""Files that a job may name over REST, and their paths on this machine.

A job names data as ``data://ROOT/PATH`` and checkpoints as ``out://UID/ATTEMPT/STEP``. A path of the machine is
rejected, and so is one that leaves its root by dots or links: a token for jobs must not read the service's files. A
checkpoint that the submitter may not read is treated as missing. The files in a folder are checked by their reader.
Only listed schedules are accepted, because an entry point's code runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UserError
from penstock.core.job import STDLIB_CORPUS, JobSpec, PipelineJob
from penstock.core.manifest import nearest
from penstock.core.schedule import ScheduleSpec

DATA, OUT = "data://", "out://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Locations:
    """The roots of ``data://`` by name, the folder of runs by uid, and the allowed schedules.

    ``place`` describes the owner of these roots, and ``remedy`` how to add one.
    """

    data_roots: Mapping[str, Path]
    runs: Path
    schedules: frozenset[str] = frozenset()
    place: str = "this service"
    remedy: str = "an administrator adds roots: penstock serve --data NAME=FOLDER"

    def resolved(self, job: PipelineJob, readable: Callable[[str], bool]) -> PipelineJob:
        """The job with paths of this machine; it may begin from checkpoints of jobs whose uid is ``readable``.

        Raises:
            UserError: it names something that is not allowed or missing.
        """
        spec = job.spec
        self._check_schedule(spec)
        tokenizer = spec.data.tokenizer
        if tokenizer.file is not None:
            tokenizer = dataclasses.replace(tokenizer, file=self._data(tokenizer.file, "spec.data.tokenizer.file"))
        source = spec.data.source
        if source != STDLIB_CORPUS:
            source = self._data(source, "spec.data.source")
        begin = spec.checkpoint.resume_from
        if begin is not None:
            begin = self._checkpoint(begin, "spec.checkpoint.resumeFrom", readable)
        return job.with_spec(
            data=dataclasses.replace(spec.data, source=source, tokenizer=tokenizer),
            checkpoint=dataclasses.replace(spec.checkpoint, resume_from=begin),
        )

    def _check_schedule(self, spec: JobSpec) -> None:
        pinned = spec.parallelism.schedule
        name = pinned.generator if isinstance(pinned, ScheduleSpec) else pinned
        if name is not None and name not in self.schedules:
            allowed = sorted(self.schedules)
            remedy = nearest(name, tuple(allowed)) or f"write one of {', '.join(allowed)}"
            raise UserError(what=f"{name!r} is not allowed here", where="spec.parallelism.schedule", remedy=remedy)

    def _data(self, text: str, where: str) -> str:
        name, _, rest = text.removeprefix(DATA).partition("/")
        if not text.startswith(DATA) or name not in self.data_roots:
            known = ", ".join(f"{DATA}{root}/..." for root in sorted(self.data_roots))
            remedy = f"write {known or STDLIB_CORPUS}; {self.remedy}"
            raise UserError(what=f"{text!r} is not below a root of {self.place}", where=where, remedy=remedy)
        path = _below(self.data_roots[name], rest)
        if path is None:
            remedy = "name a file or folder below the root"
            raise UserError(what=f"{text} is not there", where=where, remedy=remedy)
        return str(path)

    def _checkpoint(self, text: str, where: str, readable: Callable[[str], bool]) -> str:
        """The checkpoint's folder. All unusable ones have the same error, which must not reveal others' checkpoints."""
        parts = text.removeprefix(OUT).strip("/").split("/")
        remedy = f"write {OUT}UID/ATTEMPT/STEP of a job of {self.place}; list them: GET /v1/history/UID/checkpoints"
        if not text.startswith(OUT) or len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise UserError(what=f"{text!r} names no checkpoint", where=where, remedy=remedy)
        uid, attempt, step = parts
        folder = _below(self.runs, f"{uid}/checkpoints/a{attempt}/step-{step}") if readable(uid) else None
        if folder is None or not (folder / "manifest.json").is_file():
            raise UserError(what=f"{text} is no complete checkpoint", where=where, remedy=remedy)
        return str(folder)


def _below(root: Path, rest: str) -> Path | None:
    """The path with links resolved; None if nothing is there, or if it is outside of the root."""
    try:
        path = (root / rest.lstrip("/")).resolve(strict=True)
        return path if path.is_relative_to(root.resolve(strict=True)) else None
    except (OSError, ValueError, RuntimeError):
        return None
