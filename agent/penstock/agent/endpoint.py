"""Agent of a pod: an HTTP server for two small files, the attempt's report and its measurement.

A job cannot continue without its measurement, and a new attempt needs to know the newest checkpoint. Records deliver
the measurement, and the checkpoint's step and attempt, to the service, but the service and its node may be down. So the
operator also fetches them from the pod (docs/adr/0030). The supervisor writes the files to the pod's own disk, and the
agent serves them from the reporting container. The path of a request is the agent's only input, and the two file names
are its only valid values. The agent serves `MOST_CONNECTIONS` connections at a time, each for `SECONDS` at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from penstock.agent.pod_files import PodFolders
from penstock.agent.progress_files import newest_checkpoint
from penstock.core.packing import pack
from penstock.core.pod import (
    AGENT_MEASUREMENT,
    AGENT_PORT,
    AGENT_REPORT,
    MOST_AGENT_BYTES,
    AgentReport,
    CheckpointName,
)
from penstock.core.profile import Profile
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import writing
from penstock.core.supervision import AttemptReport

SECONDS = 5.0
MOST_CONNECTIONS = 4


class AgentFiles:
    """Writes the files that a pod's agent serves; ``run`` is the run directory with the job's checkpoints.

    A failed write is ignored: training continues, and records deliver the same content to the service.
    """

    def __init__(self, folders: PodFolders, job_uid: str, run: RunDir) -> None:
        self._folder, self._run = folders.served, run
        self._pod_uid, self._job_uid, self._attempt = folders.uid, job_uid, folders.attempt
        self._measurement = ""
        self._report: AgentReport | None = None
        self._checkpoint: tuple[int | None, CheckpointName | None] = (None, None)

    def measured(self, profile: Profile) -> None:
        """Write the measurement, and keep its digest for the next report."""
        content = pack(profile.to_manifest())
        if self._put(AGENT_MEASUREMENT, content):
            self._measurement = hashlib.sha256(content).hexdigest()

    def update(self, report: AttemptReport) -> None:
        """Write the report, if it has changed."""
        served = AgentReport(
            pod_uid=self._pod_uid,
            job_uid=self._job_uid,
            attempt=self._attempt,
            state=report.state,
            profile=report.profile,
            done=report.done,
            total=report.total,
            measurement=self._measurement,
            checkpoint=self._newest(report.last_checkpoint),
        )
        if served != self._report and self._put(AGENT_REPORT, pack(served.to_manifest())):
            self._report = served

    def _newest(self, step: int | None) -> CheckpointName | None:
        """Return the newest checkpoint. The run directory is read only if ``step`` has changed."""
        if step != self._checkpoint[0]:
            newest = newest_checkpoint(self._run)
            name = CheckpointName(step=newest[0], attempt=newest[1]) if newest is not None else None
            self._checkpoint = (step, name)
        return self._checkpoint[1]

    def _put(self, name: str, content: bytes) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(self._folder / name, durable=False) as file:
                file.write(content)
        except OSError:
            return False
        return True


@contextmanager
def serving(
    folder: Path, address: str, say: Callable[[str], None], port: int = AGENT_PORT
) -> Iterator[tuple[str, int] | None]:
    """Serve the files in ``folder`` at the pod's address during the block, and yield the address.

    Yields none, and serves nothing, if the pod has no address or cannot listen at it.
    """
    try:
        server = _Server(folder, address, port) if address else None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        say(f"cannot serve measurements at {address} port {port}: {reason}; records still deliver them to the service")
        server = None
    if server is None:
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="agent")
    thread.start()
    try:
        yield server.server_address[:2]  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Answers GET requests for the two files, at most `MOST_CONNECTIONS` at once; further ones wait."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, address: str, port: int) -> None:
        self.folder = folder
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Wait until fewer than `MOST_CONNECTIONS` are being served; each takes `SECONDS` at most."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request, then admit the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early."""

    def content(self, name: str) -> bytes | None:
        """Return the content of a file, at most one byte more than the size limit; none if there is no such file."""
        if name not in (AGENT_REPORT, AGENT_MEASUREMENT):
            return None
        try:
            with (self.folder / name).open("rb") as file:
                return file.read(MOST_AGENT_BYTES + 1)
        except OSError:
            return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "penstock", ""
    timeout = SECONDS

    def setup(self) -> None:
        """Limit the duration of the connection. `timeout` limits each read, and restarts with each received byte."""
        super().setup()
        self._cut = threading.Timer(SECONDS, self._end)
        self._cut.daemon = True
        self._cut.start()

    def finish(self) -> None:
        """Cancel the time limit."""
        self._cut.cancel()
        super().finish()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer with the file."""
        content = self.server.content(self.path.removeprefix("/"))
        if content is None:
            self.send_error(404)
        elif len(content) > MOST_AGENT_BYTES:
            self.send_error(413)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "application/gzip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name of http.server
        """Log nothing: the operator sends a request every few seconds."""
