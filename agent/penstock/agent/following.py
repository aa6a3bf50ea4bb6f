"""Log lines of ranks as records: a follower reads their files, and appends new lines to a separate outbox.

The end positions in the files are written before the lines are appended, so a follower that is killed in between leaves
no gap and no duplicate. Lines have no time of their own. Of the lines since the last poll, those of the file that was
written last come last, so that the last line of a log is the last one printed. Long lines are cut, and of many lines
only the newest are taken: a rank that prints without end fills its own file and nothing else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.agent.launch import RANKS_FILE
from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.records import NO_RANK, LogLine, RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import Outbox, last_sequence
from penstock.core.serialization.files import write_json

SOURCE = "logs"
MOST_CHARACTERS = 2_000
MOST_LINES = 500
MOST_BYTES = 2**18
"""Limit for a file in one poll."""
OUTBOX_BYTES = 8 * 2**20

_FILES = re.compile(
    r"logs/a(?P<attempt>\d+)(-profile)?/([^/]+/attempt_0/(?P<rank>\d+)/std(out|err)|torchrun)\.log"
    r"|attempts/(?P<supervised>\d+)/supervisor\.log"
)
_MARKED = re.compile(r"[^A-Za-z]{0,40}\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_GLOG = re.compile(r"([IWEF])\d{4} \d\d:")  # torch's own lines begin so
_RAISED = re.compile(r"Traceback \(most recent call last\):|[\w.]+(Error|Exception)(:|$)")
_WARNED = re.compile(r"\S+:\d+: \w*Warning: ")
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "error", "F": "error"}

Places = Mapping[str, int]
"""Read positions of files, by their names below the run directory."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file that a rank of an attempt, or its supervisor (`NO_RANK`), prints to."""

    path: Path
    name: str
    attempt: int
    rank: int


def log_files(root: Path) -> list[LogFile]:
    """The log files below ``root``, a run or a host's part of one: by rank, stdout before stderr."""
    files = []
    for pattern in ("logs/*/*.log", "logs/*/*/attempt_0/*/*.log", "attempts/*/*.log"):
        for path in root.glob(pattern):
            name = path.relative_to(root).as_posix()
            if match := _FILES.fullmatch(name):
                attempt = int(match["attempt"] or match["supervised"])
                rank = NO_RANK if match["rank"] is None else _rank(path, int(match["rank"]))
                files.append(LogFile(path, name, attempt, rank))
    files.sort(key=lambda file: file.name, reverse=True)  # stdout, then stderr
    return sorted(files, key=lambda file: (file.attempt, file.rank == NO_RANK, file.rank))


def _rank(path: Path, process: int) -> int:
    """Return the rank of a launch's process: its number, unless the launch maps it to another."""
    try:
        names = jsontext.load((path.parents[3] / RANKS_FILE).read_text())
    except FileNotFoundError:
        return process
    return int(names[process])


def level_of(line: str) -> str:
    """Return the level that the line is marked with; ``info`` without a mark."""
    if match := _MARKED.match(line) or _GLOG.match(line):
        return _LEVELS[match[1][0]]
    if _RAISED.match(line):
        return "error"
    return "warning" if _WARNED.match(line) else "info"


def is_read(run: RunDir, attempt: int) -> bool:
    """Whether all lines of the attempt's files are in its outbox."""
    place = run.outbox / f"a{attempt}-{_source(run)}"
    files = [file for file in log_files(run.logs.parent) if file.attempt == attempt]
    try:
        saved = jsontext.load(place.with_suffix(".read").read_text())
        begin, end, first = dict(saved["begin"]), dict(saved["end"]), int(saved["sequence"])
    except FileNotFoundError:
        return not any(file.path.stat().st_size for file in files)
    except (ValueError, KeyError, TypeError):
        return False
    if any(file.path.stat().st_size != end.get(file.name, 0) for file in files):
        return False
    spans = [(file, begin.get(file.name, 0), end.get(file.name, 0)) for file in files]
    lines = sum(len(list(new_lines(file, start, stop))) for file, start, stop in spans if stop > start)
    return last_sequence(place.with_suffix(".jsonl")) + 1 >= first + lines


def _source(run: RunDir) -> str:
    return f"{SOURCE}-{run.host.name}" if run.host else SOURCE


def _begin(path: Path, position: int) -> int:
    """Return the position to read from; a file that became shorter is a new one."""
    return position if path.stat().st_size >= position else 0


def end_of_lines(path: Path, start: int, *, last: bool) -> int:
    """Return the end of the complete lines after ``start``; with ``last`` also of an incomplete one."""
    size = path.stat().st_size
    if last or size == start:
        return size
    begin = max(start, size - MOST_BYTES)
    with path.open("rb") as file:
        file.seek(begin)
        newline = file.read(size - begin).rfind(b"\n")
    if newline >= 0:
        return begin + newline + 1
    return size if begin > start else start  # an overlong line is cut


def new_lines(file: LogFile, start: int, stop: int) -> Iterator[LogLine]:
    """The lines of the section; if they are too many, the newest, after a line that says so."""
    begin = max(start, stop - MOST_BYTES)
    with file.path.open("rb") as content:
        content.seek(begin)
        lines = content.read(stop - begin).removesuffix(b"\n").split(b"\n")
    whole = lines if begin == start else lines[1:] or lines
    if begin > start or len(whole) > MOST_LINES:
        message = f"lines are left out here, because they were printed too fast; {file.name} has all of them"
        yield LogLine(rank=file.rank, level="warning", message=message)
    for line in whole[-MOST_LINES:]:
        text = _readable(line)
        yield LogLine(rank=file.rank, level=level_of(text), message=text)


def _readable(line: bytes) -> str:
    """Return the final text of a line that overwrites itself, as progress bars do."""
    visible = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = visible.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}").rstrip()
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


@dataclass
class Follower:
    """Follows the log files of every attempt in ``run``; ``say`` gets each problem once."""

    run: RunDir
    say: Callable[[str], None]
    clock: Callable[[], float]
    _attempts: dict[int, _Attempt] = field(default_factory=dict)
    _last_reported: str = ""

    def poll(self, *, last: bool = False) -> bool:
        """Read the lines since the last poll; with ``last`` also a line that has no end yet. False if some
        lines have to wait.
        """
        all_read = True
        files: dict[int, list[LogFile]] = {}
        for file in log_files(self.run.logs.parent):
            files.setdefault(file.attempt, []).append(file)
        for attempt, of_attempt in files.items():
            try:
                followed = self._attempts.setdefault(attempt, _Attempt(self.run, attempt, self.clock))
                followed.poll(of_attempt, last=last)
            except (OSError, UserError) as error:  # the next poll continues at the written positions
                all_read = False
                self._drop(attempt)
                self._say(f"log lines of attempt {attempt} cannot be read: {error}; retrying at the next poll")
        return all_read

    def close(self) -> None:
        """Close the outboxes."""
        for attempt in list(self._attempts):
            self._drop(attempt)

    def _drop(self, attempt: int) -> None:
        with contextlib.suppress(KeyError):
            self._attempts.pop(attempt).close()

    def _say(self, text: str) -> None:
        if text != self._last_reported:
            self.say(text)
        self._last_reported = text


class _Attempt:
    """Files of one attempt and their read positions. Each host that takes part is a separate source."""

    def __init__(self, run: RunDir, attempt: int, clock: Callable[[], float]) -> None:
        self._run, self._number, self._clock = run, attempt, clock
        self._source = _source(run)
        self._memory = run.outbox / f"a{attempt}-{self._source}.read"
        self._places: Places | None = None
        self._box: Outbox | None = None

    def close(self) -> None:
        """Close the outbox."""
        if self._box is not None:
            self._box.close()

    def poll(self, files: list[LogFile], *, last: bool) -> None:
        """Append the files' new lines, in the order in which the files were last written."""
        if self._places is None:
            self._places = self._recovered(files)
        files = sorted(files, key=lambda file: file.path.stat().st_mtime_ns)
        begin = {file.name: _begin(file.path, self._places.get(file.name, 0)) for file in files}
        end = {file.name: end_of_lines(file.path, begin[file.name], last=last) for file in files}
        if begin == end:
            return
        box = self._outbox()
        write_json(self._memory, {"sequence": box.sequence, "begin": begin, "end": end})
        self._append(files, begin, end, skipping=0)
        self._places = end

    def _recovered(self, files: list[LogFile]) -> Places:
        """Return the stored positions, after appending lines that are missing from the outbox."""
        try:
            saved = jsontext.load(self._memory.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        done = max(self._outbox().sequence - int(saved["sequence"]), 0)
        self._append(files, saved["begin"], saved["end"], skipping=done)
        return dict(saved["end"])

    def _append(self, files: list[LogFile], begin: Places, end: Places, *, skipping: int) -> None:
        """Append lines in the order of ``end``, as it was stored, regardless of later writes."""
        box, named = self._outbox(), {file.name: file for file in files}
        for name, stop in end.items():
            start, file = begin.get(name, 0), named.get(name)
            for line in new_lines(file, start, stop) if file and stop > start else ():
                if skipping:
                    skipping -= 1
                else:
                    box.put(RecordKind.LOG, log=line)

    def _outbox(self) -> Outbox:
        if self._box is None:
            metadata = self._run.read_recorded_job().metadata
            self._box = Outbox(
                self._run.outbox,
                uid=metadata.uid or metadata.name,
                attempt=self._number,
                source=self._source,
                clock=self._clock,
                largest_bytes=OUTBOX_BYTES,
            )
        return self._box
