"""Who may do what on a cluster: a table of verbs and routes, and how long an answer is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from penstock.api.http.dependencies import WRITES
from tests.support.fake_apiserver import FakeApiserver
from tests.support.on_cluster import OnCluster, instant, on_cluster
from tests.support.service import NOW, Clock, client_of, job_manifest

READ, ALL = ("get", "list"), ("get", "list", "create", "update", "delete")
NAMED = "/v1/jobs/default/tiny"
ROUTES: list[tuple[str, str, Any, str]] = [
    ("GET", NAMED, None, "get"),
    ("GET", f"{NAMED}/events", None, "get"),
    ("GET", f"{NAMED}/plans", None, "get"),
    ("GET", f"{NAMED}/metrics", None, "get"),
    ("GET", f"{NAMED}/logs", None, "get"),
    ("GET", f"{NAMED}/reproduce", None, "get"),
    ("GET", "/v1/jobs?namespace=default", None, "list"),
    ("GET", "/v1/plans?namespace=default", None, "list"),
    ("POST", "/v1/jobs", job_manifest("new"), "create"),
    ("POST", "/v1/jobs?dryRun=true", job_manifest("new"), "create"),
    ("POST", "/v1/plans", {"job": job_manifest("new")}, "create"),
    ("POST", f"{NAMED}/retry", None, "create"),
    ("POST", f"{NAMED}/suspend", None, "update"),
    ("POST", f"{NAMED}/resume", None, "update"),
    ("POST", f"{NAMED}/checkpoints/1/1/export", None, "update"),
    ("DELETE", NAMED, None, "delete"),
]
"""What a route asks for; the verb is all that it needs, in that namespace alone."""

EVERYWHERE = ["/v1/tokens", "/v1/audit", "/metrics"]


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@pytest.fixture
def here(tmp_path: Path, database: str, fake: FakeApiserver, clock: Clock) -> Iterator[OnCluster]:
    with on_cluster(tmp_path, database, fake, clock) as made:
        job = fake.add_job(job_manifest())
        fake.touch(job, phase="Failed", reason="Because", phaseEnteredAt=instant(NOW), attempt=1)
        made.mirror()
        yield made


def allowed(here: OnCluster, method: str, path: str, body: Any, *rights: tuple[str, str]) -> bool:
    """Whether somebody with these rights and no others gets beyond the door."""
    name = f"p{len(here.fake.tokens)}"
    answer = here.person(name, *rights).request(method, path, json=body)
    assert answer.status_code < 500, answer.text
    return answer.status_code not in (401, 403)


class TestTable:
    @pytest.mark.parametrize(("method", "path", "body", "verb"), ROUTES)
    def test_a_verb_opens_its_routes_and_no_others(
        self, here: OnCluster, method: str, path: str, body: Any, verb: str
    ) -> None:
        for each in ALL:
            assert allowed(here, method, path, body, (each, "default")) == (each == verb), each

    @pytest.mark.parametrize(("method", "path", "body", "verb"), ROUTES)
    def test_in_its_namespace_only(self, here: OnCluster, method: str, path: str, body: Any, verb: str) -> None:
        assert not allowed(here, method, path, body, *((each, "another") for each in ALL))
        assert allowed(here, method, path, body, (verb, ""))

    @pytest.mark.parametrize("path", EVERYWHERE)
    def test_what_is_of_all_needs_a_right_in_all(self, here: OnCluster, path: str) -> None:
        assert not allowed(here, "GET", path, None, *((each, "default") for each in ALL))

    @pytest.mark.parametrize("path", ["/v1/tokens", "/v1/audit"])
    def test_administrators_may_do_everything_to_jobs_everywhere(self, here: OnCluster, path: str) -> None:
        assert not allowed(here, "GET", path, None, *((each, "") for each in ALL))
        assert allowed(here, "GET", path, None, ("*", ""))

    def test_every_write_has_a_verb(self, here: OnCluster) -> None:
        """A new route has to say what it does to jobs, or that it is none of a cluster's people."""
        documented = create_app(here.service).openapi()["paths"]
        writes = {
            operation["operationId"]
            for operations in documented.values()
            for method, operation in operations.items()
            if method in ("post", "put", "patch", "delete")
        }
        of_tokens = {"createToken", "revokeToken", "createLoginLink", "endSession", "logout", "ingest"}
        assert writes == set(WRITES) | of_tokens

    def test_nobody_reports_who_is_no_pod(self, here: OnCluster) -> None:
        assert not allowed(here, "POST", "/v1/ingest", {"records": []}, *((each, "") for each in (*ALL, "*")))


class TestLists:
    def test_one_shows_what_may_be_listed(self, here: OnCluster) -> None:
        for namespace in ("a", "b", "c"):
            here.fake.add_job(job_manifest(f"of-{namespace}", namespace=namespace))
        here.mirror()
        client = here.person("eve", ("list", "a"), ("list", "c"))
        names = [each["metadata"]["name"] for each in client.get("/v1/jobs?sort=name").json()["items"]]
        assert names == ["of-a", "of-c"]
        assert client.get("/v1/jobs?namespace=b").status_code == 403
        everything = here.person("adam", ("list", ""))
        assert len(everything.get("/v1/jobs").json()["items"]) == 4

    def test_history_is_of_the_job_s_namespace(self, here: OnCluster) -> None:
        uid = here.stored().uid
        assert here.person("eve", ("get", "default")).get(f"/v1/history/{uid}").status_code == 200
        assert here.person("adam", ("get", "other")).get(f"/v1/history/{uid}").status_code == 403

    def test_who_may_nothing_sees_no_profiles(self, here: OnCluster) -> None:
        assert here.person("eve").get("/v1/profiles").status_code == 403
        assert here.person("adam", ("list", "default")).get("/v1/profiles").status_code == 200

    def test_pages_are_for_people_too(self, here: OnCluster) -> None:
        client = here.person("eve", ("get", ""), ("list", ""))
        for path in ("/", "/jobs/default/tiny", "/profiles"):
            answer = client.get(path, headers={"Accept": "text/html"})
            assert answer.status_code == 200, answer.text
        assert "Suspend" not in client.get("/jobs/default/tiny", headers={"Accept": "text/html"}).text


class TestHowLong:
    def test_a_right_is_asked_for_once_in_fifteen_seconds(self, here: OnCluster) -> None:
        client = here.person("eve", ("get", "default"))
        for _ in range(10):
            here.clock.now += 1.0
            assert client.get(NAMED).status_code == 200
        asked = [call.body["spec"]["resourceAttributes"] for call in here.fake.calls if "access" in call.place[0]]
        assert [each.get("namespace") for each in asked] == [None, "default"]

    def test_one_that_was_taken_away_is_gone_after_them(self, here: OnCluster) -> None:
        client = here.person("eve", ("get", "default"))
        assert client.get(NAMED).status_code == 200
        here.fake.rights.clear()
        here.clock.now += 16.0
        assert client.get(NAMED).status_code == 403

    def test_so_is_a_token(self, here: OnCluster) -> None:
        client = here.person("eve", ("get", "default"))
        assert client.get(NAMED).status_code == 200
        here.fake.tokens.clear()
        here.clock.now += 16.0
        assert client.get(NAMED).status_code == 401

    def test_the_review_says_who_asks(self, here: OnCluster) -> None:
        here.person("eve", ("get", "default")).get(NAMED)
        (spec, *_) = [call.body["spec"] for call in here.fake.calls if "access" in call.place[0]]
        assert (spec["user"], spec["groups"]) == ("eve", ["people"])


class TestTokens:
    def test_one_for_another_audience_proves_nobody(self, here: OnCluster) -> None:
        client = here.person("eve", ("get", "default"))
        here.fake.tokens["a.token.eve"]["audiences"] = ["https://kubernetes.default.svc"]
        assert client.get(NAMED).status_code == 401

    def test_one_for_pods_is_no_person_s(self, here: OnCluster) -> None:
        """Also if it is meant for people as well: the narrower meaning holds."""
        client = here.person("eve", ("get", "default"))
        here.fake.tokens["a.token.eve"]["audiences"] = ["penstock", "penstock-ingest"]
        assert client.get(NAMED).status_code == 401

    def test_penstock_s_own_go_on_working(self, here: OnCluster) -> None:
        assert client_of(here.service, Role.VIEWER).get(NAMED).status_code == 200
        assert client_of(here.service, Role.VIEWER).delete(NAMED).status_code == 403
        assert here.fake.words("POST") == []

    def test_a_person_s_makes_no_sessions(self, here: OnCluster) -> None:
        client = here.person("eve", *((verb, "") for verb in (*ALL, "*")))
        assert client.post("/v1/login-links").status_code == 403

    def test_who_did_what_is_in_the_audit_log(self, here: OnCluster) -> None:
        here.person("eve", ("delete", "default")).delete(NAMED)
        rows = client_of(here.service).get("/v1/audit").json()["items"]
        assert (rows[0]["identity"], rows[0]["action"], rows[0]["status"]) == ("eve", "deleteJob", 202)
