"""Answers of a service about a job's records and files, as frozen types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.client.types import KnownFields
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(KnownFields):
    """A line that a rank printed; ``rank`` -1 is the supervisor."""

    rank: int
    number: int
    attempt: int
    at: str
    level: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePage(KnownFields):
    """Some lines, by rank and number. ``next`` is the cursor for the following lines, including future ones.
    ``complete``: no more lines will come, because the job has ended or is suspended.
    """

    items: tuple[Line, ...]
    next: str
    complete: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(KnownFields):
    """Export of a checkpoint for other programs; ``state`` is ``queued``, ``running``, ``done`` or ``failed``."""

    state: str
    message: str = ""
    folder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(KnownFields):
    """Checkpoint after ``step`` steps; ``uri`` is a value for `resumeFrom`."""

    step: int
    attempt: int
    complete: bool
    bytes: int
    created_at: str
    uri: str
    export: Export | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact(KnownFields):
    """A file of a job."""

    name: str
    bytes: int
    modified_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction(KnownFields):
    """Inputs that repeat a run: the job's manifest with the pinned plan, versions, and shell commands."""

    manifest: dict[str, Any]
    versions: dict[str, str]
    commands: tuple[str, ...]
    plan_digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(KnownFields):
    """Values of one or more steps, from ``step`` on."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValue(KnownFields):
    """The value at a step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Series(KnownFields):
    """One number over the steps, of one rank or, without ``rank``, of all together.

    ``first``, ``last``, ``min`` and ``max`` are exact, however few the points; older services leave them out.
    """

    name: str
    points: tuple[Point, ...]
    rank: int | None = None
    count: int = 0
    first: StepValue | None = None
    last: StepValue | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep(KnownFields):
    """The timeline of one measured step, with the numbers of all measured steps and of the typical one."""

    attempt: int
    step: int
    timeline: Timeline
    sampled_steps: tuple[int, ...] = ()
    typical_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan(KnownFields):
    """A plan that a job used, from an attempt on."""

    revision: int
    attempt: int
    created_at: str
    digest: str
    plan: Plan
