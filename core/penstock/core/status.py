"""The ``status`` of a PipelineJob: everything that an operator remembers and people see.

It has two writers, each of its own part: the service of ``progress``, the operator of everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.instants import INSTANT
from penstock.core.lifecycle import Phase
from penstock.core.manifest import Manifest, mistyped, read_number
from penstock.core.pod import CheckpointName
from penstock.core.speed import Speed


class ConditionStatus(enum.StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(enum.StrEnum):
    """The conditions of a job."""

    ADMITTED = "Admitted"
    PROFILED = "Profiled"
    PLANNED = "Planned"
    BOUND = "Bound"
    STALLED = "Stalled"
    DRIFTED = "Drifted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition(Manifest):
    """One observation in Kubernetes' convention: ``reason`` is one word for programs, ``message`` a sentence."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: float | None = field(default=None, metadata=INSTANT)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStatus(Manifest):
    """The plan of the newest attempt, in short; it lies whole in the attempt's ConfigMap.

    Its steps are compared with the prediction since ``compared_since``. It is ``mispredicted`` if they took another
    time from then on, on hardware that had just been measured.
    """

    digest: str
    summary: str
    step_seconds: float | None = None
    speed: Speed | None = None
    peak_bytes: int | None = None
    compared_since: float | None = field(default=None, metadata=INSTANT)
    mispredicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus(Manifest):
    """Profile from which the newest plan was made: its ConfigMap, and the machines and model that it is valid for."""

    ref: str
    key: str = ""


def _read_loss(value: Any, path: str) -> float | None:
    """Read a number as text: a loss may not be finite, which JSON cannot represent."""
    if value is None or not isinstance(value, str):
        return None if value is None else read_number(value, path)
    try:
        return float(value)
    except ValueError:
        raise mistyped(value, "a number as text", path) from None


def _write_loss(value: float | None) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress(Manifest):
    """Progress of the newest attempt, as its ranks reported it to the service."""

    attempt: int
    epoch: int = 0
    step: int = 0
    loss: float | None = field(
        default=None, metadata={"read": _read_loss, "write": _write_loss, "schema": {"type": "string"}}
    )
    step_seconds: float | None = None
    speed: Speed | None = None
    last_checkpoint: int | None = None
    profile_ref: str = ""
    reported_at: float | None = field(default=None, metadata=INSTANT)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus(Manifest):
    """``launched`` is the newest attempt whose JobSet was created. It is written with the next change of the status;
    until then ``attempt`` is ahead of it.

    ``ranks`` are those of the newest attempt. ``failures`` counts attempts that ended without a request to stop, and
    ``replans`` those that ended because steps had drifted from the prediction. An elastic job that shrank has capacity
    for ``feasible_ranks``.
    """

    observed_generation: int = 0
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    attempt: int = 0
    launched: int = 0
    ranks: int = 0
    failures: int = 0
    replans: int = 0
    checkpoint: CheckpointName | None = None
    phase_entered_at: float | None = field(default=None, metadata=INSTANT)
    started_at: float | None = field(default=None, metadata=INSTANT)
    failed_at: float | None = field(default=None, metadata=INSTANT)
    finished_at: float | None = field(default=None, metadata=INSTANT)
    feasible_ranks: int | None = None
    profile: ProfileStatus | None = None
    measurements: tuple[ProfileStatus, ...] = ()
    plan: PlanStatus | None = None
    conditions: tuple[Condition, ...] = ()
    progress: JobProgress | None = None

    def condition(self, wanted: ConditionType) -> Condition | None:
        """The condition of that type, if it was ever observed."""
        return next((condition for condition in self.conditions if condition.type is wanted), None)


def operator_part(status: JobStatus) -> Mapping[str, Any]:
    """The part that the operator applies: the status without the service's part."""
    return {name: value for name, value in status.to_manifest().items() if name != "progress"}
