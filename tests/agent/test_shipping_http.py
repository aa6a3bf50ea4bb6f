"""Shipping over HTTP, to a server on loopback."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.agent import shipping
from penstock.agent.record_upload import HttpPost, Reply
from penstock.agent.shipping import Orphaned, ship
from penstock.core.host.stopping import StopRequests, listening
from penstock.core.run.folder import RunDir
from tests.support.ingest_server import IngestServer, Request
from tests.support.outboxes import address_file, fill

NOWHERE = "http://127.0.0.1:9"


def acknowledging(request: Request) -> tuple[int, bytes]:
    sequence = json.loads(gzip.decompress(request.body))["records"][-1]["sequence"]
    return 200, json.dumps({"sequence": sequence}).encode()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret-1\n")
    return path


@pytest.fixture
def address(tmp_path: Path) -> Path:
    """Of a service that ended."""
    return address_file(tmp_path / "address.json", NOWHERE)


def posting_to(server: IngestServer, token_file: Path) -> closing[HttpPost]:
    return closing(HttpPost(address_file(token_file.with_name("address.json"), server.url), token_file))


BODY = gzip.compress(b'{"records":[{"sequence":7}]}')


def test_an_address_that_is_gone_is_remembered(token_file: Path) -> None:
    """As when somebody deletes the ConfigMap of an attempt that is on its way."""
    place = token_file.with_name("address.json")
    with IngestServer(acknowledging) as server, posting_to(server, token_file) as post:
        assert post(BODY).status == 200
        place.unlink()
        assert post(BODY).status == 200
    with closing(HttpPost(place, token_file)) as post:
        assert post(BODY).status == 0


def test_a_post_says_what_it_brings_and_who_it_is(token_file: Path) -> None:
    with IngestServer(acknowledging) as server, posting_to(server, token_file) as post:
        assert post(BODY) == Reply(status=200, sequence=7)
        token_file.write_text("secret-2\n")
        assert post(BODY) == Reply(status=200, sequence=7)
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer secret-1", "Bearer secret-2"]
    first = server.requests[0]
    assert (first.path, first.body) == ("/v1/ingest", BODY)
    assert (first.headers["content-encoding"], first.headers["content-type"]) == ("gzip", "application/json")


@pytest.mark.parametrize("status", [302, 400, 401, 409, 413, 422, 429, 500, 503])
def test_other_answers_come_back_as_they_are(token_file: Path, status: int) -> None:
    with IngestServer(lambda request: (status, b"x" * 1000)) as server, posting_to(server, token_file) as post:
        assert post(BODY) == Reply(status=status, detail="x" * 500)


@pytest.mark.parametrize(
    "answer", [b"", b"welcome to the hotel", b"\xff\xfe", b"null", b"[]", b"{}", b'{"sequence": null}']
)
def test_an_answer_that_is_none_of_the_service_s_is_no_answer(token_file: Path, answer: bytes) -> None:
    with IngestServer(lambda request: (200, answer)) as server, posting_to(server, token_file) as post:
        found = post(BODY)
    assert (found.status, found.sequence) == (0, -1)
    assert found.detail


def test_a_service_that_is_not_there_is_no_answer(token_file: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = address_file(token_file.with_name("address.json"), f"http://127.0.0.1:{port}")
    with closing(HttpPost(place, token_file)) as post:
        found = post(BODY)
    assert found.status == 0
    assert found.detail


def test_a_service_that_came_back_elsewhere_is_found(address: Path, token_file: Path) -> None:
    with closing(HttpPost(address, token_file)) as post:
        assert post(BODY).status == 0
        for _ in range(2):
            with IngestServer(acknowledging) as server:
                address_file(address, server.url)
                assert post(BODY) == Reply(status=200, sequence=7)
            assert post(BODY).status == 0


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "{}", '{"server": ""}', '{"server": "http://[", "caFile": "/no"}']
)
def test_an_address_that_cannot_be_used_is_no_answer(address: Path, token_file: Path, text: str | None) -> None:
    if text is None:
        address.unlink()
    else:
        address.write_text(text)
    with IngestServer(acknowledging) as server, closing(HttpPost(address, token_file)) as post:
        found = post(BODY)
        address_file(address, server.url)
        assert post(BODY).status == 200
    assert (found.status, found.detail != "") == (0, True)


def test_a_connection_that_breaks_is_no_answer(token_file: Path) -> None:
    with IngestServer(lambda request: (0, b"")) as server, posting_to(server, token_file) as post:
        found = post(BODY)
    assert found.status == 0
    assert found.detail


@pytest.mark.parametrize("token", [None, b"\xff", "naïve".encode(), b"two\nlines"], ids=str)
def test_a_token_that_cannot_be_sent_is_no_answer(token_file: Path, token: bytes | None) -> None:
    with IngestServer(acknowledging) as server, posting_to(server, token_file) as post:
        if token is None:
            token_file.unlink()
        else:
            token_file.write_bytes(token)
        found = post(BODY)
        token_file.write_text("secret-1")
        assert post(BODY).status == 200
    assert found.status == 0
    assert found.detail
    assert len(server.requests) == 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(shipping, "FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of stdin, as anyone who started the shipper holds it."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writing
        with contextlib.suppress(OSError):
            os.close(writing)


@pytest.mark.usefixtures("at_once")
def test_a_run_is_shipped_until_somebody_asks_to_stop(tmp_path: Path, token_file: Path, held: int) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    fill(run.outbox, 3)

    def answer(request: Request) -> tuple[int, bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return acknowledging(request) if len(server.requests) > 2 else (503, b"")

    with IngestServer(answer) as server, listening() as requests:
        until = Orphaned(requests, sys.stdin)
        assert ship(run, address_file(tmp_path / "address.json", server.url), token_file, lambda line: None, until)
    assert len(server.requests) == 3


@pytest.mark.usefixtures("at_once")
def test_a_run_without_records_is_shipped_too(tmp_path: Path, address: Path, token_file: Path, held: int) -> None:
    """Anyone who started it ended before the first look."""
    os.close(held)
    until = Orphaned(StopRequests(), sys.stdin)
    assert ship(RunDir(tmp_path / "run"), address, token_file, lambda line: None, until)
