"""A real HTTP server that a webhook calls, which answers as it is told to."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = b"0123456789abcdef0123456789abcdef"
HELD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """One request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """What it says."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    def proves(self, secret: bytes) -> bool:
        """Whether it was signed by who knows the secret, as a receiver would find out."""
        signed = b".".join((self.headers["webhook-id"].encode(), self.headers["webhook-timestamp"].encode(), self.body))
        expected = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
        return hmac.compare_digest(f"v1,{expected}", self.headers["webhook-signature"])


@dataclass
class Receiver:
    """``answers`` are the statuses of the next calls, then 204. While ``holding`` no call is answered."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    location: str = ""
    holding: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Take a call, and answer it."""
        sent = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.calls.append(Call(request.command, request.path, dict(request.headers), sent))
        if self.holding:
            self.released.wait(HELD_SECONDS)
            return
        request.send_response(self.answers.pop(0) if self.answers else 204)
        if self.location:
            request.send_header("Location", self.location)
        request.send_header("Content-Length", "0")
        request.end_headers()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that listens on loopback during the block."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.answer(self)

        def do_GET(self) -> None:
            receiver.answer(self)

        def log_request(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}/ended?of=penstock"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.released.set()
            server.shutdown()
            thread.join()
