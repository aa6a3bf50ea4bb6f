"""Fuzzes all code that reads foreign data, for some minutes, each kind in a process under a memory limit.

REST and pages get half of the time. The other half is divided among the kinds of `benchmarks.soak.cases`: ConfigMaps as
operator and service read them, the cluster's objects, schedules, plans and manifests. An input depends only on the seed
and its number. Inputs that cause violations are kept in ``runs/soak``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.cases import KINDS, case
from benchmarks.soak.kills import quiet
from benchmarks.soak.rest import RestFuzz, fuzzed_service, peak_bytes

from tests.support.repository import ROOT

FAILURES = ROOT / "runs" / "soak"
REST_SHARE = 0.5
CASE_SECONDS = 20.0
"""Limit of processor time for one case. Not of elapsed time, since other processes may use the machine."""
PEAK_BYTES = 1200 * 2**20
POLL_SECONDS = 0.1
MOST_VIOLATIONS = 20
START_SECONDS = 120.0

Report = Callable[[str], None]


@dataclass(kw_only=True)
class Reading:
    """Results of one kind of input: cases, violations and memory of the process that read them."""

    cases: int = 0
    peak_bytes: int = 0
    violations: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Results as JSON."""
        return {"cases": self.cases, "peakBytes": self.peak_bytes, "violations": self.violations}


def fuzz(folder: Path, seed: int, seconds: float, report: Report = quiet) -> dict[str, Any]:
    """Fuzz everything. ``violations`` of the result has a sentence for each violation."""
    rest = fuzz_rest(folder / "rest", seed, REST_SHARE * seconds, report)
    results: dict[str, Any] = {"seed": seed, "rest": rest, "readers": {}}
    violations = [f"REST: {violation}" for violation in rest.pop("violations")]
    for kind in KINDS:
        reading = read(kind, seed, folder, seconds=(1 - REST_SHARE) * seconds / len(KINDS))
        report(f"{kind}: {reading.cases} inputs, {len(reading.violations)} violations")
        violations += [f"{kind}: {violation}" for violation in reading.violations]
        results["readers"][kind] = {"cases": reading.cases, "peakBytes": reading.peak_bytes}
    cases = rest["cases"] + sum(reader["cases"] for reader in results["readers"].values())
    return {**results, "cases": cases, "violations": violations}


def fuzz_rest(
    folder: Path, seed: int, seconds: float = 1e9, report: Report = quiet, count: int = sys.maxsize
) -> dict[str, Any]:
    """Fuzz the service alone with `RestFuzz`, for ``seconds`` or ``count`` requests."""
    folder.mkdir(parents=True, exist_ok=True)
    with fuzzed_service(folder) as service:
        fuzzer = RestFuzz(service, seed, keep)
        end = time.monotonic() + seconds
        while time.monotonic() < end and fuzzer.number < count and fuzzer.alive():
            fuzzer.once()
            if len(fuzzer.violations) >= MOST_VIOLATIONS:
                break
            if fuzzer.number % 1000 == 0:
                report(f"REST: {fuzzer.number} requests, {len(fuzzer.violations)} violations")
        return fuzzer.close()


def read(kind: str, seed: int, folder: Path, seconds: float = 1e9, count: int = sys.maxsize) -> Reading:
    """Let processes read inputs of this kind, for ``seconds`` or ``count`` inputs. A process that ends is replaced."""
    reading, end = Reading(), time.monotonic() + seconds
    while time.monotonic() < end and reading.cases < count and len(reading.violations) < MOST_VIOLATIONS:
        _Child(kind, seed, reading, folder).run(end, count)
    return reading


class _Child:
    """A process that reads cases, starting with the first unread one."""

    def __init__(self, kind: str, seed: int, reading: Reading, folder: Path) -> None:
        self._kind, self._seed, self._reading = kind, seed, reading
        folder.mkdir(parents=True, exist_ok=True)
        self._progress, self._output = folder / "progress", folder / "output"
        self._progress.unlink(missing_ok=True)
        self._first = reading.cases

    def run(self, end: float, count: int) -> None:
        """Run until the time ``end``, until all cases are read, or until an input ends the process."""
        command = [sys.executable, "-m", "benchmarks.soak.reading", self._kind, "--seed", str(self._seed)]
        command += ["--first", str(self._first), "--progress", str(self._progress)]
        command += ["--count", str(count - self._first)] if count < sys.maxsize else []
        with self._output.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            self._watch(process, end)
        finally:
            process.kill()
            process.wait()
            self._read_reports()

    def _watch(self, process: subprocess.Popen[bytes], end: float) -> None:
        number, began, start = -1, 0.0, time.monotonic()
        while process.poll() is None:
            self._reading.peak_bytes = max(self._reading.peak_bytes, peak_bytes(process.pid))
            reached, used = self._reached(), _processor_seconds(process.pid)
            if reached != number:
                number, began = reached, used
            if number >= 0 and time.monotonic() >= end:
                self._reading.cases = number
                return
            if number >= 0 and used - began > CASE_SECONDS:
                self._violated(number, f"took more than {CASE_SECONDS:.0f} s of processor time")
                return
            if number < 0 and time.monotonic() - start > START_SECONDS:
                raise TimeoutError(f"what reads {self._kind} does not start: {self._output.read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)
        number = self._reached()
        if process.returncode == 0:
            self._reading.cases = number
        elif number < 0:
            raise RuntimeError(f"what reads {self._kind} does not start: {self._output.read_text()[-2000:]}")
        else:
            said = self._output.read_text(errors="replace")[-500:]
            self._violated(number, f"ended the process with exit code {process.returncode}: {said}")

    def _reached(self) -> int:
        try:
            words = self._progress.read_text().split()
        except FileNotFoundError:
            return -1
        return int(words[0]) if words else -1

    def _violated(self, number: int, what: str) -> None:
        path = keep(f"{self._kind}-{self._seed}-{number}", case(self._kind, self._seed, number))
        self._reading.violations.append(f"input {number} {what} (it is in {path})")
        self._reading.cases = number + 1

    def _read_reports(self) -> None:
        """Read the violations that the process survived, and its memory."""
        cases = self._reading.cases
        for line in self._output.read_text(errors="replace").splitlines():
            try:
                report = json.loads(line)
            except ValueError:
                continue
            self._violated(report["number"], f"raised {report['what']}")
        self._reading.cases = cases
        if self._reading.peak_bytes > PEAK_BYTES:
            peak = self._reading.peak_bytes / 1e6
            self._reading.violations.append(f"the process used {peak:.0f} MB, more than {PEAK_BYTES / 1e6:.0f} MB")


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def keep(name: str, content: bytes) -> Path:
    """Keep an input that caused a violation. Returns its path."""
    FAILURES.mkdir(parents=True, exist_ok=True)
    path = FAILURES / "".join(character if character.isalnum() else "-" for character in name)
    path.write_bytes(content)
    return path.relative_to(ROOT)
