"""A browser from its link to its end, by real HTTP; and what the service keeps of it all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from penstock.api.auth.identity import Role
from penstock.api.http.credentials import COOKIE
from penstock.api.service import Service
from penstock.api.store import jobs, sessions
from penstock.api.store.schema import metadata
from penstock.api.store.sessions import LINK_SECONDS, SESSION_SECONDS
from tests.support.listening import answering, bearer
from tests.support.service import Clock, add_job, browser_of, client_of, job_manifest, session_of


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with answering(service) as found:
        yield found


@pytest.fixture
def browser(url: str) -> Iterator[httpx.Client]:
    """Keeps cookies and sends none elsewhere; the Origin is the test's to send."""
    with httpx.Client(base_url=url, trust_env=False) as made:
        yield made


def new_code(service: Service, url: str, role: Role = Role.EDITOR) -> str:
    """Of a link that a token of that role asked for."""
    answer = httpx.post(f"{url}/v1/login-links", headers=bearer(service, role), trust_env=False)
    assert answer.status_code == 201
    path, _, code = answer.json()["path"].partition("#")
    assert path == "/login"
    return str(code)


def sign_in(browser: httpx.Client, code: str, origin: str | None) -> httpx.Response:
    return browser.post("/login", data={"code": code}, headers={"Origin": origin} if origin else {})


def test_from_the_link_to_the_end(service: Service, url: str, browser: httpx.Client) -> None:
    page = browser.get("/login")
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    code = new_code(service, url)
    answer = sign_in(browser, code, url)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    me = browser.get("/v1/me").json()
    assert (me["name"], me["role"], me["namespace"]) == ("a-editor", "editor", None)
    own = {"Origin": url}
    assert browser.post("/v1/jobs", json=job_manifest(), headers=own).status_code == 201
    assert service.read(lambda c: jobs.find(c, "default", "tiny")).created_by == "a-editor"
    assert [each["id"] for each in browser.get("/v1/sessions").json()["items"]] == [me["session"]]
    ended = browser.post("/v1/logout", headers=own)
    assert ended.json()["id"] == me["session"]
    assert COOKIE not in browser.cookies
    assert browser.get("/v1/me").status_code == 401


def test_the_cookie_is_for_this_service_alone(service: Service, url: str, browser: httpx.Client) -> None:
    cookie = sign_in(browser, new_code(service, url), url).headers["set-cookie"]
    name, _, rest = cookie.partition("=")
    secret, *attributes = rest.split("; ")
    assert name == COOKIE
    assert set(attributes) == {"HttpOnly", f"Max-Age={SESSION_SECONDS:.0f}", "Path=/", "SameSite=strict"}
    assert service.read(lambda c: sessions.by_secret(c, secret)) is not None


def test_opening_the_page_uses_nothing_up(service: Service, url: str, browser: httpx.Client) -> None:
    """A chat program that looks at a link before anybody does."""
    code = new_code(service, url)
    for method in ("GET", "HEAD"):
        browser.request(method, "/login", params={"code": code})
    assert sign_in(browser, code, url).status_code == 303


@pytest.mark.parametrize("body", [b"", b"code=", b"code=x", b"code=psl_" + b"x" * 5000, b"\xff", b"a=1&" * 9, b"{}"])
def test_what_is_no_code_is_told_so(url: str, browser: httpx.Client, body: bytes) -> None:
    answer = browser.post("/login", content=body, headers={"Origin": url})
    assert answer.status_code == 403
    assert "penstock ui" in answer.text
    assert "set-cookie" not in answer.headers


def test_a_code_opens_once_and_not_late(service: Service, url: str, browser: httpx.Client, clock: Clock) -> None:
    code = new_code(service, url)
    assert sign_in(browser, code, url).status_code == 303
    assert sign_in(browser, code, url).status_code == 403
    late = new_code(service, url)
    clock.now += LINK_SECONDS
    assert sign_in(browser, late, url).status_code == 403


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1"])
def test_another_site_signs_nobody_in(service: Service, url: str, browser: httpx.Client, origin: str | None) -> None:
    answer = sign_in(browser, new_code(service, url), origin)
    assert answer.json()["type"].endswith("/cross-origin")
    assert not browser.cookies


def test_another_site_s_post_by_a_real_cookie_changes_nothing(
    service: Service, url: str, browser: httpx.Client
) -> None:
    """SameSite counts every port of a host as the same site: the Origin does not."""
    sign_in(browser, new_code(service, url), url)
    another_port = {"Origin": "http://127.0.0.1:9", "Content-Type": "text/plain"}
    assert browser.post("/v1/jobs", content=json.dumps(job_manifest()), headers=another_port).status_code == 403
    assert browser.get("/v1/jobs").json()["items"] == []


def test_who_signs_in_anew_leaves_no_session_behind(service: Service, url: str, browser: httpx.Client) -> None:
    sign_in(browser, new_code(service, url), url)
    before = browser.get("/v1/me").json()["session"]
    sign_in(browser, new_code(service, url, Role.VIEWER), url)
    assert browser.get("/v1/me").json()["role"] == "viewer"
    assert [each.id for each in service.read(lambda c: sessions.open_sessions(c, service.clock()))] != [before]


def test_a_session_makes_no_links(service: Service) -> None:
    answer = browser_of(service).post("/v1/login-links")
    assert answer.status_code == 403
    assert "the token" in answer.json()["remedy"]


def test_a_code_passes_over_a_key(service: Service, url: str, browser: httpx.Client) -> None:
    """It opens once with or without one: an answer that is remembered would hold the session's secret."""
    code, headers = new_code(service, url), {"Origin": url, "Idempotency-Key": "k"}
    answers = [browser.post("/login", data={"code": code}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 403]
    again = browser.post("/login", data={"code": new_code(service, url)}, headers=headers)
    assert again.status_code == 303


def test_a_token_is_not_logged_out(service: Service) -> None:
    answer = client_of(service).post("/v1/logout")
    assert answer.status_code == 409
    assert answer.json()["where"] == "Cookie"


class TestOwn:
    """Whose sessions one sees and ends."""

    def test_one_s_own(self, service: Service) -> None:
        mine, other = browser_of(service, Role.EDITOR), browser_of(service, Role.EDITOR)
        (listed,) = mine.get("/v1/sessions").json()["items"]
        (foreign,) = other.get("/v1/sessions").json()["items"]
        assert mine.delete(f"/v1/sessions/{foreign['id']}").status_code == 404
        assert mine.delete(f"/v1/sessions/{listed['id']}").status_code == 200
        assert mine.get("/v1/me").status_code == 401
        assert other.get("/v1/me").status_code == 200

    def test_an_administrator_s_are_everybody_s(self, service: Service) -> None:
        theirs, _ = session_of(service, Role.VIEWER)
        admin = client_of(service)
        assert theirs.id in [each["id"] for each in admin.get("/v1/sessions").json()["items"]]
        assert admin.delete(f"/v1/sessions/{theirs.id}").json()["id"] == theirs.id
        assert admin.get("/v1/sessions").json()["items"] == []

    def test_an_administrator_of_one_namespace_sees_no_others(self, service: Service) -> None:
        session_of(service, Role.VIEWER)
        assert client_of(service, Role.ADMIN, "team").get("/v1/sessions").json()["items"] == []


class TestSecrets:
    """The database keeps none, so a copy of it opens nothing."""

    @pytest.mark.parametrize(
        ("path", "body", "field"),
        [("/v1/login-links", None, "path"), ("/v1/tokens", {"name": "ci", "role": "viewer"}, "token")],
    )
    def test_one_is_told_again_and_kept_nowhere(
        self, service: Service, path: str, body: dict[str, Any] | None, field: str
    ) -> None:
        client = client_of(service)
        answers = [client.post(path, json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[0].json() == answers[1].json()
        told = answers[0].json()[field]
        assert re.fullmatch(r"(/login#psl|pst)_[\w-]{43}", told)
        kept = everything(service)
        for secret in (told.rpartition("#")[2], client.headers["Authorization"].partition(" ")[2]):
            assert secret not in kept

    def test_a_repeated_token_opens(self, service: Service) -> None:
        client, wanted = client_of(service), {"name": "ci", "role": "viewer"}
        key = {"Idempotency-Key": "k"}
        secret = [client.post("/v1/tokens", json=wanted, headers=key).json()["token"] for _ in range(2)][1]
        answer = client_of(service, None).get("/v1/me", headers={"Authorization": f"Bearer {secret}"})
        assert answer.json()["name"] == "ci"

    def test_a_key_is_its_token_s(self, service: Service) -> None:
        """Two tokens of one name share nothing: another's answer would tell what this one may not know."""
        key, wanted = {"Idempotency-Key": "k"}, {"name": "ci", "role": "viewer"}
        made = [client_of(service).post("/v1/tokens", json=wanted, headers=key).json()["token"] for _ in range(2)]
        assert len(set(made)) == 2

    def test_a_session_s_is_kept_nowhere(self, service: Service, url: str, browser: httpx.Client) -> None:
        sign_in(browser, new_code(service, url), url)
        assert browser.cookies[COOKIE] not in everything(service)


def everything(service: Service) -> str:
    """Every value of every table."""
    service.write("audit", lambda connection: None)  # what was to be written down by now is
    found = service.read(lambda c: [row for table in metadata.sorted_tables for row in c.execute(select(table))])
    return "\n".join(str(value) for row in found for value in row)


class TestPage:
    """What the login page consists of."""

    def test_it_runs_nothing_that_its_policy_forbids(self, url: str, browser: httpx.Client) -> None:
        page = browser.get("/login")
        assert "default-src 'none'; script-src 'self';" in page.headers["content-security-policy"]
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|https?:", page.text)
        files = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
        assert len(files) == 6
        for path in files:
            assert browser.get(path).status_code == 200

    def test_a_form_of_ours_is_sent_with_an_origin(self, url: str, browser: httpx.Client) -> None:
        """Fetch, "append a request Origin header": under the policy no-referrer it would be null."""
        assert browser.get("/login").headers["referrer-policy"] == "same-origin"

    @pytest.mark.parametrize("path", ["../login.html", "..%2flogin.html", "%2e%2e/login.html", "/etc/passwd", "x", ""])
    def test_nothing_else_is_served(self, url: str, browser: httpx.Client, path: str) -> None:
        answer = browser.get(f"/static/{path}")
        assert answer.status_code == 404
        assert answer.json()["type"].endswith("/not-found")


class TestAudit:
    def entries(self, service: Service) -> list[dict[str, Any]]:
        service.write("audit", lambda connection: None)
        items: list[dict[str, Any]] = client_of(service).get("/v1/audit").json()["items"]
        return items

    def audited(self, service: Service) -> list[tuple[str, str, int]]:
        return [(each["identity"], each["action"], each["status"]) for each in self.entries(service)]

    def test_changes_and_refusals_are_written_down(self, service: Service) -> None:
        admin, viewer = client_of(service), client_of(service, Role.VIEWER)
        admin.post("/v1/jobs", json=job_manifest(namespace="team"))
        admin.post("/v1/jobs/team/tiny/suspend")
        viewer.post("/v1/jobs/team/tiny/suspend")
        client_of(service, None).delete("/v1/jobs/team/tiny")
        browser_of(service, origin=None).delete("/v1/jobs/team/tiny")
        assert self.audited(service) == [
            ("a-admin", "deleteJob", 403),
            ("", "deleteJob", 401),
            ("a-viewer", "suspendJob", 403),
            ("a-admin", "suspendJob", 200),
            ("a-admin", "createJob", 201),
        ]
        first = self.entries(service)[-1]
        assert (first["method"], first["path"], first["address"]) == ("POST", "/v1/jobs/team/tiny", "testclient")
        assert first["at"] == "2023-11-14T22:13:20Z"
        assert self.entries(service)[1]["namespace"] == "team"

    def test_what_changes_nothing_is_not(self, service: Service) -> None:
        admin = client_of(service)
        admin.get("/v1/jobs")
        client_of(service, None).get("/v1/jobs")
        admin.post("/v1/jobs", json={})
        admin.post("/nowhere")
        admin.delete("/v1/jobs/default/none")
        assert self.audited(service) == []

    def test_reports_are_not_but_those_that_were_refused_are(self, service: Service) -> None:
        uid = add_job(service).uid
        service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
        record = {"uid": uid, "attempt": 1, "source": "rank-0", "sequence": 0, "recordedAt": 0.0, "kind": "log"}
        line = {"log": {"rank": 0, "level": "INFO", "message": "hello"}}
        body = {"records": [{**record, **line}]}
        assert client_of(service, Role.INGEST).post("/v1/ingest", json=body).status_code == 200
        assert client_of(service).post("/v1/ingest", json=body).status_code == 403
        assert self.audited(service) == [("a-admin", "ingest", 403)]

    def test_pages(self, service: Service) -> None:
        admin = client_of(service)
        for number in range(5):
            admin.post("/v1/jobs", json=job_manifest(f"job{number}"))
        service.write("audit", lambda connection: None)
        first = admin.get("/v1/audit", params={"limit": 3}).json()
        second = admin.get("/v1/audit", params={"limit": 3, "cursor": first["next"]}).json()
        paths = [each["path"] for each in first["items"] + second["items"]]
        assert paths == [f"/v1/jobs/default/job{number}" for number in range(4, -1, -1)]
        assert second["next"] is None

    @pytest.mark.parametrize("query", ["cursor=x", "cursor=-1", f"cursor={'9' * 19}", "limit=0", "limit=1001"])
    def test_a_bad_question(self, service: Service, query: str) -> None:
        answer = client_of(service).get(f"/v1/audit?{query}")
        assert answer.status_code == 400
        assert answer.json()["where"] == query.partition("=")[0]

    def test_no_body_and_no_query_is_kept(self, service: Service) -> None:
        admin = client_of(service)
        admin.post("/v1/tokens?note=hush", json={"name": "hush-hush", "role": "viewer"})
        told = json.dumps(self.entries(service))
        assert "createToken" in told
        assert "hush" not in told

    def test_a_service_that_ends_still_answers(self, service: Service, caplog: pytest.LogCaptureFixture) -> None:
        viewer = client_of(service, Role.VIEWER)
        service.writer.close()
        assert viewer.delete("/v1/jobs/default/tiny").status_code == 403
        assert "audit entry is lost" in caplog.text
