"""An HTTP server on the loopback that answers as a test says, piece by piece: what an apiserver does to a line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import ApiClient, Configuration


@dataclass(frozen=True, kw_only=True)
class ReceivedRequest:
    """A request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    text: bytes = b""


@dataclass
class Answer:
    """What follows. ``pieces`` are chunks of a stream, or seconds of silence; after them the line is cut if ``cut``."""

    status: int = 200
    body: Any = None
    pieces: tuple[bytes | float, ...] = ()
    cut: bool = False


@dataclass
class Loopback:
    """A server's answers, in order, and what it was asked."""

    answers: list[Answer] = field(default_factory=list)
    asked: list[ReceivedRequest] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def client(self) -> ApiClient:
        """The official client, for this server."""
        configuration = Configuration()
        configuration.host = self.url
        configuration.api_key["BearerToken"] = "bearer secret"
        return ApiClient(configuration)


def _handler(loopback: Loopback) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are sent apart, and the client would acknowledge 40 ms later

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, http.server's name
            """Nobody reads it."""

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            url = urlsplit(self.path)
            asked = ReceivedRequest(
                method=self.command,
                path=url.path,
                query=dict(parse_qsl(url.query)),
                headers={name.lower(): value for name, value in self.headers.items()},
                body=json.loads(body) if body else None,
                text=body,
            )
            loopback.asked.append(asked)
            self.answer(loopback.answers.pop(0))

        do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815, http.server's names

        def answer(self, answer: Answer) -> None:
            self.send_response(answer.status)
            if answer.pieces:
                self.stream(answer)
                return
            text = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_header("Content-Length", str(len(text) + 10 * answer.cut))
            self.end_headers()
            self.wfile.write(text)
            self.close_connection = answer.cut

        def stream(self, answer: Answer) -> None:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in answer.pieces:
                if isinstance(piece, float):
                    loopback.over.wait(piece)
                else:
                    self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    self.wfile.flush()
            self.close_connection = answer.cut
            if not answer.cut:
                self.wfile.write(b"0\r\n\r\n")

    return Handler


@contextmanager
def loopback(*answers: Answer) -> Iterator[Loopback]:
    """A server with these answers."""
    told = Loopback(answers=list(answers))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(told))
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield told
    finally:
        told.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
