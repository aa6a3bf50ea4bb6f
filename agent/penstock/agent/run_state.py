"""State of a local run, in the file state.json of its directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase, enter
from penstock.core.manifest import Manifest
from penstock.core.serialization.files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseChange(Manifest):
    """A phase was entered ``at`` seconds since the epoch."""

    phase: Phase
    at: float
    reason: str
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState(Manifest):
    """State of the executor between observations, and across its restarts.

    ``attempt`` is the number of the newest attempt and never decreases. ``failures`` counts attempts that failed since
    the user last started the run. Times are seconds since the epoch; ``failed_boottime`` is
    ``failed_at`` in seconds since the boot ``failed_boot_id``.
    """

    phase: Phase = Phase.PENDING
    attempt: int = 0
    failures: int = 0
    message: str = ""
    started_at: float | None = None
    failed_at: float | None = None
    failed_boot_id: str = ""
    failed_boottime: float = 0.0
    finished_at: float | None = None
    history: tuple[PhaseChange, ...] = ()

    def entered(self, change: PhaseChange) -> RunState:
        """Return the state after a legal change of phase."""
        return dataclasses.replace(
            self,
            phase=enter(self.phase, change.phase),
            message=change.message,
            finished_at=change.at if change.phase.terminal else None,
            history=(*self.history, change),
        )

    def restarted(self) -> RunState:
        """Return the state of a restart: attempt numbers and the history continue, failures and times are reset."""
        return RunState(attempt=self.attempt, history=self.history)


def state_path(root: Path) -> Path:
    """Return the file in the run directory ``root``."""
    return root / "state.json"


def read_state(root: Path) -> RunState:
    """Return the state of the run in ``root``; a fresh one if it was never started."""
    path = state_path(root)
    try:
        return RunState.from_manifest(jsontext.load(path.read_text()))
    except FileNotFoundError:
        return RunState(attempt=_newest_attempt(root))
    except (OSError, ValueError, UserError) as error:
        remedy = "delete the file: attempts and checkpoints are read from their folders"
        raise UserError(what=f"is corrupt: {error}", where=str(path), remedy=remedy) from None


def _newest_attempt(root: Path) -> int:
    """Return the highest number of an attempt with a folder."""
    names = (path.name.removeprefix("a") for path in (root / "checkpoints").glob("a*"))
    return max(map(int, filter(str.isdecimal, names)), default=0)


def write_state(root: Path, state: RunState) -> None:
    """Write ``state`` atomically and durably, also against a power failure."""
    write_json(state_path(root), state.to_manifest())
