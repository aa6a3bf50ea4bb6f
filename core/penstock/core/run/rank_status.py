"""Position of a rank, in a small memory-mapped file: it survives the rank, so that a supervisor can report where it
died.

Writing is a store to memory, cheap enough for every action; reading takes two small reads. The file holds six native
64-bit integers (process id, state, step, instruction, end time, width), then from byte 64 on the rank's actions as
text, each padded to the width. The error of a rank that fails is next to it in ``<name>.error``.
"""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

_HEADER = struct.Struct("=6q")
_PID, _STATE, _STEP, _INSTRUCTION, _ENDED, _WIDTH = range(6)
_HEADER_BYTES = 64
BETWEEN_STEPS = -1


class State(enum.IntEnum):
    """State of a rank. ``REFUSED`` ends it with a user's mistake, ``FAILED`` with any other error."""

    STARTING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    REFUSED = 4


class Cursor(Protocol):
    """Two cells that the interpreter writes: the step, and the index of the current instruction."""

    def __setitem__(self, cell: int, value: int, /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Contents of a rank's file. ``action`` is empty outside of a step; ``ended_ns`` is on the rank's clock."""

    pid: int
    state: State
    step: int
    action: str
    ended_ns: int
    error: str


class StatusFile:
    """A rank's own file, newly created."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        _error_path(path).unlink(missing_ok=True)
        header = _HEADER.pack(pid, State.STARTING, BETWEEN_STEPS, BETWEEN_STEPS, 0, 0)
        path.write_bytes(header.ljust(_HEADER_BYTES, b"\0"))
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), _HEADER_BYTES)).cast("q")

    @property
    def cursor(self) -> Cursor:
        """The cells of step and instruction."""
        return self._cells[_STEP : _INSTRUCTION + 1]

    def start(self, actions: Iterable[str]) -> None:
        """Record that the rank runs; ``actions`` are the texts of its instructions, in order. They replace those of an
        earlier plan, between two steps.
        """
        texts = [action.encode() for action in actions]
        width = max(map(len, texts), default=0)
        self._cells[_INSTRUCTION] = BETWEEN_STEPS
        with self._path.open("r+b") as file:
            file.truncate(_HEADER_BYTES)
            file.seek(_HEADER_BYTES)
            file.write(b"".join(text.ljust(width) for text in texts))
        self._cells[_WIDTH] = width
        self._cells[_STATE] = State.RUNNING

    def finish(self, now_ns: int) -> None:
        """Record that the rank is done."""
        self._end(State.DONE, now_ns)

    def fail(self, error: str, now_ns: int, *, refused: bool = False) -> None:
        """Record that the rank failed, and its error."""
        _error_path(self._path).write_text(error)
        self._end(State.REFUSED if refused else State.FAILED, now_ns)

    def _end(self, state: State, now_ns: int) -> None:
        self._cells[_ENDED] = now_ns
        self._cells[_STATE] = state


def read_status(path: Path) -> RankStatus | None:
    """The contents of the file; None if it does not exist yet."""
    try:
        with path.open("rb", buffering=0) as file:
            pid, state, step, instruction, ended_ns, width = _HEADER.unpack(file.read(_HEADER.size))
            action = _read_action(file, instruction, width) if instruction >= 0 else ""
    except (FileNotFoundError, struct.error):
        return None
    error = _error_path(path).read_text() if state > State.DONE else ""
    return RankStatus(pid=pid, state=State(state), step=step, action=action, ended_ns=ended_ns, error=error)


def _read_action(file: FileIO, instruction: int, width: int) -> str:
    file.seek(_HEADER_BYTES + instruction * width)
    return file.read(width).decode().rstrip()


def status_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}"


def _error_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.error")
