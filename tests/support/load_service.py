"""A service without an executor as a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from penstock.api.service import open_service
from penstock.api.settings import Settings
from penstock.api.start.server import Server, collect_garbage_seldom
from penstock.core.host.ports import free_port
from tests.support.load import Target
from tests.support.repository import ROOT

PATIENCE_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def run(folder: str, database: str, port: str) -> None:
    """What the process does."""
    service = open_service(Settings(folder=Path(folder), database=database, port=int(port)))
    server = Server(service)
    collect_garbage_seldom()
    server.run()
    service.close()


@dataclass
class LoneService:
    """The process, on a port of its own."""

    target: Target
    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        arguments = [str(self.target.folder), self.target.database, str(self.port)]
        command = [sys.executable, "-m", "tests.support.load_service", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT)
        end = time.monotonic() + PATIENCE_SECONDS
        while not self._ready():
            assert self.process.poll() is None, "the service ended"
            assert time.monotonic() < end, "the service does not answer"
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal, and wait."""
        self.process.send_signal(number)
        self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.end()

    def processor_seconds(self) -> float:
        """What it has taken of the processors so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_bytes(self, which: str = "VmRSS") -> int:
        """What is resident; ``VmHWM``: was at most."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(which)


@contextmanager
def lone_services(target: Target, count: int = 1) -> Iterator[list[LoneService]]:
    """So many services on one database; none is left after the block."""
    with ExitStack() as ends:
        made = []
        for _ in range(count):
            service = LoneService(target, free_port())
            service.start()
            ends.callback(service.close)
            made.append(service)
        yield made


if __name__ == "__main__":
    run(*sys.argv[1:])
