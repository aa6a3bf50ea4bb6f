"""Planning in a separate process, which can be limited and killed, and whose failure affects nothing else.

The process (`penstock.planner.worker`) writes its progress from time to time, one line each, and its answer as the last
line. Only it loads the planner, which needs more memory than its callers.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Protocol

from penstock.core.errors import UserError
from penstock.planner.worker.protocol import PLAIN, SMALLER, Answer, Line, PlanningRequest, Progress

log = logging.getLogger(__name__)

MOST_SECONDS = 600.0
MOST_STARTS = 3
"""Starts of one request. A killed process says nothing about the request, unless that happens repeatedly."""

MORE_MEMORY = "give the operator, service or command in which it runs more memory, or pin dp, pp or slices"
LOGGED_BYTES = 4_096
COMMAND = (sys.executable, "-m", "penstock.planner.worker")


class Planner(Protocol):
    """Plans one request at a time per key."""

    def start(self, key: str, request: PlanningRequest) -> None:
        """Start planning, unless the key is in use."""
        ...

    def poll(self, key: str) -> Answer | None:
        """The answer, returned once; None while planning runs."""
        ...

    def busy(self, key: str) -> bool:
        """Whether planning was started and its answer was not returned yet."""
        ...

    def progress(self, key: str) -> Progress:
        """Progress of a running search."""
        ...

    def cancel(self, key: str) -> None:
        """Cancel planning and discard its answer."""
        ...


@dataclass(slots=True)
class _Running:
    """A process, its output, its error output, and the latest lines of its output."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    error_output: IO[bytes]
    request: PlanningRequest
    began_at: float
    starts: int = 1
    num_read: int = 0
    latest: Line = field(default_factory=lambda: Line(progress=Progress()))

    def read_output(self) -> None:
        """Read the lines written since the last call, by `pread`, since the process shares the file's position."""
        descriptor = self.output.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size - self.num_read, self.num_read)
        whole = text[: text.rfind(b"\n") + 1]
        self.num_read += len(whole)
        for line in _lines(whole):
            self.latest = replace(self.latest, progress=line.progress or self.latest.progress, answer=line.answer)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def close(self, key: str, level: int) -> None:
        """Log its error output."""
        with self.output, self.error_output:
            size = os.fstat(self.error_output.fileno()).st_size
            message = os.pread(self.error_output.fileno(), LOGGED_BYTES, max(size - LOGGED_BYTES, 0))
        if message.strip():
            log.log(level, "planning %s: %s", key, message.decode(errors="replace").strip())


def _lines(text: bytes) -> Iterator[Line]:
    """The lines that can be parsed."""
    for line in text.splitlines():
        try:
            yield Line.from_manifest(json.loads(line))
        except (ValueError, UserError):
            continue


class ProcessPlanner:
    """One process per request, killed after ``seconds``. Its error output is logged at ``level``."""

    def __init__(
        self,
        command: tuple[str, ...] = COMMAND,
        *,
        seconds: float = MOST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        level: int = logging.WARNING,
    ) -> None:
        self._command, self._seconds, self._clock, self._level = command, seconds, clock, level
        self._running: dict[str, _Running] = {}

    def start(self, key: str, request: PlanningRequest) -> None:
        if key not in self._running:
            self._running[key] = self._begun(request)

    def _begun(self, request: PlanningRequest, starts: int = 1) -> _Running:
        output, error_output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115, closed at its end
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(request.to_manifest()).encode())
            stdin.seek(0)
            process = subprocess.Popen(
                self._command, stdin=stdin, stdout=output, stderr=error_output, start_new_session=True
            )
        return _Running(process, output, error_output, request, self._clock(), starts)

    def poll(self, key: str) -> Answer | None:
        """Return the answer, once, or None. Restarts a process that a signal ended, up to `MOST_STARTS` starts."""
        running = self._running[key]
        code = running.process.poll()
        late = self._clock() - running.began_at > self._seconds
        if code is None and not late:
            return None
        if code is None:
            running.end()
        running.read_output()
        del self._running[key]
        running.close(key, self._level)
        answer = running.latest.answer
        if answer is not None and (answer.plan is not None or answer.timeline is not None or answer.what):
            return answer
        if code is None or code >= 0:
            what = f"planning took over {self._seconds:g} s" if code is None else f"planning ended with code {code}"
            return Answer(what=what, remedy=PLAIN if running.request.what_if else SMALLER, is_transient=True)
        message = "planning %s was ended by signal %d, start %d of %d"
        log.log(self._level, message, key, -code, running.starts, MOST_STARTS)
        if running.starts < MOST_STARTS:
            self._running[key] = self._begun(running.request, running.starts + 1)
            return None
        what = f"planning was ended by signal {-code}, {MOST_STARTS} times, which most often is for lack of memory"
        return Answer(what=what, remedy=MORE_MEMORY, is_transient=True)

    def busy(self, key: str) -> bool:
        return key in self._running

    def progress(self, key: str) -> Progress:
        running = self._running[key]
        running.read_output()
        return running.latest.progress or Progress()

    def cancel(self, key: str) -> None:
        """Cancel planning, discard its answer and kill the process."""
        if key in self._running:
            running = self._running.pop(key)
            running.end()
            running.close(key, self._level)
