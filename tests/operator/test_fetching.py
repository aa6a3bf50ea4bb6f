"""A pod's answer is bounded in time and size, and comes from that pod alone; what it is beyond that is reported."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.core.pod import MOST_AGENT_BYTES
from penstock.operator.agents import fetch_from_pod
from penstock.operator.fetching import AgentError, fetch, require_pod_address

LOOPBACK = "127.0.0.1"
QUICK_SECONDS, SLACK_SECONDS = 0.5, 10.0
OK = b"HTTP/1.0 200 OK\r\n"
Answer = Callable[[socket.socket, threading.Event], None]


@contextmanager
def serving(answer: Answer) -> Iterator[int]:
    """A server that answers every connection so; its port."""
    over = threading.Event()
    server = socket.create_server((LOOPBACK, 0))

    def serve() -> None:
        while not over.is_set():
            try:
                line, _ = server.accept()
            except OSError:
                return
            with line:
                line.recv(4096)
                with suppress(OSError):
                    answer(line, over)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def said(text: bytes) -> Answer:
    def answer(line: socket.socket, over: threading.Event) -> None:
        line.sendall(text)

    return answer


def trickled(head: bytes) -> Answer:
    """A byte now and then: no single read takes long."""

    def answer(line: socket.socket, over: threading.Event) -> None:
        line.sendall(head)
        while not over.wait(0.02):
            line.sendall(b"x")

    return answer


def test_an_answer() -> None:
    with serving(said(OK + b"Content-Length: 3\r\n\r\nyes")) as port:
        assert fetch(LOOPBACK, "name", port) == b"yes"


@pytest.mark.parametrize("head", [b"", OK, OK + b"X: ", OK + b"\r\n", OK + b"Content-Length: 1000000\r\n\r\n"])
def test_one_that_trickles_is_left(head: bytes) -> None:
    """Wherever it does: in the status, in the headers, in the body."""
    begin = time.monotonic()
    with serving(trickled(head)) as port, pytest.raises(AgentError, match=r"no complete answer within 0 s"):
        fetch(LOOPBACK, "name", port, seconds=QUICK_SECONDS)
    assert time.monotonic() - begin < SLACK_SECONDS


def test_one_that_says_nothing_is_left() -> None:
    def silent(line: socket.socket, over: threading.Event) -> None:
        over.wait(SLACK_SECONDS)

    with serving(silent) as port, pytest.raises(AgentError, match="no complete answer"):
        fetch(LOOPBACK, "name", port, seconds=QUICK_SECONDS)


@pytest.mark.parametrize("head", [b"", OK, OK + b"\r\n", OK + b"Content-Length: 9999999\r\n\r\n"])
def test_one_without_end_is_left(head: bytes) -> None:
    def endless(line: socket.socket, over: threading.Event) -> None:
        line.sendall(head)
        while not over.is_set():
            line.sendall(b"x" * 65_536)

    with serving(endless) as port, pytest.raises(AgentError, match=f"more than {MOST_AGENT_BYTES:,} bytes"):
        fetch(LOOPBACK, "name", port)


def test_the_largest_answer_and_one_beyond_it() -> None:
    with serving(said(OK + b"\r\n" + b"x" * MOST_AGENT_BYTES)) as port:
        assert len(fetch(LOOPBACK, "name", port)) == MOST_AGENT_BYTES
    with serving(said(OK + b"\r\n" + b"x" * (MOST_AGENT_BYTES + 1))) as port, pytest.raises(AgentError, match="more"):
        fetch(LOOPBACK, "name", port)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    visited: list[int] = []

    def elsewhere(line: socket.socket, over: threading.Event) -> None:
        visited.append(1)
        line.sendall(OK + b"\r\nsecret")

    with serving(elsewhere) as other:
        text = f"HTTP/1.0 {status} Moved\r\nLocation: http://{LOOPBACK}:{other}/name\r\n\r\n"
        with serving(said(text.encode())) as port, pytest.raises(AgentError, match=f"HTTP status {status}"):
            fetch(LOOPBACK, "name", port)
    assert visited == []


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(said(OK + b"\r\nyes")) as port:
        assert fetch(LOOPBACK, "name", port) == b"yes"


GARBAGE = {
    "nothing": b"",
    "bytes": b"\x00\xff" * 50,
    "no status": b"HTTP/1.0\r\n\r\n",
    "a status that is no number": b"HTTP/1.0 abc x\r\n\r\n",
    "another protocol": b"SSH-2.0-x\r\n",
    "many headers": OK + b"X: y\r\n" * 200 + b"\r\n",
    "chunks that are none": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "cut short": OK + b"Content-Length: 9\r\n\r\nx",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_reported(name: str) -> None:
    with serving(said(GARBAGE[name])) as port, pytest.raises(AgentError):
        fetch(LOOPBACK, "name", port)


def test_a_refused_connection_is_reported() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(AgentError, match=f"cannot be reached at port {port}: Connection refused"):
        fetch(LOOPBACK, "name", port)


@pytest.mark.parametrize(
    "address", ["", "name", "127.0.0.1", "::1", "169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0"]
)
def test_what_no_pod_has_as_its_address_is_not_asked(address: str) -> None:
    with pytest.raises(AgentError, match="address"):
        fetch_from_pod(address, "name")


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.3.4", "198.19.68.29", "100.64.0.7", "fd00::7", "2001:db8::1"])
def test_addresses_of_pods_are(address: str) -> None:
    require_pod_address(address)
