"""A service with few file descriptors, flooded by connections that say nothing: jobs are launched all the same."""

from __future__ import annotations

import resource
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.serving import Served, served, wait_until

FEW = 128
IDLE = 3 * FEW


@contextmanager
def few_descriptors() -> Iterator[None]:
    """What is started meanwhile may open so many files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Flood:
    """Connections to a port; each that was cut off is replaced by the next look."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._port, self._stack = port, stack
        self._open: list[socket.socket] = []

    def fill(self) -> None:
        """Have as many as there are to be; they may still wait for the service to accept them."""
        cut, _, _ = select.select(self._open, [], [], 0)
        for each in cut:
            each.close()
        self._open = [each for each in self._open if each not in cut]
        while len(self._open) < IDLE:
            made = self._stack.enter_context(socket.socket())
            made.setblocking(False)
            made.connect_ex(("127.0.0.1", self._port))
            self._open.append(made)


def launched(service: Served, flood: Flood, name: str) -> bool:
    """By the one connection that was there before the flood."""
    flood.fill()
    events = service.client.get(f"/v1/jobs/default/{name}/events", params={"limit": 1000})
    return any(each["kind"] == "launched" for each in events.json()["items"])


def test_idle_connections_do_not_stop_the_executor(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with few_descriptors():
            service = stack.enter_context(served(tmp_path))
        assert service.client.get("/v1/jobs").status_code == 200
        flood = Flood(service.port, stack)
        flood.fill()
        service.submit("tiny")
        wait_until(lambda: launched(service, flood, "tiny"), 120)
        assert service.client.delete("/v1/jobs/default/tiny").status_code == 202
        process = service.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        said = "".join(process.communicate(timeout=120))
    assert "Too many open files" not in said
