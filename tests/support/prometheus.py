"""A real Prometheus for tests, on loopback: from the PATH, else Debian's package unpacked without its service, else
its release; what was fetched stays in a cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.core.host.ports import free_port
from tests.support.not_run import missing

NAME = "prometheus"
PROGRAMS = ("prometheus", "promtool")
VERSION = "2.53.2"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
FETCH_SECONDS = 120
START_SECONDS = 30.0
PATIENCE_SECONDS = 60.0


def programs() -> Path:
    """The folder of prometheus and promtool; skips, loudly, where they cannot be had."""
    if all(map(shutil.which, PROGRAMS)):
        return Path(str(shutil.which(NAME))).parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "programs" / NAME
    if not _complete(cache):
        for fetch in (_debian, _release):
            with contextlib.suppress(OSError, subprocess.SubprocessError, tarfile.TarError):
                _keep(fetch, cache)
                break
    if not _complete(cache):
        missing(NAME, "Prometheus is missing: apt install prometheus, or put its release into the PATH")
    return cache


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in PROGRAMS)


def _keep(fetch: Callable[[Path], Path], cache: Path) -> None:
    """The programs appear in the cache together or not at all, even if other processes fetch them meanwhile."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        found, partial = fetch(Path(scratch)), Path(scratch) / "programs"
        partial.mkdir()
        for name in PROGRAMS:
            shutil.copy2(found / name, partial / name)
        with contextlib.suppress(OSError):  # another test run was quicker
            partial.rename(cache)


def _debian(scratch: Path) -> Path:
    quiet: dict[str, Any] = {"check": True, "cwd": scratch, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["apt-get", "download", "prometheus"], timeout=FETCH_SECONDS, **quiet)
    (package,) = scratch.glob("prometheus_*.deb")
    subprocess.run(["dpkg", "-x", package, scratch / "unpacked"], **quiet)
    return scratch / "unpacked" / "usr" / "bin"


def _release(scratch: Path) -> Path:
    name = f"prometheus-{VERSION}.linux-{MACHINES.get(platform.machine(), platform.machine())}"
    base = f"https://github.com/prometheus/prometheus/releases/download/v{VERSION}"
    sums = {line.split()[1]: line.split()[0] for line in _read(f"{base}/sha256sums.txt").decode().splitlines()}
    archive = _read(f"{base}/{name}.tar.gz")
    if hashlib.sha256(archive).hexdigest() != sums.get(f"{name}.tar.gz"):
        raise OSError(f"{name} is not what was released")
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(scratch, filter="data")
    return scratch / name


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
        content: bytes = answer.read()
    return content


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query finds: samples, each with its ``metric`` and ``value``."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", (expression, answer)
        found = answer["data"]
        return found["result"] if found["resultType"] == "vector" else [{"metric": {}, "value": found["result"]}]

    def samples(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there is something: a busy machine may miss a scrape, after which nothing is there."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (samples := self.query(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.1)
        return samples

    def get(self, path: str) -> Any:
        """What its API has at a path."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


@contextmanager
def server(folder: Path, configuration: Path) -> Iterator[Prometheus]:
    """Runs during the block, by ``configuration``, and keeps what it measures in ``folder``."""
    port = free_port()
    arguments: list[str | Path] = [
        programs() / NAME,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'measured'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("w") as file, subprocess.Popen(arguments, stdout=file, stderr=file) as process:
        try:
            found = Prometheus(f"http://127.0.0.1:{port}")
            _wait(found, process, log)
            yield found
        finally:
            process.terminate()


def _wait(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{found.url}/-/ready", trust_env=False).status_code == 200:
                return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
