"""`penstock serve` as a process of its own, and what is asked of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.core.host.ports import free_port
from tests.support.command import TEXT, Command

PATIENCE_SECONDS = 400.0


@dataclass
class Served:
    """A service that can be killed and started again, in ``folder``; it keeps what it measures in ``cache``.

    It prints to ``log`` if there is one.
    """

    folder: Path
    port: int
    options: tuple[str | Path, ...]
    cache: Path
    log: Path | None = None
    process: subprocess.Popen[str] | None = None
    client: httpx.Client = field(init=False)

    def start(self) -> None:
        """Start it and wait until it is ready."""
        arguments: list[str | Path] = ["serve", "--folder", self.folder / "data", "--port", str(self.port)]
        (self.folder / "text").mkdir(parents=True, exist_ok=True)
        if not (text := self.folder / "text" / "a.py").exists():  # jobs may read it while the service is started again
            text.write_text(TEXT)
        self.process = self.command.start(
            *arguments, "--data", f"text={self.folder / 'text'}", *self.options, log=self.log
        )
        configuration = self.folder / "config" / "penstock" / "service.json"
        wait_until(lambda: configuration.exists() and self._ready())
        found = json.loads(configuration.read_text())
        bearer = {"Authorization": f"Bearer {found['token']}"}
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=bearer, timeout=30, trust_env=False
        )

    @property
    def command(self) -> Command:
        """`penstock` as somebody runs it who was told of the service."""
        folders = {"XDG_CONFIG_HOME": self.folder / "config", "XDG_CACHE_HOME": self.cache}
        return Command(self.folder, {name: str(folder) for name, folder in folders.items()})

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.process.communicate()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: signal.Signals) -> int:
        """Send it a signal and wait; its exit code."""
        assert self.process is not None
        self.client.close()
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode

    def submit(self, name: str, **spec: Any) -> str:
        """Submit a tiny job that is named so; its uid."""
        answer = self.client.post("/v1/jobs", json=served_job(name, **spec))
        assert answer.status_code == 201, answer.text
        uid: str = answer.json()["metadata"]["uid"]
        return uid

    def status(self, name: str) -> dict[str, Any]:
        """The status of the job with this name."""
        found: dict[str, Any] = self.client.get(f"/v1/jobs/default/{name}").json()["status"]
        return found

    def phases(self, name: str) -> list[str]:
        """The phases that it entered, in order."""
        items = self.client.get(f"/v1/jobs/default/{name}/events", params={"limit": 1000}).json()["items"]
        return [each["body"]["phase"] for each in items if each["kind"] == "phase"]

    def wait_for(self, name: str, phase: str) -> dict[str, Any]:
        """Wait until the job is in that phase; its status then."""
        wait_until(lambda: self.status(name)["phase"] in (phase, "Failed"))
        found = self.status(name)
        assert found["phase"] == phase, found
        return found

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until the job's metrics have come to that step."""
        wait_until(lambda: self.steps_done(self.uid(name)) >= step)

    def uid(self, name: str) -> str:
        """Of the job with this name."""
        found: str = self.client.get(f"/v1/jobs/default/{name}").json()["metadata"]["uid"]
        return found

    def run_dir(self, uid: str) -> Path:
        """Where the job runs."""
        return self.folder / "data" / "runs" / uid

    def steps_done(self, uid: str) -> int:
        """How many lines of metrics there are."""
        path = self.run_dir(uid) / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0


def served_job(name: str, **spec: Any) -> dict[str, Any]:
    """A model that takes milliseconds per step."""
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kvHeads": 1},
            "data": {"source": "data://text", "tokenizer": {"train": "bytes"}, "sequenceLength": 32},
            "training": {"globalBatch": 2, "steps": 60, "optimizer": {"learningRate": 1e-2}},
            "resources": {"ranks": 2, "memoryPerRank": "2Gi"},
            "checkpoint": {"everySteps": 20, "keep": 3},
            **spec,
        },
    }


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until it holds; fails after a while."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@contextmanager
def served(folder: Path, *options: str | Path, cache: Path | None = None, log: Path | None = None) -> Iterator[Served]:
    """A service on a free port, with more options; none of its processes is left after the block.

    One that is given the ``cache`` of another need not measure the machine again.
    """
    service = Served(folder, free_port(), options, cache or folder / "cache", log)
    service.start()
    try:
        yield service
    finally:
        if service.process is not None and service.process.poll() is None:
            service.end(signal.SIGTERM)
        kill_all(folder)


def kill_all(folder: Path) -> None:
    """Send SIGKILL to the `processes_of` the folder; some may end before, because others did."""
    for pid in processes_of(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder, this one left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            named = str(folder) in path.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if named and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
