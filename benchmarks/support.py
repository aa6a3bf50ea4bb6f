"""Shared by all benchmarks: description of the machine, and writing of results."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.cpu_quota import QuotaError

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Description of the processor, its usable cores, memory and Python."""
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {_memory_gib():.0f} GiB, Python {platform.python_version()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def measured_under_quota(measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """The results of ``measure`` in a temporary folder; None, and a line on stderr, if processes cannot be limited."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return measure(Path(folder))
    except QuotaError as missing:
        sys.stderr.write(f"NOT RUN: {missing}\n")
        return None


def write_results(name: str, text: str, table: Callable[[dict[str, Any]], str]) -> None:
    """Write ``results/<name>.json`` and ``.md`` with date and machine, and print the table."""
    results = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine(), **json.loads(text)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    shown = table(results) + f"\nMeasured {results['date']}.\n"
    (RESULTS / f"{name}.md").write_text(shown)
    print(shown)
