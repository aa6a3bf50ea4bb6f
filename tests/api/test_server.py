"""The web server: TLS, clients without haste, and what nobody is believed."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.agent.record_upload import HttpPost
from penstock.api.auth.identity import Role
from penstock.api.http.credentials import COOKIE
from penstock.api.service import Service
from penstock.api.settings import Limits, Settings, Tls
from penstock.api.start.accepting import most_connections
from penstock.api.start.server import MOST_HEAD_BYTES, Server, check_tls, tls_of
from penstock.api.store import audit, jobs
from penstock.client import Client, ServiceError, Target
from penstock.client.config import trusted
from penstock.core.errors import UserError
from tests.support.certificates import certificate
from tests.support.listening import PATIENCE_SECONDS, answering, bearer
from tests.support.outboxes import address_file
from tests.support.service import add_job, new_service, step_records

HASTY = Limits(idle_seconds=0.4, request_seconds=0.4)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = new_service(tmp_path, limits=HASTY)
    yield made
    made.close()


class TestTls:
    @pytest.fixture
    def tls(self, tmp_path: Path) -> Tls:
        return certificate(tmp_path)

    @pytest.fixture
    def url(self, service: Service, tls: Tls) -> Iterator[str]:
        with answering(replace(service, settings=replace(service.settings, tls=tls))) as found:
            yield found

    def target(self, service: Service, url: str, ca: Path | None) -> Target:
        return Target(server=url, token=bearer(service)["Authorization"].partition(" ")[2], ca=ca)

    def test_a_client_that_knows_the_certificate_is_served(self, service: Service, url: str, tls: Tls) -> None:
        assert url.startswith("https://")
        with Client(self.target(service, url, tls.certificate)) as client:
            assert list(client.jobs()) == []

    def test_others_do_not_send_their_token(self, service: Service, url: str, tmp_path: Path) -> None:
        for ca in (None, certificate(tmp_path, "another").certificate):
            unsure = Client(self.target(service, url, ca), pause=lambda seconds: None)
            with unsure, pytest.raises(ServiceError, match=r"(?i)certificate") as caught:
                list(unsure.jobs())
            assert caught.value.kind == "unreachable"

    def test_records_are_shipped(self, service: Service, url: str, tls: Tls, tmp_path: Path) -> None:
        uid = add_job(service).uid
        service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
        token = tmp_path / "token"
        token.write_text(bearer(service, Role.INGEST)["Authorization"].partition(" ")[2])
        records = json.dumps({"records": [each.to_manifest() for each in step_records(uid, range(2))]}).encode()
        with closing(HttpPost(address_file(tmp_path / "address", url, tls.certificate), token)) as post:
            assert post(gzip.compress(records)).status == 200
        with closing(HttpPost(address_file(tmp_path / "address", url), token)) as post:
            assert "certificate" in post(b"").detail.lower()

    def test_a_new_certificate_in_the_same_file_is_believed(
        self, service: Service, url: str, tls: Tls, tmp_path: Path
    ) -> None:
        """A service has it from its next start on, and attempts that still run as well."""
        known, token = tmp_path / "known.pem", tmp_path / "token"
        known.write_bytes(certificate(tmp_path, "before").certificate.read_bytes())
        token.write_text("somebody")
        with closing(HttpPost(address_file(tmp_path / "address", url, known), token)) as post:
            assert "certificate" in post(b"").detail.lower()
            known.write_bytes(tls.certificate.read_bytes())
            assert post(b"").status == 401

    def test_a_cookie_is_for_https_alone(self, service: Service, url: str, tls: Tls) -> None:
        with Client(self.target(service, url, tls.certificate)) as client:
            link = client.login_link()
        assert link.url.startswith(f"{url}/login#psl_")
        with httpx.Client(base_url=url, verify=trusted(tls.certificate), trust_env=False) as browser:
            code = {"code": link.url.partition("#")[2]}
            assert browser.post("/login", data=code, headers={"Origin": url.replace("s", "", 1)}).status_code == 403
            answer = browser.post("/login", data=code, headers={"Origin": url})
            assert answer.status_code == 303
            assert "Secure" in answer.headers["set-cookie"].split("; ")
            assert COOKIE in browser.cookies

    def test_what_cannot_be_used_is_told_at_the_start(self, tls: Tls, tmp_path: Path) -> None:
        locked, other = certificate(tmp_path, "locked", "secret"), certificate(tmp_path, "other")
        (tmp_path / "text.pem").write_text("no certificate")
        for wrong in (
            locked,
            replace(tls, key=other.key),
            replace(tls, key=tmp_path / "none.key"),
            replace(tls, certificate=tmp_path / "text.pem"),
        ):
            with pytest.raises(UserError, match=r"--tls-certificate .*: cannot be used"):
                check_tls(Settings(folder=tmp_path, tls=wrong))
        check_tls(Settings(folder=tmp_path, tls=tls))
        check_tls(Settings(folder=tmp_path))

    def test_one_without_the_other_is_told(self, tls: Tls) -> None:
        assert tls_of(None, None) is None
        assert tls_of(tls.certificate, tls.key) == tls
        with pytest.raises(UserError, match="--tls-key: is missing"):
            tls_of(tls.certificate, None)
        with pytest.raises(UserError, match="--tls-certificate: is missing"):
            tls_of(None, tls.key)

    @pytest.mark.parametrize("text", [None, "no certificate"])
    def test_a_wrong_ca_file_is_told(self, tmp_path: Path, text: str | None) -> None:
        path = tmp_path / "ca.pem"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=r"PENSTOCK_CA .*ca\.pem: cannot be read"):
            Client(Target(server="https://127.0.0.1", token="x", ca=path))


class TestSlowClients:
    """Each is cut off, and the service goes on."""

    @pytest.fixture
    def url(self, service: Service) -> Iterator[str]:
        with answering(service) as found:
            yield found
            assert httpx.get(f"{found}/readyz", trust_env=False).status_code == 200

    @pytest.mark.parametrize(
        "said",
        [
            b"",
            b"GET /healthz HTTP/1.1\r\nHost: loc",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{",
        ],
        ids=["nothing", "half a head", "half a second head", "a body that nobody reads"],
    )
    def test_one_that_trickles_is_cut_off(self, url: str, said: bytes) -> None:
        with connected(url) as client:
            client.sendall(said)
            assert seconds_to_end(client, trickle=b"x") < 5

    def test_one_whose_head_has_no_end_is_refused(self, url: str) -> None:
        began = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
        with connected(url) as client:
            # One byte too many: what a closed socket still holds resets the connection, and the answer may be lost.
            client.sendall(began + b"x" * (MOST_HEAD_BYTES + 1 - len(began)))
            heard = bytearray()
            assert seconds_to_end(client, trickle=b"", heard=heard) < 5
        assert heard.startswith(b"HTTP/1.1 400 ")

    def test_one_that_asks_again_before_it_is_answered_is_answered_in_order(self, url: str) -> None:
        asked = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connected(url) as client:
            client.sendall(asked % b"healthz" + asked % b"version" + asked % b"readyz")
            heard = bytearray()
            assert seconds_to_end(client, trickle=b"", heard=heard) > HASTY.idle_seconds / 2
        assert heard.count(b"HTTP/1.1 200 ") == 3
        assert heard.index(b'"status":"ok"') < heard.index(b'"version"')

    def test_one_that_trickles_a_body_is_answered_first(self, service: Service, url: str) -> None:
        token = bearer(service, Role.EDITOR)["Authorization"]
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nContent-Length: 1000\r\n\r\n"
        with connected(url) as client:
            client.sendall(head.encode())
            heard = bytearray()
            assert seconds_to_end(client, trickle=b" ", heard=heard) < 5
        assert heard.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within" in heard

    def test_one_that_does_not_read_is_cut_off(self, service: Service, url: str) -> None:
        """Many answers, asked for at once and never taken, until the server's buffers are full."""
        asked = b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connected(url) as client:
            client.sendall(asked * 400)
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                keep_sending(client, b"x")

    def test_one_in_time_is_not(self, url: str) -> None:
        with connected(url) as client:
            for _ in range(3):
                time.sleep(HASTY.idle_seconds / 2)
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                heard = b""
                while b'{"status":"ok"}' not in heard:
                    heard += client.recv(65_536)
                assert heard.startswith(b"HTTP/1.1 200 ")

    def test_a_stream_has_its_time(self, service: Service) -> None:
        """It is the server that speaks there."""
        patient = replace(service, settings=replace(service.settings, limits=replace(HASTY, stream_seconds=1.5)))
        with answering(patient) as url:
            headers = {**bearer(service), "Accept": "text/event-stream"}
            start = time.monotonic()
            answer = httpx.get(f"{url}/v1/events", headers=headers, trust_env=False, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200
        assert time.monotonic() - start > 1.4


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as made:
        yield made


def seconds_to_end(client: socket.socket, trickle: bytes, heard: bytearray | None = None) -> float:
    """How long it takes the server to close, while a byte comes every now and then."""
    start = time.monotonic()
    client.settimeout(0.05)
    while time.monotonic() - start < PATIENCE_SECONDS:
        try:
            client.sendall(trickle)
            got = client.recv(65_536)
        except TimeoutError:
            continue
        except OSError:
            break
        if not got:
            break
        if heard is not None:
            heard += got
    return time.monotonic() - start


def keep_sending(client: socket.socket, text: bytes) -> None:
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE_SECONDS:
        client.sendall(text)
        time.sleep(0.05)


class TestProxies:
    """A header that says for whom a request is made is no proof of it."""

    def test_an_address_is_not_believed(self, service: Service) -> None:
        with answering(service) as url:
            headers = {**bearer(service), "X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
            httpx.delete(f"{url}/v1/jobs/default/tiny", headers=headers, trust_env=False)
        service.write("audit", lambda connection: None)
        (entry,), _ = service.read(lambda c: audit.page(c, 9))
        assert (entry.address, entry.status) == ("127.0.0.1", 403)


def test_what_is_no_http_is_refused(service: Service) -> None:
    with answering(service) as url, connected(url) as client:
        client.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 400 ")


POST = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
    b"Expect: 100-continue\r\nAuthorization: "
)
"""Head of a request whose body does not come, up to the token."""


def test_a_connection_that_begins_during_the_shutdown_does_not_delay_it(service: Service, tmp_path: Path) -> None:
    """Else a page that retries its stream over it would keep the server up forever."""
    tls = certificate(tmp_path)
    settings = replace(service.settings, limits=Limits(idle_seconds=60, request_seconds=60), tls=tls)
    trusting = ssl.create_default_context(cafile=str(tls.certificate))
    server = answering(replace(service, settings=settings))
    url = server.__enter__()
    stopping = threading.Thread(target=server.__exit__, args=(None, None, None))
    place = ("127.0.0.1", int(url.rpartition(":")[2]))
    late, busy = (socket.create_connection(place, timeout=PATIENCE_SECONDS) for _ in range(2))
    with late, trusting.wrap_socket(busy, server_hostname="127.0.0.1") as busy:
        token = bearer(service, Role.EDITOR)["Authorization"].encode()
        busy.sendall(POST + token + b"\r\n\r\n")
        assert b"100 Continue" in busy.recv(65_536), "its body is awaited"
        stopping.start()
        while listens(place):
            time.sleep(0.01)
        with trusting.wrap_socket(late, server_hostname="127.0.0.1") as begun:
            busy.close()
            with contextlib.suppress(OSError):
                keep_asking(begun)
        stopping.join(PATIENCE_SECONDS)
        assert not stopping.is_alive()


def test_a_request_without_end_does_not_prevent_the_shutdown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.start.server.SHUTDOWN_SECONDS", 1)
    patient = replace(service, settings=replace(service.settings, limits=Limits(idle_seconds=600, request_seconds=600)))
    server = answering(patient)
    url = server.__enter__()
    stopping = threading.Thread(target=server.__exit__, args=(None, None, None))
    token = bearer(service, Role.EDITOR)["Authorization"].encode()
    with connected(url) as client:
        client.sendall(POST + token + b"\r\n\r\n")
        assert b"100 Continue" in client.recv(65_536), "its body is awaited"
        stopping.start()
        stopping.join(0.5)
        assert stopping.is_alive(), "the request has its time"
        stopping.join(PATIENCE_SECONDS)
        assert not stopping.is_alive()


def keep_asking(client: ssl.SSLSocket) -> None:
    """Ask until the server closes."""
    end = time.monotonic() + PATIENCE_SECONDS
    while client.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") and client.recv(65_536):
        assert time.monotonic() < end


def listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=PATIENCE_SECONDS).close()
    except OSError:
        return False
    return True


def test_no_more_are_accepted_than_there_may_be(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the process keeps its descriptors; connections that wait are served once others end."""
    monkeypatch.setattr("penstock.api.start.server.most_connections", lambda: 3)
    patient = replace(service, settings=replace(service.settings, limits=Limits(idle_seconds=60)))
    with answering(patient) as url, ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        waits = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        waits.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        waits.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waits.recv(1)
        held[0].close()
        waits.settimeout(PATIENCE_SECONDS)
        assert waits.recv(15).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("limit", "most"), [(128, 64), (512, 256), (1024, 768), (65_536, 65_280), (resource.RLIM_INFINITY, 2**31)]
)
def test_connections_leave_descriptors_for_the_rest(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert most_connections() == most


def test_a_port_that_is_taken_is_told(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(replace(service, settings=replace(service.settings, port=port)))
        with pytest.raises(UserError, match="cannot listen there"):
            server.run()
