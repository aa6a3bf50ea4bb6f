"""The operator as a process of this machine, as benchmarks start it, and what it costs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.operator_cluster import SERVICE_NAMESPACE, Cluster


@dataclass
class Operator:
    """The operator's process on this machine."""

    process: subprocess.Popen[bytes]

    @classmethod
    @contextlib.contextmanager
    def started(cls, cluster: Cluster) -> Iterator[Operator]:
        """Start it, and end it after the block."""
        environ = {
            "PENSTOCK_METRICS_PORT": "0",
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig),
            "PENSTOCK_OWN_NAMESPACE": SERVICE_NAMESPACE,
        }
        command = [sys.executable, "-m", "kopf", "run", "-A", "-m", "penstock.operator.handlers"]
        log = (cluster.folder / "operator.log").open("ab")
        with log, subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True) as process:
            try:
                yield cls(process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)

    def kill(self) -> None:
        """As a node that vanishes would."""
        self.process.kill()
        self.process.wait()

    @property
    def peak_bytes(self) -> int:
        """Most memory of the process, and of what plans for it now."""
        return sum(_status_bytes(pid, "VmHWM") for pid in (self.process.pid, *_children(self.process.pid)))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the process and of what planned for it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def _status_bytes(pid: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
