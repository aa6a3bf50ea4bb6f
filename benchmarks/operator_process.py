"""Runs the operator as a process on this machine for benchmarks, and measures its memory and processor time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.operator_cluster import SERVICE_NAMESPACE, Cluster

from penstock.core.host.ports import free_port

POLL_SECONDS = 0.1


LISTS = ("images", "claims", "storageClasses", "tolerations", "nodeSelectors")
"""Lists of the policy. Jobs may use everything except the system's objects."""


@dataclass
class Operator:
    """The operator's process on this machine."""

    process: subprocess.Popen[bytes]

    @classmethod
    @contextlib.contextmanager
    def started(cls, cluster: Cluster) -> Iterator[Operator]:
        """Start the operator and end it after the block."""
        policy = cluster.folder / "policy.json"
        policy.write_text(json.dumps({"everywhere": {name: ["*"] for name in LISTS}}))
        environ = {
            "PENSTOCK_POLICY_FILE": str(policy),
            "PENSTOCK_METRICS_PORT": "0",
            "PENSTOCK_LIVENESS_PORT": str(free_port()),
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig),
            "PENSTOCK_OWN_NAMESPACE": SERVICE_NAMESPACE,
        }
        command = [sys.executable, "-m", "penstock.operator"]
        log = (cluster.folder / "operator.log").open("ab")
        with log, subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True) as process:
            try:
                yield cls(process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)

    def kill(self) -> None:
        """Kill the process without notice, like a lost node."""
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def weighed(self) -> Iterator[list[int]]:
        """Memory in bytes of the process and its planning processes, sampled ten times per second during the block."""
        samples, ended = [self.held_bytes], threading.Event()

        def weigh() -> None:
            while not ended.wait(POLL_SECONDS):
                samples.append(self.held_bytes)

        thread = threading.Thread(target=weigh)
        thread.start()
        try:
            yield samples
        finally:
            ended.set()
            thread.join()

    @property
    def held_bytes(self) -> int:
        """Resident bytes of the process and its planning processes. Shared pages count twice."""
        return sum(_resident_bytes(pid) for pid in (self.process.pid, *_children(self.process.pid)))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the process and of its planning processes."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in path.read_text().split()]
    return children


def _resident_bytes(pid: int) -> int:
    """Resident bytes of a process, 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
