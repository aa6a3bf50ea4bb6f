"""Files over HTTP from a real server: whole, in parts, while they grow, and never as a page."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.download import requested_part
from penstock.api.http.problems import Problem
from penstock.api.service import Service
from tests.support.listening import answering, bearer
from tests.support.run_files import FILES, lay_out
from tests.support.service import Clock, add_job, new_service

MODEL = "exports/a1-step-4/model.safetensors"
CONTENT = FILES[MODEL]
SIZE = len(CONTENT)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = new_service(tmp_path_factory.mktemp("service"), clock=Clock())
    lay_out(made.settings.runs / add_job(made).uid)
    yield made
    made.close()


@pytest.fixture(scope="module")
def root(service: Service) -> Path:
    (found,) = service.settings.runs.iterdir()
    return found


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with answering(service) as url:
        base = f"{url}/v1/jobs/default/tiny/artifacts/"
        with httpx.Client(base_url=base, headers=bearer(service), trust_env=False) as made:
            yield made


def test_a_whole_file(client: httpx.Client) -> None:
    answer = client.get(MODEL)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["content-length"] == str(SIZE)
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_is_a_download_and_never_a_page(client: httpx.Client, name: str) -> None:
    answer = client.get(name)
    assert answer.content == FILES[name]
    headers = answer.headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == f"attachment; filename*=utf-8''{name.rpartition('/')[2]}"
    assert headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        (f"bytes={SIZE - 1}-", SIZE - 1, SIZE - 1),
        ("bytes=5-", 5, SIZE - 1),
        ("bytes=-7", SIZE - 7, SIZE - 1),
        (f"bytes=-{SIZE + 9}", 0, SIZE - 1),
        (f"bytes=100-{SIZE + 100}", 100, SIZE - 1),
    ],
)
def test_a_part(client: httpx.Client, asked: str, first: int, last: int) -> None:
    answer = client.get(MODEL, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, CONTENT[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{SIZE}"


@pytest.mark.parametrize("asked", [f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE + 5}", "bytes=-0"])
def test_a_part_that_is_not_there(client: httpx.Client, asked: str) -> None:
    answer = client.get(MODEL, headers={"Range": asked})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{SIZE}"
    assert answer.json()["type"].endswith("/out-of-range")


@pytest.mark.parametrize(
    "asked", ["bytes=-", "bytes=5-2", "lines=1-2", "bytes=0-1,4-5", "x", "", "bytes=a-b", "bytes=1-2-3", "bytes=٣-"]
)
def test_what_is_not_understood_is_passed_over(client: httpx.Client, asked: str) -> None:
    """As RFC 9110, 14.2 allows."""
    answer = client.get(MODEL, headers=[(b"Range", asked.encode())])
    assert (answer.status_code, len(answer.content)) == (200, SIZE)


def test_a_part_belongs_to_one_state_of_a_file(client: httpx.Client, root: Path) -> None:
    path = root / "trace.json"
    path.write_text("old content")
    tag = client.get("trace.json").headers["etag"]
    part = {"Range": "bytes=4-", "If-Range": tag}
    assert client.get("trace.json", headers=part).content == b"content"
    path.write_text("new content")
    changed = client.get("trace.json", headers=part)
    assert (changed.status_code, changed.content) == (200, b"new content")
    assert changed.headers["etag"] != tag


def test_a_download_that_broke_is_gone_on_with(client: httpx.Client) -> None:
    first = client.get(MODEL, headers={"Range": "bytes=0-99999"})
    rest = client.get(MODEL, headers={"Range": "bytes=100000-", "If-Range": first.headers["etag"]})
    assert hashlib.sha256(first.content + rest.content).digest() == hashlib.sha256(CONTENT).digest()


def test_a_file_that_grows_is_sent_as_long_as_it_was(client: httpx.Client, root: Path) -> None:
    """The length was told; what comes later is for the next request."""
    path = root / "logs" / "a1" / "growing.log"
    path.write_bytes(b"line\n" * 400_000)
    ending = threading.Event()

    def grow() -> None:
        with path.open("ab") as file:
            while not ending.wait(0.001):
                file.write(b"line\n" * 1000)
                file.flush()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(5):
            answer = client.get("logs/a1/growing.log")
            assert len(answer.content) == int(answer.headers["content-length"]) >= 2_000_000
    finally:
        ending.set()
        writer.join()
        path.unlink()


def test_an_empty_file(client: httpx.Client) -> None:
    assert client.get("logs/a1/torchrun.log").content == b""
    assert client.get("logs/a1/torchrun.log", headers={"Range": "bytes=0-"}).status_code == 416


@pytest.mark.parametrize(
    "path", ["job.yaml", "..%2F..%2Fpenstock.db", "logs/../job.yaml", "%2Fetc%2Fpasswd", "none", "%00"]
)
def test_what_is_no_artifact_is_not_there(client: httpx.Client, path: str) -> None:
    host = client.base_url.host
    with socket.create_connection((host, client.base_url.port or 80)) as raw:  # httpx would fix the path
        token = client.headers["authorization"]
        head = [f"GET {client.base_url.path}{path} HTTP/1.1", f"Host: {host}", f"Authorization: {token}"]
        raw.sendall("\r\n".join([*head, "Connection: close", "", ""]).encode())
        answer = b"".join(iter(lambda: raw.recv(65_536), b"")).decode()
    assert answer.startswith("HTTP/1.1 404")
    assert "secret" not in answer


def test_a_client_that_leaves_is_not_sent_the_rest(client: httpx.Client, root: Path) -> None:
    path = root / "logs" / "a1" / "long.log"
    with path.open("wb") as file:
        file.truncate(2**30)
    with client.stream("GET", "logs/a1/long.log") as answer:
        assert next(answer.iter_bytes(1000)) == bytes(1000)
    assert client.get("plan.json").status_code == 200
    path.unlink()


def test_other_methods_are_told_which_there_are(client: httpx.Client) -> None:
    answer = client.delete(MODEL)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60) | st.none())
def test_parts_are_those_of_the_file(size: int, first: int, last: int | None) -> None:
    header = f"bytes={first}-{'' if last is None else last}"
    content = list(range(size))
    expected = content[first:] if last is None else content[first : last + 1]
    try:
        found = requested_part(header, size)
    except Problem:
        assert first >= size
    else:
        assert found is None if last is not None and last < first else list(found or ()) == expected
