"""File locks of a process, which are released when it ends for any reason."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.core.errors import UserError

STATE = "XDG_STATE_HOME"


class Lock:
    """The lock of the file ``path``, not held yet; its holder writes its description into the file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._who = who
        self._file = path.open("a+")
        self._held = False

    def take(self) -> bool:
        """Try to take the lock; return whether this object holds it."""
        if not self._held:
            self._held = self._try_lock()
        return self._held

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._file.truncate(0)
        self._file.write(self._who)
        self._file.flush()
        return True

    @property
    def holder(self) -> str:
        """The holder's description of itself."""
        self._file.seek(0)
        return self._file.read() or "unknown"

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


@contextmanager
def alone(
    path: Path, where: str, remedy: str, wait: Callable[[str], None] | None = None, name: str = ""
) -> Iterator[None]:
    """Hold the lock of the file ``path``; raises `UserError` with that place and remedy while another process holds it.

    With ``wait`` the lock is retried instead, after ``wait`` was called with the reason. ``name`` describes the holder
    to others, in addition to the number of this process.
    """
    with closing(Lock(path, f"{os.getpid()}{f' on {name}' if name else ''}")) as lock:
        while not lock.take():
            what = f"is in use by process {lock.holder}"
            if wait is None:
                raise UserError(what=what, where=where, remedy=remedy)
            wait(f"{where} {what}")
        yield


def machine_lock_path(environment: Mapping[str, str], home: Path, machine: str) -> Path:
    """The file whose lock is held by the one service that launches jobs of this user on ``machine``.

    It is below the home, which exists for any program that starts a service, and is not cleared while one runs, unlike
    ``XDG_RUNTIME_DIR``. Its name has the machine's, because machines may share homes.
    """
    return _state_folder(environment, home) / f"executor-{machine}.lock"


def launches_folder(environment: Mapping[str, str], home: Path, machine: str) -> Path:
    """The folder of this user's launches on ``machine`` (`penstock.core.host.launches`)."""
    return _state_folder(environment, home) / f"launches-{machine}"


def _state_folder(environment: Mapping[str, str], home: Path) -> Path:
    return Path(environment.get(STATE) or home / ".local" / "state") / "penstock"
