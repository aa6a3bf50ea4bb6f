"""Records of one rank, appended to its file in the outbox until they are shipped.

The file is bounded: when it is full the oldest half is dropped, so a run survives any outage of the network. Sequence
numbers continue across restarts of the process, because a record is identified by (uid, attempt, source, sequence).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core import jsontext
from penstock.core.records import Record, RecordKind
from penstock.core.serialization.files import append_lines, complete_lines, sync_file, sync_folder, write_atomically

LARGEST_BYTES = 64 * 2**20
_TAIL_BYTES = 2**20


class Outbox:
    """Appends numbered records; ``clock`` gives seconds since the epoch."""

    def __init__(
        self,
        folder: Path,
        *,
        uid: str,
        attempt: int,
        source: str,
        clock: Callable[[], float],
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        self._path = folder / f"a{attempt}-{source}.jsonl"
        self._identity: dict[str, Any] = {"uid": uid, "attempt": attempt, "source": source}
        self._clock, self._largest_bytes = clock, largest_bytes
        self._file = append_lines(self._path)
        sync_folder(folder)
        self._sequence = 1 + last_sequence(self._path)

    @property
    def sequence(self) -> int:
        """The number of the next record."""
        return self._sequence

    def put(self, kind: RecordKind, **content: Any) -> None:
        """Append one record; ``content`` sets the field that belongs to ``kind``."""
        record = Record(**self._identity, sequence=self._sequence, recorded_at=self._clock(), kind=kind, **content)
        self._file.write(json.dumps(record.to_manifest()) + "\n")
        self._file.flush()
        self._sequence += 1
        if self._path.stat().st_size > self._largest_bytes:
            self._halve()

    def _halve(self) -> None:
        self._file.close()
        lines = complete_lines(self._path)
        write_atomically(self._path, "".join(f"{line}\n" for line in lines[len(lines) // 2 :]))
        self._file = append_lines(self._path)

    def sync(self) -> None:
        """Flush all records to disk."""
        sync_file(self._file)

    def close(self) -> None:
        """Flush all records to disk and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of one outbox file, oldest first; an incomplete last line is skipped."""
    return [Record.from_manifest(jsontext.load(line)) for line in complete_lines(path)]


def last_sequence(path: Path) -> int:
    """The number of the last complete record in a file of the outbox; -1 if there is none."""
    if not path.exists():
        return -1
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for start in (max(0, size - _TAIL_BYTES), 0):
            file.seek(start)
            lines = file.read(size - start).split(b"\n")[1 if start else 0 : -1]
            for line in reversed(lines):
                number = sequence_of(line)
                if number is not None:
                    return number
            if not start:
                break
    return -1


def sequence_of(line: bytes) -> int | None:
    """The number of the record in a line; None for a damaged line, as after a power cut."""
    try:
        return int(jsontext.load(line)["sequence"])
    except (ValueError, KeyError, TypeError):
        return None
