"""Live streams as a client hears them: over HTTP from a real server, and straight from a feed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Message

from penstock.api.auth.identity import Identity, Role
from penstock.api.live.feed import Feed
from penstock.api.live.listeners import Listener
from penstock.api.live.stream import EventStream
from penstock.api.service import Service
from penstock.api.start.server import Server
from penstock.api.store import tokens

PATIENCE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Heard:
    """One Server-Sent Event."""

    kind: str
    data: Any
    id: str | None = None


def parse(lines: Iterable[str]) -> Iterator[Heard]:
    """The events in the lines of a stream; see the HTML standard, 9.2.6."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Heard(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


@contextmanager
def answering(service: Service, port: int = 0) -> Iterator[str]:
    """The URL of a real server of the service, which runs in a thread during the block; on a free port unless named."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()  # who comes before the server is up waits
        server = Server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"{'https' if service.settings.tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def bearer(service: Service, role: Role = Role.VIEWER, namespace: str | None = None) -> dict[str, str]:
    """Headers of somebody with that role."""
    who = Identity(name=f"a-{role}", role=role, namespace=namespace)
    _, secret = service.write("tokens", lambda connection: tokens.add(connection, who, service.clock()))
    return {"Authorization": f"Bearer {secret}"}


@contextmanager
def stream(url: str, path: str, headers: dict[str, str], **query: Any) -> Iterator[Iterator[Heard]]:
    """What a client hears at that path."""
    wanted = {**headers, "Accept": "text/event-stream"}
    options: dict[str, Any] = {"headers": wanted, "params": query, "timeout": PATIENCE_SECONDS}
    with httpx.Client(trust_env=False) as client, client.stream("GET", url + path, **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parse(answer.iter_lines())


@dataclass
class Ear:
    """Takes what an `EventStream` sends; as long as ``deaf``, sending waits."""

    deaf: bool = False
    heard: list[Heard] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.body":
            if self.deaf:
                await asyncio.Event().wait()
            self.raw.append(message["body"])
            self.heard += parse(message["body"].decode().split("\n"))
            self.ended = not message["more_body"]
            self._news.set()

    async def receive(self) -> Message:
        """See ASGI: the client leaves when asked to."""
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def until(self, count: int, kind: str = "job") -> list[Heard]:
        """Wait for so many messages of a kind; all of them."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := self.of(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return found

    def of(self, kind: str) -> list[Heard]:
        """What was heard of a kind so far."""
        return [each for each in self.heard if each.kind == kind]


@asynccontextmanager
async def ear(feed: Feed, listener: Listener, most_seconds: float = 60, *, deaf: bool = False) -> AsyncIterator[Ear]:
    """Somebody who listens during the block."""
    hearing = Ear(deaf=deaf)
    sending = asyncio.create_task(EventStream(feed, listener, most_seconds)({}, hearing.receive, hearing.send))
    try:
        if not deaf:
            await hearing.until(1, "hello")
        yield hearing
    finally:
        hearing.leave()
        await asyncio.wait_for(sending, PATIENCE_SECONDS)
