"""A proxy that cuts one connection after a number of packets, and passes everything else on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BYTES = 65_536


class CuttingProxy:
    """Passes connections on to a port of this machine. The answer's packet number ``cut_at`` is cut in half.

    Packets of all connections are counted together, from 1 on.
    """

    def __init__(self, target: int, cut_at: int) -> None:
        self._target, self._cut_at = target, cut_at
        self._lock = threading.Lock()
        self.num_packets = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(BYTES):
                if counts and self._is_cut():
                    sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()

    def _is_cut(self) -> bool:
        with self._lock:
            self.num_packets += 1
            return self.num_packets == self._cut_at


@contextmanager
def cutting_proxy(target: int, cut_at: int) -> Iterator[CuttingProxy]:
    """A proxy for as long as the block lasts."""
    proxy = CuttingProxy(target, cut_at)
    try:
        yield proxy
    finally:
        proxy.close()
