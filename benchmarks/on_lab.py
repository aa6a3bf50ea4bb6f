"""penstock on a new lab, for benchmarks that need a quiet machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import Cluster, of
from tests.support.installed import Installed, installed
from tools.lab import lab

SAMPLE_SECONDS, MOST_CORES = 10.0, 0.5
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)


@contextmanager
def on_lab(name: str, num_nodes: int = 3) -> Iterator[Installed]:
    """Service and operator on a new lab. Ends the program if other processes use this machine."""
    with quiet_lab(name, num_nodes) as cluster, in_processes(cluster) as on:
        yield on


@contextmanager
def in_processes(cluster: Cluster) -> Iterator[Installed]:
    """Service and operator as processes on this machine."""
    with tempfile.TemporaryDirectory() as folder, installed(cluster, Path(folder)) as on:
        yield on


@contextmanager
def quiet_lab(name: str, num_nodes: int = 3) -> Iterator[Cluster]:
    """A new lab. Ends the program if other processes use this machine."""
    cores = busy_cores(SAMPLE_SECONDS)
    if cores >= MOST_CORES:
        sys.exit(f"the machine is busy: {cores:.1f} cores are used, and it has to be less than {MOST_CORES}")
    started_lab = lab.up(lab.Spec(name=name, num_nodes=num_nodes))
    try:
        yield of(started_lab)
    finally:
        lab.down(name)


def busy_cores(seconds: float) -> float:
    """Average number of busy cores over the next ``seconds``. A load average covers the last minutes instead."""
    before = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """Ticks of all processors without idle, I/O-wait and guest ticks: user ticks include guest ticks (proc_stat(5))."""
    ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - sum(ticks[_IDLE])
