"""The web server around one service."""

from __future__ import annotations

import socket
import sys

import uvicorn

from penstock.api.app import create_app
from penstock.api.service import Service

KEEP_ALIVE_SECONDS = 75
"""Longer than jobs are silent: who reports every few seconds should not have to connect each time."""


SWITCH_SECONDS = 0.0005
"""After which a thread has to let another run Python. With the usual 5 ms the writer, which lets go of the interpreter
at every statement, waits longer to get it back than it works."""


class Server(uvicorn.Server):
    """Ends live streams when it is to end, or it would wait for them."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=settings.host,
                port=settings.port,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._feed = service.feed
        sys.setswitchinterval(SWITCH_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.shutdown`."""
        self._feed.close()
        await super().shutdown(sockets)
