"""Check whether a port of this machine is free, before anything starts, without loading PyTorch."""

from __future__ import annotations

from penstock.core.errors import UserError
from penstock.core.host.ports import LOOPBACK, listen_error


def check_port(port: int | None, option: str = "--metrics-port") -> None:
    """Raise `UserError` if ``port``, given by that option, is taken."""
    if port is not None and (problem := listen_error(port, LOOPBACK)):
        raise UserError(
            what=f"port {port} cannot be used: {problem}",
            where=option,
            remedy=f"ss -ltnp 'sport = :{port}' shows the process; choose another port, or leave the option out",
        )
