"""What a report is made from: core types and plain numbers, filled in by whoever has the run directory.

Everything but the job's name, phase and command may be missing; the report then says what was left out and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.plan import Plan
from penstock.core.profile import Profile, UnitRecord
from penstock.core.records import StepMetrics
from penstock.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Predicted bytes of one rank by cause, and the measured peak of the whole process where there is one.

    ``constant_bytes`` is the process before any parameter; ``state_bytes`` parameters, gradients and optimizer state;
    ``slot_bytes`` the arena; ``transient_bytes`` the largest that an action takes beyond its slots.
    """

    constant_bytes: int
    state_bytes: int
    slot_bytes: int
    transient_bytes: int
    measured_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int:
        """The sum of all parts."""
        return self.constant_bytes + self.state_bytes + self.slot_bytes + self.transient_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FitPoint:
    """A measured cost record beside what the fitted cost model says of it (the record's ``together_seconds``)."""

    record: UnitRecord
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_seconds / self.record.together_seconds - 1.0 if self.record.together_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text the trained model wrote; ``text`` begins with ``prompt``."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything a report shows of one run.

    ``command`` reproduces it. ``metrics`` may hold several attempts' entries for one step; the newest counts.
    ``unigram_loss`` is the nats per token of the validation text under the corpus's unigram distribution.
    ``versions`` are (name, version) pairs in the order to show them.
    """

    job: str
    phase: str
    command: str
    plan: Plan | None = None
    profile: Profile | None = None
    metrics: tuple[StepMetrics, ...] = ()
    unigram_loss: float | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    memory: tuple[RankMemory, ...] = ()
    memory_limit_bytes: int | None = None
    fit: tuple[FitPoint, ...] = ()
    samples: tuple[Sample, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
