"""The ``status`` of a PipelineJob: everything that an operator remembers and people see.

It has two writers, each of its own part: the service of ``progress``, the operator of everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

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

    type: Annotated[ConditionType, "the observed property"]
    status: Annotated[ConditionStatus, "whether it holds"]
    reason: Annotated[str, "reason in one word"]
    message: Annotated[str, "reason in a sentence"] = ""
    observed_generation: Annotated[int, "the generation of the observed spec"] = 0
    last_transition_time: Annotated[
        float | None,
        "when the status last changed",
    ] = field(default=None, metadata=INSTANT)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStatus(Manifest):
    """The plan of the newest attempt, in short; the attempt's ConfigMap has the whole plan.

    Its steps are compared with the prediction since ``compared_since``. It is ``mispredicted`` if they took another
    time from then on, on hardware that had just been measured.
    """

    digest: Annotated[str, "of the plan"]
    summary: Annotated[str, "the plan in a few words"]
    step_seconds: Annotated[float | None, "predicted length of a step"] = None
    speed: Annotated[Speed | None, "of a step that takes as long"] = None
    peak_bytes: Annotated[int | None, "predicted memory of the fullest rank"] = None
    compared_since: Annotated[
        float | None,
        "time of the first comparison of its steps with the prediction",
    ] = field(default=None, metadata=INSTANT)
    mispredicted: Annotated[bool, "its steps were off from the first, on hardware that had just been measured"] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus(Manifest):
    """Profile from which the newest plan was made: its ConfigMap, and the machines and model that it is valid for."""

    ref: Annotated[str, "the ConfigMap that holds it"]
    key: Annotated[str, "digest of the hosts, image and work for which it is valid"] = ""


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

    attempt: Annotated[int, "the attempt that reported"]
    epoch: Annotated[int, "0 while it measures, 1 while it trains"] = 0
    step: Annotated[int, "steps done"] = 0
    loss: Annotated[float | None, "of that step, as a string: it may be no finite number"] = field(
        default=None, metadata={"read": _read_loss, "write": _write_loss, "schema": {"type": "string"}}
    )
    step_seconds: Annotated[float | None, "median length of the steps last reported"] = None
    speed: Annotated[Speed | None, "of a step that takes as long"] = None
    last_checkpoint: Annotated[int | None, "step of the newest complete checkpoint"] = None
    profile_ref: Annotated[str, "the ConfigMap that holds the measurement"] = ""
    reported_at: Annotated[float | None, "when this was reported"] = field(default=None, metadata=INSTANT)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus(Manifest):
    """``launched`` is the newest attempt whose JobSet was created. It is written with the next change of the status;
    until then ``attempt`` is ahead of it.

    ``ranks`` are those of the newest attempt. ``failures`` counts attempts that failed, without those that were
    preempted, evicted or stopped, or that gave up their places, and ``replans`` those that ended because steps had
    drifted from the prediction. An elastic job that shrank has capacity for ``feasible_ranks``.
    """

    observed_generation: Annotated[int, "the generation of the spec that the rest of the status describes"] = 0
    phase: Annotated[Phase, "phase of the job"] = Phase.PENDING
    reason: Annotated[str, "reason of the phase, in one word"] = ""
    message: Annotated[str, "reason of the phase in a sentence, with a remedy"] = ""
    attempt: Annotated[int, "number of the newest attempt; 0: none yet"] = 0
    launched: Annotated[int, "the newest attempt whose JobSet was created"] = 0
    ranks: Annotated[int, "of the newest attempt"] = 0
    failures: Annotated[int, "attempts that failed; a preempted, evicted or stopped one does not count"] = 0
    replans: Annotated[int, "attempts that ended because steps had drifted; the next drift must last twice as long"] = 0
    checkpoint: Annotated[CheckpointName | None, "the newest complete checkpoint: `out://UID/ATTEMPT/STEP`"] = None
    phase_entered_at: Annotated[float | None, "start of the phase"] = field(default=None, metadata=INSTANT)
    started_at: Annotated[
        float | None,
        "when its active time began: at its first launch, or at the next one after a suspension or a wait in a queue",
    ] = field(default=None, metadata=INSTANT)
    failed_at: Annotated[float | None, "when an attempt failed last"] = field(default=None, metadata=INSTANT)
    finished_at: Annotated[float | None, "when it succeeded or failed"] = field(default=None, metadata=INSTANT)
    feasible_ranks: Annotated[int | None, "ranks for which an elastic job was found to have capacity"] = None
    profile: Annotated[ProfileStatus | None, "the measurement on which the newest plan is based"] = None
    measurements: Annotated[
        tuple[ProfileStatus, ...],
        "measurements of its attempts, oldest first; they are used again on the same hosts",
    ] = ()
    plan: Annotated[PlanStatus | None, "the plan of the newest attempt"] = None
    conditions: Annotated[tuple[Condition, ...], "observations, one of each type"] = ()
    progress: Annotated[JobProgress | None, "reports of ranks, written by the service"] = None

    def condition(self, wanted: ConditionType) -> Condition | None:
        """The condition of that type, if it was ever observed."""
        return next((condition for condition in self.conditions if condition.type is wanted), None)


def operator_part(status: JobStatus) -> Mapping[str, Any]:
    """The part that the operator applies: the status without the service's part."""
    return {name: value for name, value in status.to_manifest().items() if name != "progress"}
