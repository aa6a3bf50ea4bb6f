"""Locks that a process holds on files: free again once it has ended, however it did."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.core.errors import UserError

STATE = "XDG_STATE_HOME"


class Lock:
    """The lock of the file ``path``, held by nobody yet; whoever holds it has written there who that is.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._who = who
        self._file = path.open("a+")
        self._held = False

    def take(self) -> bool:
        """Hold it from now on, unless another does; whether this one holds it."""
        if not self._held:
            self._held = self._try()
        return self._held

    def _try(self) -> bool:
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
        """Who holds it, as they wrote it."""
        self._file.seek(0)
        return self._file.read() or "unknown"

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


@contextmanager
def alone(
    path: Path, where: str, remedy: str, wait: Callable[[str], None] | None = None, name: str = ""
) -> Iterator[None]:
    """Hold the lock of the file ``path``; raises `UserError` with that place and remedy while another process does.

    With ``wait`` the lock is tried again instead, after ``wait`` was called with what is in the way. ``name`` tells
    others who holds it, besides the number of this process.
    """
    with closing(Lock(path, f"{os.getpid()}{f' on {name}' if name else ''}")) as lock:
        while not lock.take():
            what = f"is in use by process {lock.holder}"
            if wait is None:
                raise UserError(what=what, where=where, remedy=remedy)
            wait(f"{where} {what}")
        yield


def machine_lock_path(environment: Mapping[str, str], home: Path, machine: str) -> Path:
    """The file whose lock the one service holds that launches jobs of this user on ``machine``.

    Below the home, which is there for whatever starts a service, and is not cleared while one runs as
    ``XDG_RUNTIME_DIR`` is; by the machine's name, because machines may share homes.
    """
    return Path(environment.get(STATE) or home / ".local" / "state") / "penstock" / f"executor-{machine}.lock"
