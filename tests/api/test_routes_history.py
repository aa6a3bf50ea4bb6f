"""Jobs by their uids: all that can be read below a name can be read below a uid, as long as anything is kept."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.client import Client, Past
from tests.support.application import Application, here
from tests.support.filled_job import running_job
from tests.support.service import add_job, client_of

NAMED, BY_UID = "/v1/jobs/{namespace}/{name}", "/v1/history/{uid}"
READ = ("", "/events", "/plans", "/metrics", "/timeline", "/logs", "/checkpoints", "/artifacts")


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service, Role.VIEWER)


def get_paths(app: FastAPI, prefix: str) -> set[str]:
    """What follows the prefix in paths that are read."""
    paths: dict[str, dict[str, object]] = app.openapi()["paths"]
    return {
        path.removeprefix(prefix) for path, methods in paths.items() if path.startswith(prefix) and "get" in methods
    }


def test_all_that_is_read_below_a_name_is_read_below_a_uid(service: Service) -> None:
    app = create_app(service)
    assert get_paths(app, NAMED) == get_paths(app, BY_UID) > set(READ)


@pytest.mark.parametrize("path", READ)
def test_both_tell_the_same(service: Service, client: TestClient, path: str) -> None:
    uid = running_job(service).uid
    by_name, by_uid = client.get(f"/v1/jobs/default/tiny{path}"), client.get(f"/v1/history/{uid}{path}")
    assert by_uid.status_code == 200
    assert by_uid.json() == by_name.json()
    assert by_uid.headers.get("etag") == by_name.headers.get("etag")


@pytest.mark.parametrize("path", READ)
def test_a_deleted_job_is_told_from_the_one_that_has_its_name(service: Service, client: TestClient, path: str) -> None:
    old = running_job(service)
    service.write(old.uid, lambda c: jobs.mark_deleted(c, old.uid, service.clock()))
    add_job(service)
    assert client.get(f"/v1/history/{old.uid}{path}").status_code == 200
    assert client.get(f"/v1/history/{old.uid}").json()["metadata"]["uid"] == old.uid
    assert client.get("/v1/jobs/default/tiny").json()["metadata"]["uid"] != old.uid


def test_what_reproduces_a_job_that_was_deleted(service: Service, client: TestClient) -> None:
    old = add_job(service)
    named = client.get("/v1/jobs/default/tiny/reproduce").json()
    service.write(old.uid, lambda c: jobs.mark_deleted(c, old.uid, service.clock()))
    found = client.get(f"/v1/history/{old.uid}/reproduce").json()
    assert found["manifest"]["spec"] == named["manifest"]["spec"]
    assert found["manifest"]["metadata"]["name"] == "tiny", "the name is free again"


@pytest.mark.parametrize("path", [*READ, "/reproduce", "/artifacts/metrics.jsonl"])
def test_a_namespace_sees_its_own_alone(service: Service, path: str) -> None:
    uid = running_job(service).uid
    assert client_of(service, Role.VIEWER, "other").get(f"/v1/history/{uid}{path}").status_code == 403
    assert client_of(service, Role.VIEWER, "default").get(f"/v1/history/{uid}{path}").status_code != 403


@pytest.mark.parametrize("path", [*READ, "/reproduce", "/artifacts/metrics.jsonl"])
def test_a_uid_that_no_job_has(client: TestClient, path: str) -> None:
    assert client.get(f"/v1/history/nobody{path}").status_code == 404


def test_the_client_reads_a_job_that_was_deleted(service: Service) -> None:
    old = running_job(service)
    service.write(old.uid, lambda c: jobs.mark_deleted(c, old.uid, service.clock()))
    with Client(here(service), transport=Application(service)) as client:
        past = Past(uid=old.uid)
        assert client.get(past).uid == old.uid
        assert [event.kind for event in client.events(past)][-1] == "deleted"
        assert client.logs(past).items
