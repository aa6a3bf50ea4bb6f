"""Malformed requests of every route in `docs/openapi.json`, made from a seed: path, query, headers and body.

A request is raw bytes, sent over a separate connection, so that it may contain what a client library would refuse.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.api.schemas.bodies import EXAMPLE_CLUSTER, EXAMPLE_JOB
from penstock.core.serialization import yamltext
from tests.support import mutating
from tests.support.manifests import FULL
from tests.support.repository import ROOT

OPENAPI = ROOT / "docs" / "openapi.json"
PAGES = ("/", "/jobs/{namespace}/{name}", "/compare", "/submit", "/whatif", "/plans/{request}", "/profiles",
         "/profiles/{digest}", "/static/{path}")  # fmt: skip
MOST_ANSWER_BYTES = 2**16
STREAM_SECONDS = 0.3
HEADERS = ("If-Match", "Idempotency-Key", "Range", "If-Range", "Last-Event-ID", "Cookie", "Origin", "Accept",
           "Accept-Encoding", "X-Forwarded-For", "X-Forwarded-Proto", "Expect", "Authorization")  # fmt: skip
FORMS = ("application/json", "application/yaml", "text/plain", "application/x-www-form-urlencoded", "",
         "a/b; charset=\xff", "application/json; charset=utf-7", "multipart/form-data; boundary=x")  # fmt: skip
GOOD_HEADERS = {"Range": "bytes=0-10", "Last-Event-ID": "1", "Accept": "text/event-stream", "If-Match": '"1"'}


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Names of existing objects, for requests that should get further than 404."""

    values: Mapping[str, Sequence[str]]
    tokens: Sequence[str]
    records: Sequence[dict[str, Any]]
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A method and path of the document, with its parameters by location."""

    method: str
    path: str
    query: tuple[str, ...] = ()
    has_body: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A status (0 if the connection was closed without one), the first bytes of the answer, and its seconds."""

    status: int
    text: bytes
    seconds: float


def operations() -> list[Operation]:
    """Every operation of the document, and the pages."""
    operations_found = [
        Operation(
            method=method.upper(),
            path=path,
            query=tuple(
                parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"
            ),
            has_body="requestBody" in operation,
        )
        for path, methods in json.loads(OPENAPI.read_text())["paths"].items()
        for method, operation in methods.items()
    ]
    return operations_found + [
        Operation(method="GET", path=path, query=("job", "uid", "namespace", "limit")) for path in PAGES
    ]


def request(chance: random.Random, operation: Operation, known: Known) -> bytes:
    """A random request of the operation."""
    target = _target(chance, operation, known)
    body, headers = _body(chance, operation, known)
    headers = {"Host": known.host, "Connection": "close", "Content-Length": str(len(body)), **headers}
    if chance.random() < 0.93:
        headers["Authorization"] = f"Bearer {chance.choice(known.tokens)}"
    for name in HEADERS:
        if chance.random() < 0.06:
            good = GOOD_HEADERS.get(name, "x")
            headers[name] = good if chance.random() < 0.5 else _header_text(chance, good)
    method = operation.method if chance.random() < 0.97 else chance.choice(("PUT", "PATCH", "OPTIONS", "TRACE", "HEAD"))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join(lines).encode("latin-1", errors="replace") + b"\r\n\r\n" + body


def _target(chance: random.Random, operation: Operation, known: Known) -> str:
    path = operation.path
    for name, values in known.values.items():
        chosen = chance.choice(values) if chance.random() < 0.75 else mutating.text(chance, chance.choice(values))
        path = path.replace(
            f"{{{name}}}", _quoted(chosen if chance.random() < 0.9 else chance.choice(mutating.STRINGS))
        )
    pairs = []
    for name in operation.query:
        while chance.random() < 0.4:
            good = chance.choice(known.values.get(name, ("1",)))
            value = good if chance.random() < 0.4 else str(mutating.value(chance))[:3000]
            pairs.append(f"{name}={_quoted(value)}")
    if chance.random() < 0.05:
        pairs.append(_quoted(chance.choice(mutating.STRINGS)[:500]))
    return path[:8000] + ("?" + "&".join(pairs)[:8000] if pairs else "")


def _quoted(text: str) -> str:
    return quote(text.encode(errors="surrogatepass"), safe="")


def _header_text(chance: random.Random, good: str) -> str:
    made = mutating.text(chance, good) if chance.random() < 0.5 else chance.choice(mutating.STRINGS)
    return made.replace("\r", "").replace("\n", "")[:4000]


def _body(chance: random.Random, operation: Operation, known: Known) -> tuple[bytes, dict[str, str]]:
    if not operation.has_body and chance.random() < 0.9:
        return b"", {}
    good = good_body(chance, operation.path, known)
    form, headers = "application/json", {}
    if operation.path in ("/v1/jobs", "/v1/plans") and chance.random() < 0.3:
        form, plain = "application/yaml", mutating.yaml(chance, yamltext.dump(good)).encode(errors="surrogatepass")
    else:
        plain = mutating.encoded(chance, good if chance.random() < 0.1 else mutating.document(chance, good))
    if chance.random() < 0.25:
        plain = mutating.packed(chance, plain)
        headers["Content-Encoding"] = "gzip"
    elif chance.random() < 0.05:
        headers["Content-Encoding"] = chance.choice(("deflate", "br", "gzip, gzip", "identity", "x" * 300))
    if chance.random() < 0.05:
        form = chance.choice(FORMS)
    if chance.random() < 0.03:
        headers["Content-Length"] = chance.choice(("-1", "0", str(2**63), "1e3"))
    return plain, {**headers, "Content-Type": form}


def good_body(chance: random.Random, path: str, known: Known) -> dict[str, Any]:
    """A valid body for the route."""
    job = yamltext.load(FULL) if chance.random() < 0.5 else EXAMPLE_JOB
    if path == "/v1/jobs":
        return {**job, "metadata": {"name": f"fuzz-{chance.randrange(10**9)}"}}
    if path == "/v1/plans":
        return {"job": job, "cluster": EXAMPLE_CLUSTER}
    if path == "/v1/ingest":
        return {"records": list(known.records) if chance.random() < 0.5 else [chance.choice(known.records)]}
    if path == "/v1/tokens":
        return {"name": "made", "role": "viewer", "namespace": "default", "lifetimeSeconds": 60}
    return {"name": "again"}


def send(port: int, raw: bytes, seconds: float) -> Answer:
    """Send a request and read head and start of the answer. Leaves a stream early. May raise TimeoutError."""
    began = time.monotonic()
    text = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as line:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused, perhaps with an answer, before all was read
            line.sendall(raw)
        try:
            while len(text) < MOST_ANSWER_BYTES and (part := line.recv(65_536)):
                text += part
                if b"text/event-stream" in text:
                    line.settimeout(STREAM_SECONDS)
        except TimeoutError:
            if not text:
                raise
        except ConnectionResetError:
            pass
    words = text[:32].split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return Answer(status=status, text=text, seconds=time.monotonic() - began)


def squeezed(records: Sequence[dict[str, Any]]) -> bytes:
    """A well-formed, compressed body of records, as shippers send it."""
    return gzip.compress(json.dumps({"records": list(records)}).encode())
