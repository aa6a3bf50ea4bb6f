"""The operator as a process of its own, on an apiserver of the test's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes.client import ApiClient
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.host.ports import free_port
from tests.support.fake_apiserver import kubeconfig_of

LISTS = ("images", "claims", "storageClasses", "tolerations", "nodeSelectors")
"""Lists of the policy. Jobs may use everything except the system's objects."""
OWN = (sys.executable, "-m", "penstock.operator")
START_SECONDS, END_SECONDS = 60.0, 60.0


@dataclass(frozen=True, kw_only=True)
class OperatorProcess:
    """A running operator."""

    process: subprocess.Popen[bytes]
    log: Path
    health_port: int
    metrics_port: int

    def is_healthy(self) -> bool:
        """Whether the liveness probe succeeds."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def num_jobs(self) -> int:
        """Number of jobs in the operator's cache; -1 if it serves no metrics."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except (urllib.error.URLError, OSError):
            return -1
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return int(sum(sample.value for sample in families["penstock_operator_jobs"].samples))

    def end(self) -> int:
        """Send SIGTERM, wait and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_SECONDS)


@contextmanager
def operator_process(
    client: ApiClient, folder: Path, command: Sequence[str] = OWN, **environment: str
) -> Iterator[OperatorProcess]:
    """Start the operator, and end it after the block."""
    policy, log = folder / "policy.json", folder / "operator.log"
    policy.write_text(json.dumps({"everywhere": {kind: ["*"] for kind in LISTS}}))
    health_port, metrics_port = free_port(), free_port()
    environ = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig_of(client, folder)),
        "PENSTOCK_POLICY_FILE": str(policy),
        "PENSTOCK_LIVENESS_PORT": str(health_port),
        "PENSTOCK_METRICS_PORT": str(metrics_port),
        **environment,
    }
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    operator = OperatorProcess(process=process, log=log, health_port=health_port, metrics_port=metrics_port)
    try:
        yield operator
    finally:
        if process.poll() is None:
            operator.end()


def wait_for(happened: Callable[[], bool], seconds: float, what: str) -> float:
    """Return the seconds until ``happened``; fails after ``seconds``."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began
