"""Sends a load's reports through a connection per job, each again until it is acknowledged."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.support.away import Shared
from tests.support.load import Load, bodies

AGAIN_SECONDS = 0.2
AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Sent:
    """A report: sent first, and acknowledged, in seconds of the monotonic clock; ``late`` is how long after its due."""

    job: int
    report: int
    late: float
    began: float
    ended: float
    tries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """All that was sent, and the processor time that it took."""

    sent: list[Sent]
    processor_seconds: float


def send(shared: Shared, load: Load, ports: Sequence[int], token: str) -> Sending:
    """Open a connection for each job, and then send the load; a job keeps to one of the services.

    For a process of its own: sets ``sending`` once all are open, and counts what was ``acknowledged``.
    """
    return asyncio.run(_send(shared, load, ports, token, list(bodies(load))))


async def _send(shared: Shared, load: Load, ports: Sequence[int], token: str, bodies: list[list[bytes]]) -> Sending:
    gate = asyncio.Semaphore(AT_ONCE)
    senders = [_Sender(ports[job % len(ports)], token) for job in range(load.num_jobs)]

    async def opened(sender: _Sender) -> None:
        async with gate:
            await sender.open()

    await asyncio.gather(*map(opened, senders))
    shared["sending"] = 1
    start = time.monotonic()
    before = _processor_seconds()

    async def of_job(job: int) -> list[Sent]:
        found = []
        for report in range(load.num_reports):
            due = start + load.due(job, report)
            await asyncio.sleep(due - time.monotonic())
            began = time.monotonic()
            tries = await senders[job].deliver(bodies[report][job])
            shared["acknowledged"] += 1
            found.append(Sent(job, report, began - due, began, time.monotonic(), tries))
        return found

    found = await asyncio.gather(*(of_job(job) for job in range(load.num_jobs)))
    return Sending(sent=[each for some in found for each in some], processor_seconds=_processor_seconds() - before)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Sender:
    """One connection that is kept open, and opened again once it broke."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._head = (
            f"POST /v1/ingest HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: "
        ).encode()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Connect."""
        self._connection = await asyncio.open_connection("127.0.0.1", self._port)

    async def deliver(self, body: bytes) -> int:
        """Send it until it is acknowledged; how often it was sent."""
        tries = 1
        while not await self._once(body):
            tries += 1
            await asyncio.sleep(AGAIN_SECONDS)
        return tries

    async def _once(self, body: bytes) -> bool:
        try:
            if self._connection is None:
                await self.open()
            assert self._connection is not None
            reader, writer = self._connection
            writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            text = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self._close()
            return False
        status = int(head[9:12])
        assert status == 200 or status >= 500, text
        return status == 200

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection[1].close()
        self._connection = None
