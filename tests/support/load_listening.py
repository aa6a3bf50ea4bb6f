"""Listens to many live streams at once, and notes when it heard how far which job is; one listener reads nothing."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.away import Shared
from tests.support.load import NUM_TEAMS

ROW = re.compile(rb'"uid":"[-0-9]{24}(\d{12})".*?"progress":\{"step":(\d+)')
AT_ONCE = 50
LOOK_SECONDS = 0.1
CHUNK_BYTES = 2**16
DROPPED_WITHIN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What one stream told: which job had done how many steps, and when that was heard (monotonic clock)."""

    of_list: bool
    jobs: array[int] = field(default_factory=lambda: array("l"))
    steps: array[int] = field(default_factory=lambda: array("l"))
    at: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hearing:
    """All streams, those that ended too early, whether the slow reader was dropped, and the processor time taken."""

    heard: list[Heard]
    num_ended: int
    slow_dropped: bool
    slow_bytes: int
    processor_seconds: float


def paths(num_jobs: int, num_of_jobs: int, num_of_lists: int) -> list[str]:
    """Streams of the first jobs' events, and of lists: half of all jobs, half of a team."""
    of_jobs = [f"/v1/jobs/default/job-{job % num_jobs}/events" for job in range(num_of_jobs)]
    of_lists = [f"/v1/events?label=team%3Dt{i % NUM_TEAMS}" if i % 2 else "/v1/events" for i in range(num_of_lists)]
    return of_jobs + of_lists


def listen(shared: Shared, wanted: Sequence[str], ports: Sequence[int], token: str, slow: bool) -> Hearing:
    """Hear these streams, which are spread over the services.

    For a process of its own: sets ``listening`` once all streams are open, and hears them until the moment ``end``.
    """
    return asyncio.run(_listen(shared, wanted, ports, token, slow))


async def _listen(shared: Shared, wanted: Sequence[str], ports: Sequence[int], token: str, slow: bool) -> Hearing:
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(AT_ONCE)

    async def opened(number: int, path: str) -> _Ear:
        async with gate:
            ear = _Ear(_request(path, token), Heard(of_list=path.startswith("/v1/events")))
            await loop.create_connection(lambda: ear, "127.0.0.1", ports[number % len(ports)])
            return ear

    deaf = _deaf("/v1/events", ports[0], token) if slow else None
    ears = await asyncio.gather(*(opened(number, path) for number, path in enumerate(wanted)))
    before = _processor_seconds()
    shared["listening"] = 1
    while not 0 < shared["end"] <= time.monotonic():
        await asyncio.sleep(LOOK_SECONDS)
    taken = _processor_seconds() - before
    ended = sum(ear.ended for ear in ears)
    slow_bytes, slow_dropped = await asyncio.to_thread(_drain, deaf) if deaf else (0, False)
    for ear in ears:
        ear.close()
    return Hearing(
        heard=[ear.heard for ear in ears],
        num_ended=ended,
        slow_dropped=slow_dropped,
        slow_bytes=slow_bytes,
        processor_seconds=taken,
    )


def _request(path: str, token: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nAccept: text/event-stream\r\n\r\n"
    ).encode()


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Ear(asyncio.Protocol):
    """Hears one stream."""

    def __init__(self, request: bytes, heard: Heard) -> None:
        self._request, self._rest = request, b""
        self._transport: asyncio.Transport | None = None
        self.heard, self.ended = heard, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        complete, end, self._rest = (self._rest + data).rpartition(b"\n\n")
        for found in ROW.finditer(complete + end):
            self.heard.jobs.append(int(found[1]))
            self.heard.steps.append(int(found[2]))
            self.heard.at.append(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


def _deaf(path: str, port: int, token: str) -> socket.socket:
    """A listener with little room, which reads nothing."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    found.sendall(_request(path, token))
    return found


def _drain(deaf: socket.socket) -> tuple[int, bool]:
    """Read what is left in the system's buffers; how much, and whether the service had closed the connection."""
    deaf.settimeout(DROPPED_WITHIN_SECONDS)
    got = 0
    end = time.monotonic() + DROPPED_WITHIN_SECONDS
    with deaf, suppress(TimeoutError):
        while time.monotonic() < end:
            try:
                text = deaf.recv(CHUNK_BYTES)
            except ConnectionError:
                return got, True
            if not text:
                return got, True
            got += len(text)
    return got, False
