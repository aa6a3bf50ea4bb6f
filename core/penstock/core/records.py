"""Records: reports of ranks. They are in the run directory's outbox, one JSON object per line, until they are shipped.

A record is identified by (uid, attempt, source, sequence): sending it twice changes nothing.

The first rank writes an attempt's profile, steps, checkpoints and sampled timelines. The shipper turns printed lines of
ranks into records, so LOG records only exist with a shipper; elsewhere the lines are only in the log files.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from penstock.core.manifest import Manifest, read_number
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline


class RecordKind(enum.StrEnum):
    """The content of a record, in the field of the same name."""

    PROGRESS = "progress"
    METRICS = "metrics"
    TIMELINE = "timeline"
    LOG = "log"
    PROFILE = "profile"


def _read_number_if_any(value: Any, path: str) -> float | None:
    return None if value is None else read_number(value, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics(Manifest):
    """One line of metrics.jsonl: a step's loss in nats per token, its length, and the worst rank's peak memory.

    If a run diverges, losses and norm are not finite; they are reported anyway.
    """

    step: int
    loss: float = field(metadata={"read": read_number})
    step_seconds: float
    tokens_per_second: float
    learning_rate: float
    gradient_norm: float = field(metadata={"read": read_number})
    peak_bytes: int
    validation_loss: float | None = field(default=None, metadata={"read": _read_number_if_any})
    attempt: int = 0


WARM_UP_STEPS = 5
"""The first steps of a run, which are slower than the later ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Manifest):
    """Progress of the run."""

    step: int
    num_steps: int
    phase: str
    last_checkpoint: int | None = None


NO_RANK = -1
"""Stands for the rank in lines of the process that started the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine(Manifest):
    """One line that a rank printed, or the process that started it (`NO_RANK`)."""

    rank: int
    level: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Manifest):
    """One report; ``recorded_at`` is seconds since the epoch on the sender's clock.

    ``profile`` is the attempt's measurement, for planners that cannot read it from the run directory.
    ``profile_digest`` names the profile behind the attempt's plan; a plan for described hardware has none.
    """

    uid: str
    attempt: int
    source: str
    sequence: int
    recorded_at: float
    kind: RecordKind
    progress: Progress | None = None
    metrics: StepMetrics | None = None
    timeline: Timeline | None = None
    log: LogLine | None = None
    profile: Profile | None = None
    profile_digest: str | None = None
