"""Who may do what: every route against every kind of token. A route without a row here fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.auth.identity import Identity, Role
from penstock.api.http.credentials import COOKIE
from penstock.api.http.routes import health
from penstock.api.service import Service
from penstock.api.store import jobs, sessions, tokens
from penstock.core.lifecycle import Phase
from tests.support.run_files import add_checkpoint
from tests.support.service import (
    HOST,
    Clock,
    add_job,
    browser_of,
    client_of,
    job_manifest,
    new_service,
    session_of,
    step_records,
)

VIEWER, EDITOR, ADMIN, INGEST = Role.VIEWER, Role.EDITOR, Role.ADMIN, Role.INGEST

NEEDS: dict[tuple[str, str], Role | None] = {
    ("POST", "/v1/jobs"): EDITOR,
    ("GET", "/v1/jobs"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}"): VIEWER,
    ("DELETE", "/v1/jobs/{namespace}/{name}"): EDITOR,
    ("POST", "/v1/jobs/{namespace}/{name}/suspend"): EDITOR,
    ("POST", "/v1/jobs/{namespace}/{name}/resume"): EDITOR,
    ("GET", "/v1/jobs/{namespace}/{name}/events"): VIEWER,
    ("GET", "/v1/events"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/plans"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/metrics"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/timeline"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/logs"): VIEWER,
    ("POST", "/v1/jobs/{namespace}/{name}/retry"): EDITOR,
    ("GET", "/v1/jobs/{namespace}/{name}/reproduce"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/checkpoints"): VIEWER,
    ("POST", "/v1/jobs/{namespace}/{name}/checkpoints/{attempt}/{step}/export"): EDITOR,
    ("GET", "/v1/jobs/{namespace}/{name}/artifacts"): VIEWER,
    ("GET", "/v1/jobs/{namespace}/{name}/artifacts/{path}"): VIEWER,
    ("GET", "/v1/history/{uid}"): VIEWER,
    ("GET", "/v1/history/{uid}/events"): VIEWER,
    ("GET", "/v1/history/{uid}/plans"): VIEWER,
    ("GET", "/v1/history/{uid}/metrics"): VIEWER,
    ("GET", "/v1/history/{uid}/timeline"): VIEWER,
    ("GET", "/v1/history/{uid}/logs"): VIEWER,
    ("GET", "/v1/history/{uid}/reproduce"): VIEWER,
    ("GET", "/v1/history/{uid}/checkpoints"): VIEWER,
    ("GET", "/v1/history/{uid}/artifacts"): VIEWER,
    ("GET", "/v1/history/{uid}/artifacts/{path}"): VIEWER,
    ("POST", "/v1/plans"): EDITOR,
    ("GET", "/v1/plans"): VIEWER,
    ("GET", "/v1/plans/{request}"): VIEWER,
    ("DELETE", "/v1/plans/{request}"): EDITOR,
    ("GET", "/v1/profiles"): VIEWER,
    ("GET", "/v1/profiles/{digest}"): VIEWER,
    ("POST", "/v1/tokens"): ADMIN,
    ("GET", "/v1/tokens"): ADMIN,
    ("DELETE", "/v1/tokens/{token}"): ADMIN,
    ("GET", "/v1/me"): VIEWER,
    ("POST", "/v1/login-links"): VIEWER,
    ("GET", "/v1/sessions"): VIEWER,
    ("DELETE", "/v1/sessions/{session}"): VIEWER,
    ("POST", "/v1/logout"): VIEWER,
    ("GET", "/v1/audit"): ADMIN,
    ("POST", "/v1/ingest"): INGEST,
    ("GET", "/metrics"): VIEWER,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
    ("GET", "/version"): None,
}
"""The least role of every route; none needs no token."""

VARIANTS: dict[tuple[str, str], Role] = {("POST", "/v1/jobs?dryRun=true"): EDITOR}
"""Routes asked in another way, which needs the same."""

ALLOWED = {
    VIEWER: {VIEWER, EDITOR, ADMIN},
    EDITOR: {EDITOR, ADMIN},
    ADMIN: {ADMIN},
    INGEST: {INGEST},
}
OPEN_PAGES = {"/login", "/static/{name}", "/v1/openapi.json"}
PAGES = {
    "/",
    "/compare",
    "/jobs/{namespace}/{name}",
    "/plans/{request}",
    "/profiles",
    "/profiles/{digest}",
    "/submit",
    "/whatif",
}
"""Need a viewer; see test_pages.py."""
BY_TOKEN_ONLY = {("POST", "/v1/login-links")}
NEEDED = {route: role for route, role in (NEEDS | VARIANTS).items() if role is not None}
GUARDED = list(NEEDED)
WRITES = [route for route in GUARDED if route[0] != "GET"]
FOREIGN = [None, "null", "http://evil.example", "http://localhost:8471", "https://localhost", "http://127.0.0.1"]
"""Where a page may lie that is none of the service's, which is at http://localhost."""


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    """On SQLite: what is allowed does not depend on the database."""
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def ask(client: TestClient, route: tuple[str, str], **options: Any) -> int:
    return client.request(*filled(route), **options).status_code


def test_every_route_has_a_row(service: Service) -> None:
    paths = create_app(service).openapi()["paths"]
    routes = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert routes == set(NEEDS)
    assert {path for (_, path), role in NEEDS.items() if role is None} == health.OPEN


@pytest.mark.parametrize("route", GUARDED, ids=" ".join)
def test_what_proves_nobody_is_turned_away(service: Service, clock: Clock, route: tuple[str, str]) -> None:
    nobody = client_of(service, None)
    stale = expired_and_revoked(service, clock)
    headers = ["", "Bearer", "Bearer x", "Basic YTpi", f"bearer {'x' * 9000}", "Bearer \x80", *stale]
    for header in headers:
        answer = nobody.request(
            *filled(route), headers=[(b"Authorization", header.encode("latin-1"))] if header else []
        )
        assert answer.status_code == 401, header
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["type"].endswith("/unauthenticated")
        assert "penstock token create" in answer.json()["remedy"]


def filled(route: tuple[str, str]) -> tuple[str, str]:
    method, path = route
    fields = {"namespace": "default", "name": "tiny", "attempt": 1, "step": 2}
    return method, path.format(**fields, **dict.fromkeys(("uid", "token", "request", "digest", "path", "session"), "x"))


def expired_and_revoked(service: Service, clock: Clock) -> list[str]:
    bearer = Identity(name="late", role=ADMIN)
    _, expiring = service.write("tokens", lambda c: tokens.add(c, bearer, clock.now, lifetime_seconds=5))
    closed, secret = service.write("tokens", lambda c: tokens.add(c, bearer, clock.now))
    service.write("tokens", lambda c: tokens.revoke(c, closed.id, clock.now))
    clock.now += 5
    return [f"Bearer {expiring}", f"Bearer {secret}"]


@pytest.mark.parametrize("role", list(Role))
def test_a_role_opens_what_it_should(service: Service, role: Role) -> None:
    client = client_of(service, role)
    for route, needed in NEEDED.items():
        refused = ask(client, route) == 403
        assert refused == (role not in ALLOWED[needed]), route


@pytest.mark.parametrize("route", [route for route, role in NEEDS.items() if role is None], ids=" ".join)
def test_health_needs_no_token(service: Service, route: tuple[str, str]) -> None:
    assert ask(client_of(service, None), route) == 200


def test_every_page_is_known(service: Service) -> None:
    """What is not in the OpenAPI document has a row here."""
    documented = {path for _, path in NEEDS}
    served = {path.replace("{path:path}", "{path}") for path in paths_of(create_app(service))}
    assert served - documented == OPEN_PAGES | PAGES


def paths_of(app: FastAPI) -> Iterator[str]:
    """Of every route, also those of routers."""
    for each in app.routes:
        if isinstance(each, Route | Mount):
            yield each.path
        else:
            included: Any = each
            yield from (included.include_context.prefix + route.path for route in included.original_router.routes)


class TestSessions:
    """The same by the cookie of a session."""

    @pytest.mark.parametrize("role", [VIEWER, EDITOR, ADMIN])
    def test_a_role_opens_what_it_should(self, service: Service, role: Role) -> None:
        for route, needed in NEEDED.items():
            refused = ask(browser_of(service, role), route) == 403
            assert refused == (role not in ALLOWED[needed] or route in BY_TOKEN_ONLY), route

    @pytest.mark.parametrize("route", WRITES, ids=" ".join)
    @pytest.mark.parametrize("origin", FOREIGN)
    def test_a_write_from_elsewhere_is_turned_away(
        self, service: Service, route: tuple[str, str], origin: str | None
    ) -> None:
        answer = browser_of(service, ADMIN, origin=origin).request(*filled(route))
        assert answer.status_code == 403
        assert answer.json()["type"].endswith("/cross-origin")
        assert answer.json()["where"] == "Origin"

    @pytest.mark.parametrize("route", GUARDED, ids=" ".join)
    def test_one_that_ended_proves_nobody(self, service: Service, clock: Clock, route: tuple[str, str]) -> None:
        nobody = client_of(service, None)
        for secret in ["", "x", "x" * 9000, *ended_sessions(service, clock)]:
            headers = {"Cookie": f"{COOKIE}={secret}", "Origin": HOST}
            answer = nobody.request(*filled(route), headers=headers)
            assert answer.status_code == 401, secret
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert ("penstock ui" in answer.json()["remedy"]) == (secret != "")

    def test_a_token_goes_before_a_cookie(self, service: Service) -> None:
        _, secret = session_of(service)
        headers = {"Cookie": f"{COOKIE}={secret}"}
        assert client_of(service, VIEWER).get("/v1/tokens", headers=headers).status_code == 403
        answer = client_of(service, None).get("/v1/tokens", headers={**headers, "Authorization": "Bearer x"})
        assert answer.status_code == 401

    def test_a_token_needs_no_origin(self, service: Service) -> None:
        client = client_of(service, EDITOR)
        answer = client.post("/v1/jobs", json=job_manifest(), headers={"Origin": "http://evil.example"})
        assert answer.status_code == 201


def ended_sessions(service: Service, clock: Clock) -> list[str]:
    """Ended, of a token that was revoked, of one that expired, and too old."""
    ended, signed_out = session_of(service)
    service.write("sessions", lambda c: sessions.end(c, ended.id, clock.now))
    orphan, orphaned = session_of(service)
    service.write("tokens", lambda c: tokens.revoke(c, orphan.token, clock.now))
    _, outlived = session_of(service, lifetime_seconds=5)
    _, old = session_of(service)
    clock.now += sessions.SESSION_SECONDS
    return [signed_out, orphaned, outlived, old]


class TestNamespaces:
    """A token of one namespace."""

    def test_reads_its_own(self, service: Service) -> None:
        mine, other = add_job(service, namespace="mine"), add_job(service, namespace="other")
        client = client_of(service, VIEWER, "mine")
        assert client.get("/v1/jobs/mine/tiny").status_code == 200
        assert client.get("/v1/jobs/other/tiny").status_code == 403
        assert client.get(f"/v1/history/{mine.uid}").status_code == 200
        assert client.get(f"/v1/history/{other.uid}").status_code == 403
        assert [each["metadata"]["namespace"] for each in client.get("/v1/jobs").json()["items"]] == ["mine"]
        assert client.get("/v1/jobs", params={"namespace": "other"}).status_code == 403

    def test_changes_its_own(self, service: Service) -> None:
        add_job(service, namespace="other")
        client = client_of(service, EDITOR, "mine")
        assert client.post("/v1/jobs", json=job_manifest(namespace="mine")).status_code == 201
        for query in ("", "?dryRun=true"):
            answer = client.post(f"/v1/jobs{query}", json=job_manifest("next", namespace="other"))
            assert answer.status_code == 403
        assert client.post("/v1/jobs/mine/tiny/suspend").status_code == 200
        assert client.post("/v1/jobs/other/tiny/suspend").status_code == 403

    def test_reports_for_its_own(self, service: Service) -> None:
        shipper, everywhere = client_of(service, INGEST, "mine"), client_of(service, INGEST)
        own, foreign = (launched(service, namespace) for namespace in ("mine", "other"))
        answers = [shipper.post("/v1/ingest", json=report(uid)) for uid in (own, foreign)]
        assert [answer.status_code for answer in answers] == [200, 403]
        assert answers[1].json()["where"] == "Authorization"
        assert "namespace other" in answers[1].json()["detail"]
        told = service.read(lambda c: [jobs.get(c, uid).progress for uid in (own, foreign)])
        assert [each is None for each in told] == [False, True]
        assert everywhere.post("/v1/ingest", json=report(foreign)).status_code == 200

    @pytest.mark.parametrize("whole", [True, False])
    def test_begins_from_its_own_checkpoints(self, service: Service, whole: bool) -> None:
        """Another one's is refused by the very words for one that is not there, be it complete or not."""
        uid, nowhere = add_job(service, namespace="other").uid, "00000000-0000-0000-0000-00000000dead"
        add_checkpoint(service.settings.runs / uid, 1, 4, state="complete" if whole else "removed")
        mine, anywhere = client_of(service, EDITOR, "mine"), client_of(service, EDITOR)

        def answered(client: TestClient, of: str, path: str) -> tuple[int, str]:
            manifest = job_manifest("next", namespace="mine")
            manifest["spec"]["checkpoint"] = {"resumeFrom": f"out://{of}/1/4"}
            answer = client.post(path, json={"job": manifest} if path == "/v1/plans" else manifest)
            return answer.status_code, answer.text.replace(of, "UID")

        for path in ("/v1/jobs", "/v1/jobs?dryRun=true", "/v1/plans"):
            status, said = answered(mine, uid, path)
            assert (status, json.loads(said)["where"]) == (422, "spec.checkpoint.resumeFrom")
            assert answered(mine, nowhere, path) == (status, said)
        assert answered(anywhere, uid, "/v1/jobs")[0] == (201 if whole else 422)

    def test_retries_with_its_own_checkpoints(self, service: Service) -> None:
        """What an administrator let begin elsewhere is not begun there again by somebody who may not look there."""
        uid = add_job(service, namespace="other").uid
        add_checkpoint(service.settings.runs / uid, 1, 4)
        manifest = job_manifest(namespace="mine")
        manifest["spec"]["checkpoint"] = {"resumeFrom": f"out://{uid}/1/4"}
        made = client_of(service, EDITOR).post("/v1/jobs", json=manifest).json()["metadata"]["uid"]
        service.write(made, lambda c: jobs.enter_phase(c, made, Phase.FAILED, "Because", "", 0.0))
        assert client_of(service, EDITOR, "mine").post("/v1/jobs/mine/tiny/retry").status_code == 422
        assert client_of(service, EDITOR).post("/v1/jobs/mine/tiny/retry").status_code == 201

    def test_an_administrator_of_one_makes_no_tokens(self, service: Service) -> None:
        client = client_of(service, ADMIN, "mine")
        assert client.get("/v1/tokens").status_code == 403
        wanted = {"name": "me", "role": "admin"}
        assert client.post("/v1/tokens", json=wanted).status_code == 403


def launched(service: Service, namespace: str) -> str:
    """The uid of a job that reports may come from."""
    uid = add_job(service, namespace=namespace).uid
    service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
    return uid


def report(uid: str) -> dict[str, Any]:
    return {"records": [record.to_manifest() for record in step_records(uid, range(1))]}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8470", "[::1]", "[::1]:8470", "LOCALHOST:1"])
def test_the_service_answers_to_its_names(service: Service, host: str) -> None:
    assert client_of(service, None).get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:80", "x" * 5000]
)
def test_a_strange_host_is_turned_away(service: Service, host: str) -> None:
    """A page that rebinds its name to this address gets nothing."""
    answer = client_of(service).get("/v1/jobs", headers={"Host": host})
    assert answer.status_code == 421
    assert "--allow-host" in answer.json()["remedy"]


def test_answers_carry_their_headers(service: Service) -> None:
    client = TestClient(create_app(service), base_url=HOST)
    for path in ("/healthz", "/v1/jobs", "/nowhere"):
        headers = client.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
