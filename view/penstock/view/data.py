"""Input of a report: core types and plain numbers, read from the run directory by the caller.

Everything but the job's name, phase and command may be missing. The report then says which section is left out, and
why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.comparison import FitPoint, RankMemory
from penstock.core.curves import RunCurves
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text the trained model wrote; ``text`` begins with ``prompt``."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything a report shows of one run.

    ``command`` reproduces the run. ``measured`` is the sampled step that is drawn in full: the typical one, or on a
    job's page the one that the user chose. ``sampled`` are the other sampled steps. ``unigram_loss`` is the validation
    loss, in nats per token, of a model that knows only how often each token occurs in the training data. ``versions``
    are (name, version) pairs in the order to show them.
    """

    job: str
    phase: str
    command: str
    plan: Plan | None = None
    profile: Profile | None = None
    run: RunCurves = field(default_factory=RunCurves)
    unigram_loss: float | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    sampled: tuple[Timeline, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    memory_limit_bytes: int | None = None
    fit: tuple[FitPoint, ...] = ()
    samples: tuple[Sample, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
