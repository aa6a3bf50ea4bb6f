"""A bounded GET request to the agent in a pod.

The other end is not trusted. The whole call takes `SECONDS` at most, however slowly the answer arrives, and reads at
most a mebibyte and the head of the answer. It goes only to the numeric address of a pod: names are not looked up,
redirects are not followed, and proxies of the environment are not used. HTTP libraries limit the time of each read and
not of the whole call, so the bytes are read here and parsed as HTTP afterwards.
"""

from __future__ import annotations

import io
import ipaddress
import os
import socket
import time
from http.client import HTTPException, HTTPResponse
from typing import cast

from penstock.core.errors import PenstockError
from penstock.core.pod import AGENT_PORT, MOST_AGENT_BYTES

SECONDS = 5.0
MOST_HEAD_BYTES = 16 * 2**10
_PIECE_BYTES = 64 * 2**10


class AgentError(PenstockError):
    """The agent of a pod gave no answer that can be used."""


def fetch(address: str, name: str, port: int = AGENT_PORT, seconds: float = SECONDS) -> bytes:
    """Return the document of that name from the agent at the address; raises `AgentError`."""
    ends_at = time.monotonic() + seconds
    request = f"GET /{name} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((address, port), timeout=seconds) as line:
            line.settimeout(_left(ends_at))
            line.sendall(request.encode())
            answer = _received(line, ends_at)
    except TimeoutError:
        raise AgentError(f"gave no complete answer within {seconds:.0f} s") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise AgentError(f"cannot be reached at port {port}: {reason}") from None
    return _body(answer)


def require_pod_address(address: str) -> None:
    """Raise `AgentError` for an address that no pod has: loopback, link-local, multicast or unspecified."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise AgentError(f"has no valid address: {address[:64]!r}") from None
    if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        raise AgentError(f"has the address {address}, which is loopback, link-local, multicast or unspecified")


def _left(ends_at: float) -> float:
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _received(line: socket.socket, ends_at: float) -> bytes:
    """Read until the other end closes."""
    most = MOST_AGENT_BYTES + MOST_HEAD_BYTES
    answer = bytearray()
    while True:
        line.settimeout(_left(ends_at))
        piece = line.recv(_PIECE_BYTES)
        if not piece:
            return bytes(answer)
        answer += piece
        if len(answer) > most:
            raise AgentError(f"answered with more than {MOST_AGENT_BYTES:,} bytes")


class _Line:
    """The stream that `HTTPResponse` reads."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def makefile(self, mode: str) -> io.BytesIO:
        """The whole answer, as a file."""
        return io.BytesIO(self._text)


def _body(answer: bytes) -> bytes:
    response = HTTPResponse(cast(socket.socket, _Line(answer)), method="GET")
    try:
        response.begin()
        body = response.read()
    except (HTTPException, ValueError, OSError) as error:
        raise AgentError(f"answered with something that is not HTTP: {str(error)[:200] or repr(error)[:200]}") from None
    if response.status != 200:
        raise AgentError(f"answered with HTTP status {response.status}")
    if len(body) > MOST_AGENT_BYTES:
        raise AgentError(f"answered with more than {MOST_AGENT_BYTES:,} bytes")
    return body
