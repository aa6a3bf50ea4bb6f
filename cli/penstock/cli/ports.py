"""Check whether a port of this machine is free, before anything starts, without loading PyTorch."""

from __future__ import annotations

import socket

from penstock.core.errors import UserError

LOOPBACK = "127.0.0.1"


def check_port(port: int | None, option: str = "--metrics-port") -> None:
    """Raise `UserError` if ``port``, given by that option, is taken."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UserError(
                what=f"port {port} cannot be used: {error.strerror}",
                where=option,
                remedy=f"ss -ltnp 'sport = :{port}' shows the process; choose another port, or leave the option out",
            ) from None
