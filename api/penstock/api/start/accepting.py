"""Accepts a limited number of connections, so that the process keeps file descriptors for its other work.

asyncio and uvloop accept connections until the process has no descriptor left. Then the executor can neither read its
folder nor start a process, so a client that opens idle connections would stop all jobs. Here a connection is accepted
only while fewer than ``most`` are open. The others wait in the kernel's queue, without a descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

KEPT_DESCRIPTORS = 256
"""Descriptors that are reserved for the database, runs, planners and supervisors, at most half of all."""
PAUSE_SECONDS = 1.0
"""Seconds of pause after a failed accept: the machine may lack descriptors or memory."""


class Connection(asyncio.Protocol):
    """Protocol that calls ``lost`` when its connection is lost."""

    lost: Callable[[], None]

    def shutdown(self) -> None:
        """Close the connection once the request in progress, if any, is answered."""


def most_connections() -> int:
    """Number of connections that this process may have open, by its limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return limit - min(KEPT_DESCRIPTORS, limit // 2)


def bound(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen at every address of ``host``; raises `OSError` if one is taken."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in infos)
    with contextlib.ExitStack() as stack:
        made = []
        for family, address in addresses:
            made.append(stack.enter_context(socket.create_server(address, family=family, backlog=backlog)))
        stack.pop_all()
    return made


class Acceptor:
    """Accepts on ``sockets`` until it is closed, in place of `asyncio.Server`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[], Connection],
        most: int,
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self.sockets, self._protocol, self._most = tuple(sockets), protocol, most
        self._tls, self._handshake_seconds = tls, handshake_seconds
        self._open: set[socket.socket] = set()
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._begun: set[asyncio.Task[None]] = set()
        self._closed = False
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self.sockets]

    def close(self) -> None:
        """Stop accepting. Open connections stay. Those in a TLS handshake are shut down when it ends."""
        self._closed = True
        for task in self._accepting:
            task.cancel()
        for listener in self.sockets:
            listener.close()

    async def wait_closed(self) -> None:
        """Wait until accepting has stopped."""
        await asyncio.gather(*self._accepting, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            await self._has_capacity.wait()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("a connection could not be accepted: %s; retrying in %.1f s", error, PAUSE_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._open.add(connection)
            self._check()
            begun = loop.create_task(self._begin(connection))
            self._begun.add(begun)
            begun.add_done_callback(self._begun.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Hand the connection over to its protocol; close it if the TLS handshake fails."""
        protocol = self._protocol()
        protocol.lost = lambda: self._lose(connection)
        handshake_seconds = self._handshake_seconds if self._tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake_seconds
            )
        except (OSError, asyncio.CancelledError) as error:
            self._lose(connection)
            connection.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        if self._closed:  # the server's shutdown missed this connection, which was not open yet
            protocol.shutdown()

    def _lose(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        self._check()

    def _check(self) -> None:
        if len(self._open) < self._most:
            self._has_capacity.set()
        else:
            self._has_capacity.clear()
