"""Export of checkpoints as models for other programs, one at a time, in processes that can be killed.

`penstock-agent export` does the work, so the service does not load PyTorch. A finished export is a folder of the run.
The state of unfinished ones is kept in memory only.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.api.files.runfiles import export_folder

COMMAND = (sys.executable, "-m", "penstock.agent", "export")
MOST_SECONDS = 1800.0
MOST_WAITING = 32
MOST_REMEMBERED = 256
MOST_CHARACTERS = 500


class ExportState(enum.StrEnum):
    """State of an export."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The state of an export; ``message`` is the cause of a failure."""

    state: ExportState
    message: str = ""


WAITING = frozenset({ExportState.QUEUED, ExportState.RUNNING})


class Exports:
    """Exports of one service, one at a time."""

    def __init__(self, command: tuple[str, ...] = COMMAND, most_seconds: float = MOST_SECONDS) -> None:
        self._command, self._most_seconds = command, most_seconds
        self._lock = threading.Lock()
        self._known: dict[Path, Export] = {}
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="penstock-export")

    def of(self, root: Path, attempt: int, step: int) -> Export | None:
        """Return the state of the export of that checkpoint; none if it was not requested."""
        folder = export_folder(root, attempt, step)
        if folder.is_dir():
            return Export(state=ExportState.DONE)
        with self._lock:
            return self._known.get(folder)

    def start(self, root: Path, attempt: int, step: int) -> bool:
        """Request an export, unless it is done or in progress; return false if too many wait."""
        folder = export_folder(root, attempt, step)
        if folder.is_dir():
            return True
        with self._lock:
            waiting = [known for known, export in self._known.items() if export.state in WAITING]
            if folder in waiting:
                return True
            if self._closed or len(waiting) >= MOST_WAITING:
                return False
            self._note(folder, Export(state=ExportState.QUEUED))
            self._pool.submit(self._export, root, attempt, step)
        return True

    def close(self) -> None:
        """End running exports."""
        with self._lock:
            self._closed = True
            if self._running is not None:
                _kill(self._running)
        self._pool.shutdown(cancel_futures=True)

    def _note(self, folder: Path, export: Export | None) -> None:
        self._known.pop(folder, None)
        if export is not None:
            self._known[folder] = export
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    def _export(self, root: Path, attempt: int, step: int) -> None:
        folder = export_folder(root, attempt, step)
        with self._lock:
            self._note(folder, Export(state=ExportState.RUNNING))
        try:
            why = self._made(root, attempt, step, folder).replace(str(root), "the run directory")
        except OSError as error:
            why = str(error)
        with self._lock:
            self._note(folder, Export(state=ExportState.FAILED, message=why) if why else None)

    def _made(self, root: Path, attempt: int, step: int, folder: Path) -> str:
        """Create the folder atomically; return the reason why it failed, or an empty string."""
        folder.parent.mkdir(exist_ok=True)
        for old in folder.parent.glob(f".{folder.name}.*"):  # left by a service that was killed
            shutil.rmtree(old, ignore_errors=True)
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4()}")
        options = ("--to", str(partial), "--attempt", str(attempt), "--step", str(step))
        try:
            why = self._ran((*self._command, str(root), *options))
            if not why:
                partial.rename(folder)
            return why
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _ran(self, command: tuple[str, ...]) -> str:
        """Run the command; return the reason why it failed, or an empty string."""
        with tempfile.TemporaryFile() as stderr_file:
            with self._lock:
                if self._closed:
                    return "the service ended"
                process = self._running = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr_file,
                    start_new_session=True,
                )
            try:
                code = process.wait(self._most_seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                return f"took longer than {self._most_seconds:.0f} s"
            finally:
                with self._lock:
                    self._running = None
            stderr_file.seek(0)
            text = stderr_file.read().decode(errors="replace").strip()
        return "" if code == 0 else _why(text)[-MOST_CHARACTERS:] or f"ended with code {code}"


def _why(text: str) -> str:
    """Return the program's message about its failure, without a traceback, which names files of this machine."""
    lines = text.splitlines()
    says = [number for number, line in enumerate(lines) if line.startswith(("error ", "failed "))]
    return "\n".join(lines[says[0] :] if says else lines)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
