"""The liveness probe, which a thread of its own answers for the life of the process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.core.errors import PenstockError

PATH = "/healthz"
REQUEST_SECONDS = 5.0
"""Longest wait for the request of a connected client; the chart's probes have the same timeout."""

Probe = Callable[[], Mapping[str, float]]


def serve(probe: Probe, port: int) -> Callable[[], None]:
    """Serve `PATH` on this port of all IPv4 addresses; return a function that ends it. Raises OSError if it is taken.

    The answer is 200 with the result of ``probe``, or 503 with the message of its error.
    """
    server = ThreadingHTTPServer(("", port), _handler(probe))
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


def _handler(probe: Probe) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                self._answer(HTTPStatus.OK, {"watches": probe()})
            except PenstockError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"message": str(error)})

        def _answer(self, status: HTTPStatus, document: Mapping[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: probes come every 5 to 20 s."""

    return Handler
