"""Followers of files to which ranks append while they run: metrics.jsonl, warnings, or only the growth of a file."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.agent.stalling import Steps
from penstock.core.records import StepMetrics
from penstock.core.run.folder import metrics_entry

LONGEST_LINE_BYTES = 2**16


class LineFollower:
    """Reads lines that were appended since the last poll, from the end of the last whole line on.

    The next process completes or cuts off a line that a killed process left unfinished. In both cases every line is
    read once and as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _end_of_lines(path) if path.exists() else 0

    def new(self) -> list[str]:
        """Return the lines that were completed since the last call, in order."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").split("\n")[:-1]


def _end_of_lines(path: Path) -> int:
    """Return the end of the last whole line of a file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE_BYTES)
        file.seek(start)
        return start + file.read().rfind(b"\n") + 1


class MetricsFollower:
    """Follows metrics.jsonl at ``path``, from its last whole line on."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path)

    def new(self) -> list[StepMetrics]:
        """Return the entries that were completed since the last call, in order; damaged ones are left out."""
        return [entry for line in self._lines.new() if (entry := metrics_entry(line)) is not None]


class Growth(Steps):
    """Growth of a file since the last poll; a file that became shorter did not grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = self._present_bytes()

    def has_advanced(self) -> bool:
        """Whether the file grew since the last call."""
        before, self._num_bytes = self._num_bytes, self._present_bytes()
        return self._num_bytes > before

    def _present_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0
