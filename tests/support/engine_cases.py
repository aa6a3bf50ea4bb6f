"""Lives of a job, as a table: the same for every backend of `penstock.core.engine`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.lifecycle import Phase


class End(enum.StrEnum):
    """What becomes of an attempt that trains. One that runs on does so until it is stopped or deleted."""

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    IS_REFUSED = "is refused"
    FALLS_SILENT = "falls silent"
    RUNS_ON = "runs on"
    VANISHES = "vanishes"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with ``policy`` whose attempts end like ``ends``.

    While the job first runs, its user suspends it if ``suspends``, ``passes_seconds`` pass, and the wall clock is set
    by ``jump_seconds``. ``supervised``: only supervisors, which are processes of their own, can do so.
    """

    name: str
    ends: tuple[End, ...]
    life: tuple[tuple[Phase, str], ...]
    failures: int = 0
    policy: Mapping[str, Any] = field(default_factory=dict)
    suspends: bool = False
    passes_seconds: float = 0.0
    jump_seconds: float = 0.0
    supervised: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job: its phases with their reasons, and the attempts that were started, in order."""

    life: tuple[tuple[Phase, str], ...]
    started: tuple[int, ...]
    failures: int


BEGINS = (
    (Phase.QUEUED, "Accepted"),
    (Phase.PROFILING, "Admitted"),
    (Phase.PLANNING, "Profiled"),
    (Phase.BINDING, "Planned"),
    (Phase.RUNNING, "Bound"),
)
LOSES = ((Phase.RECOVERING, "AttemptFailed"), (Phase.QUEUED, "Retrying"))
BEGINS_AGAIN = ((Phase.PLANNING, "Admitted"), *BEGINS[3:])
COMPLETES = ((Phase.SUCCEEDED, "Completed"),)
RETRIES = (*BEGINS, *LOSES, *BEGINS_AGAIN, *COMPLETES)

CASES = (
    Case(name="one attempt", ends=(End.SUCCEEDS,), life=(*BEGINS, *COMPLETES)),
    Case(name="one retry", ends=(End.FAILS, End.SUCCEEDS), life=RETRIES, failures=1),
    Case(
        name="no retries left",
        ends=(End.FAILS, End.FAILS),
        life=(*BEGINS, *LOSES, *BEGINS_AGAIN, (Phase.FAILED, "BackoffLimitExceeded")),
        failures=2,
        policy={"backoffLimit": 1},
    ),
    Case(name="a mistake", ends=(End.IS_REFUSED,), life=(*BEGINS, (Phase.FAILED, "UserError"))),
    Case(
        name="a silent attempt",
        ends=(End.FALLS_SILENT, End.SUCCEEDS),
        life=RETRIES,
        failures=1,
        passes_seconds=61.0,
    ),
    Case(name="a suspension", ends=(End.RUNS_ON,), life=(*BEGINS, (Phase.SUSPENDED, "Suspended")), suspends=True),
    Case(
        name="a deadline",
        ends=(End.RUNS_ON,),
        life=(*BEGINS, (Phase.FAILED, "DeadlineExceeded")),
        policy={"activeDeadlineSeconds": 7200},
        jump_seconds=7200.0,
    ),
    Case(name="a clock set forwards", ends=(End.SUCCEEDS,), life=(*BEGINS, *COMPLETES), jump_seconds=3600.0),
    Case(name="a clock set back", ends=(End.SUCCEEDS,), life=(*BEGINS, *COMPLETES), jump_seconds=-3600.0),
    Case(
        name="a supervisor that vanishes",
        ends=(End.VANISHES, End.SUCCEEDS),
        life=RETRIES,
        failures=1,
        supervised=True,
    ),
)
IN_PROCESS = tuple(case for case in CASES if not case.supervised)


def expected(case: Case) -> Outcome:
    """What every backend makes of the case."""
    return Outcome(life=case.life, started=tuple(range(1, len(case.ends) + 1)), failures=case.failures)
