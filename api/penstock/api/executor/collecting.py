"""Collection of records that ended attempts left behind, and closing of those attempts.

An attempt's ranks append records to files of the run directory, and a shipper next to its supervisor sends them. While
it runs, the supervisor restarts a dead shipper. But supervisor, shipper, service and machine may be killed in any
order, and then unsent records remain in the files. So an attempt is open in the store from its launch on. While it is
open it accepts records, even after the next attempt has started. This module handles attempts that have ended, because
the job has a newer attempt, is in no live phase or was deleted, but are still open:

    the attempt's supervisor runs             wait: the attempt may still write records
    all records are acknowledged              close: no record can be missing
    a shipper of the run directory runs       wait: it sends the records of all attempts
    a newer attempt's supervisor runs         wait: its shipper sends the records of all attempts
    otherwise                                 collect: start a shipper, with a backoff that doubles

Its only state is the backoff. All other state is in files and the store, so the service may be killed at any time.
"""

from __future__ import annotations

import enum
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.api.service import Service
from penstock.api.store import attempts
from penstock.api.store.attempts import OpenAttempt
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import is_alive, is_locked
from penstock.core.serialization.manifest_files import read
from penstock.core.supervision import Claim

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "penstock.agent", "ship")
MOST_SHIPPERS = 2
MAX_PER_POLL = 100
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0


class Step(enum.Enum):
    """Action for an attempt that has ended and is open."""

    WAIT = "wait"
    COLLECT = "collect"
    CLOSE = "close"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedAttempt:
    """State of an attempt that has ended and is open.

    ``supervised``: its supervisor runs. ``acknowledged``: the service has acknowledged every record. ``shipping``: a
    shipper of the run directory runs. ``followed``: the job has a newer attempt, whose supervisor runs.
    """

    supervised: bool
    acknowledged: bool
    shipping: bool
    followed: bool


def next_step(attempt: EndedAttempt) -> Step:
    """Return the action for the attempt, by the table in the module's docstring."""
    if attempt.supervised:
        return Step.WAIT
    if attempt.acknowledged:
        return Step.CLOSE
    return Step.WAIT if attempt.shipping or attempt.followed else Step.COLLECT


class Shippers(Protocol):
    """Starts shippers of run directories, as `ProcessShippers` does."""

    def start(self, folder: AttemptFolder) -> None:
        """Start the upload of all records in the run directory."""

    def running(self) -> int:
        """Number of started shippers that have not ended."""


class ProcessShippers:
    """Shippers as processes, each the leader of a session: they continue when the service ends."""

    def __init__(self, address_file: Path, token_file: Path, command: tuple[str, ...] = COMMAND) -> None:
        self._options = ("--address-file", str(address_file), "--token-file", str(token_file))
        self._command = command
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, folder: AttemptFolder) -> None:
        """Start a shipper. Its stdin is at end of file, so it drains the records and exits, as without a supervisor."""
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.shipper_log.open("ab") as output:
            process = subprocess.Popen(
                [*self._command, str(folder.root), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)

    def running(self) -> int:
        self._started = [process for process in self._started if process.poll() is None]
        return len(self._started)


@dataclass(slots=True)
class _Pause:
    seconds: float
    until: float


class Collector:
    """Closes the attempts of the executor ``name``.

    ``acknowledged`` returns whether every record of an attempt was acknowledged, given its folder and whether it is the
    job's newest attempt. ``seconds`` is a monotonic clock.
    """

    def __init__(
        self,
        service: Service,
        shippers: Shippers,
        *,
        name: str,
        acknowledged: Callable[[AttemptFolder, bool], bool],
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._shippers, self._name = service, shippers, name
        self._acknowledged, self._seconds = acknowledged, seconds
        self._pauses: dict[tuple[str, int], _Pause] = {}
        self._after: tuple[str, int] = ("", 0)

    def run_once(self) -> None:
        """Handle the next page of open attempts. Logs an error in one attempt, and continues with the others."""
        page = self._service.read(
            lambda connection: attempts.ended_and_open(connection, self._name, self._after, MAX_PER_POLL)
        )
        self._after = (page[-1].uid, page[-1].attempt) if len(page) == MAX_PER_POLL else ("", 0)
        for attempt in page:
            try:
                self._advance(attempt)
            except Exception:  # of any kind: the other attempts continue
                message = "attempt %d of job %s: collecting its records failed; retrying at the next poll"
                log.exception(message, attempt.attempt, attempt.uid)

    def _advance(self, attempt: OpenAttempt) -> None:
        folder = AttemptFolder(self._service.settings.runs / attempt.uid, attempt.attempt)
        key = (attempt.uid, attempt.attempt)
        match next_step(self._ended(folder, attempt)):
            case Step.CLOSE:
                now = self._service.clock()
                self._service.write(attempt.uid, lambda connection: attempts.close(connection, *key, now))
                self._pauses.pop(key, None)
            case Step.COLLECT:
                self._collect(folder, key)
            case Step.WAIT:
                pass

    def _ended(self, folder: AttemptFolder, attempt: OpenAttempt) -> EndedAttempt:
        """Return the attempt's state.

        The shipper is checked before its acknowledgements: if it no longer runs, it has written all of them.
        """
        is_newest = attempt.attempt == attempt.newest
        supervised = _is_supervised(folder)
        shipping = is_locked(shipping_lock(folder.root))
        return EndedAttempt(
            supervised=supervised,
            shipping=shipping,
            followed=not is_newest and _is_supervised(AttemptFolder(folder.root, attempt.newest)),
            acknowledged=not supervised and self._acknowledged(folder, is_newest),
        )

    def _collect(self, folder: AttemptFolder, key: tuple[str, int]) -> None:
        now = self._seconds()
        pause = self._pauses.get(key)
        if pause is not None and now < pause.until:
            return
        if self._shippers.running() >= MOST_SHIPPERS:
            return
        seconds = min(2 * pause.seconds, LONGEST_PAUSE_SECONDS) if pause is not None else FIRST_PAUSE_SECONDS
        self._pauses[key] = _Pause(seconds, now + seconds)
        message = "job %s: starting a shipper for the remaining records of attempt %d; the next try is in %.0f s"
        log.info(message, *key, seconds)
        self._shippers.start(folder)


def _is_supervised(folder: AttemptFolder) -> bool:
    claim = read(folder.claim, Claim)
    return claim is not None and is_alive(claim)
