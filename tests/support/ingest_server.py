"""A real HTTP server on a free port of this machine; what it answers is the test's to say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What came; names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


Answer = Callable[[Request], tuple[int, bytes]]


class IngestServer:
    """Answers posts by ``answer``, a status and a body, in threads of its own; status 0 closes the connection."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answer, self.requests))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(answer: Answer, requests: list[Request]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            headers = {name.lower(): value for name, value in self.headers.items()}
            requests.append(Request(path=self.path, headers=headers, body=self.rfile.read(length)))
            status, body = answer(requests[-1])
            if status == 0:
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler
