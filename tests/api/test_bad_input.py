"""What should never be sent, on both databases: each gets its problem document, and the service goes on.

`docs/threat-model.md` says which answer belongs to what; the tests of other files that it names are not repeated here.
"""

from __future__ import annotations

import copy
import gzip
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.core.serialization import yamltext
from tests.support.service import add_job, browser_of, client_of, job_manifest, new_service, step_records


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    """Of an administrator; whatever the test sent, the service has to be alive and sound after it."""
    made = client_of(service)
    yield made
    assert made.get("/readyz").status_code == 200
    assert made.post("/v1/jobs", json=job_manifest("afterwards")).status_code == 201


def refused(answer: Any, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"].endswith(f"/{kind}")
    assert document["remedy"]
    return document


def changed(path: str, value: Any) -> dict[str, Any]:
    """A manifest with another value at this path."""
    manifest = copy.deepcopy(job_manifest())
    *parents, last = path.split(".")
    place = manifest
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return manifest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata", []),
        ("metadata.name", 7),
        ("metadata.labels", {"a": 1}),
        ("spec", None),
        ("spec.model", "llama"),
        ("spec.model.layers", "2"),
        ("spec.model.layers", 2.5),
        ("spec.model.layers", True),
        ("spec.training.steps", [10]),
        ("spec.training.optimizer", {"learningRate": "fast"}),
        ("spec.runPolicy", {"suspend": "no"}),
    ],
)
def test_a_wrong_type_is_told_with_its_place(client: TestClient, path: str, value: Any) -> None:
    document = refused(client.post("/v1/jobs", json=changed(path, value)), 422, "invalid")
    assert path.split(".")[-1] in document["where"] + document["detail"]


@pytest.mark.parametrize("path", ["nonsense", "metadata.nonsense", "spec.nonsense", "spec.runPolicy.nonsense"])
def test_an_unknown_field_is_told_with_its_place(client: TestClient, path: str) -> None:
    assert refused(client.post("/v1/jobs", json=changed(path, 1)), 422, "invalid")["where"] == path


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_a_number_that_is_none_is_refused_in_json(client: TestClient, text: str) -> None:
    body = json.dumps(changed("spec.training.optimizer", {"learningRate": "@"})).replace('"@"', text)
    answer = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["detail"]


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e999"])
def test_a_number_that_is_none_is_refused_in_yaml(client: TestClient, number: str) -> None:
    body = yamltext.dump(changed("spec.training.optimizer", {"learningRate": "@"})).replace("'@'", number)
    assert number in body
    answer = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/yaml"})
    refused(answer, 422, "invalid")


@pytest.mark.parametrize("size", [10**19, -(10**19), 10**300])
def test_a_number_that_no_column_holds_is_refused(client: TestClient, size: int) -> None:
    for path in ("spec.runPolicy.priority", "spec.training.steps", "spec.runPolicy.ttlSecondsAfterFinished"):
        refused(client.post("/v1/jobs", json=changed(path, size)), 422, "invalid")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.model.layers", 10**9),
        ("spec.model.hidden", 2**30),
        ("spec.model.vocab", 10**15),
        ("spec.resources.ranks", 10**18),
        ("spec.data.sequenceLength", 2**40),
        ("spec.resources.memoryPerRank", "9" * 5_000),
        ("spec.parallelism.slices", [1] * 100_000),
        ("spec.parallelism.schedule", "x" * 100_000),
        ("spec.kubernetes.env", [{"name": "a"}] * 1_000),
        ("metadata.labels", {"<img src=x>": "a"}),
        ("metadata.labels", {"a": "not a label selector"}),
        ("metadata.annotations", {"a": "x" * 300_000}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_beyond_a_maximum_is_refused_with_its_place(client: TestClient, path: str, value: Any) -> None:
    document = refused(client.post("/v1/jobs", json=changed(path, value)), 422, "invalid")
    assert document["where"].startswith(path)
    assert len(document["detail"]) < 400


@pytest.mark.parametrize("media", ["application/json", "application/yaml"])
def test_a_number_of_thousands_of_digits_is_refused_in_plain_words(client: TestClient, media: str) -> None:
    body = json.dumps(changed("spec.training.steps", "@")).replace('"@"', "1" * 5_000)
    answer = client.post("/v1/jobs", content=body, headers={"Content-Type": media})
    assert answer.status_code in (400, 422)
    assert "digits" in answer.json()["detail"]
    assert "set_int_max_str_digits" not in answer.text


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\ud800"], ids=["nul", "nul inside", "half a surrogate"])
@pytest.mark.parametrize("path", ["metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations"])
def test_text_that_no_database_keeps_is_refused(client: TestClient, path: str, text: str) -> None:
    value = {"a": text} if path.endswith("s") else text
    answer = client.post("/v1/jobs", content=json.dumps(changed(path, value)))
    refused(answer, 422, "invalid")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs?name=%00",
        "/v1/jobs?namespace=%00",
        "/v1/jobs?label=a%3D%00",
        "/v1/jobs/default/%00",
        "/v1/jobs/%00/x/events",
        "/v1/history/%00",
        "/v1/jobs/default/tiny/metrics?series=%00",
    ],
)
def test_text_that_no_database_keeps_is_not_looked_for(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (200, 400, 404), answer.text


def test_a_token_of_such_a_namespace_is_refused(client: TestClient) -> None:
    wanted = {"name": "x", "role": "viewer", "namespace": "a\x00"}
    refused(client.post("/v1/tokens", json=wanted), 422, "invalid")


def test_a_log_line_of_any_bytes_is_kept(service: Service, client: TestClient) -> None:
    """Ranks print what they like, and anyone who refused it would stop all that comes after."""
    uid = add_job(service).uid
    service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
    record = {"uid": uid, "attempt": 1, "source": "rank-0", "sequence": 0, "recordedAt": 0.0, "kind": "log"}
    line = {"log": {"rank": 0, "level": "INFO", "message": "a\x00b\ud800c"}}
    body = gzip.compress(json.dumps({"records": [{**record, **line}]}).encode())
    answer = client_of(service, Role.INGEST).post("/v1/ingest", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 200, answer.text
    (told,) = client.get("/v1/jobs/default/tiny/logs").json()["items"]
    assert told["message"].startswith("a")


@pytest.mark.parametrize(
    "source",
    [
        "/etc",
        "../..",
        "~/secrets",
        "file:///etc",
        "data://none",
        "data://text/../..",
        "data://../text",
        "data://text/%2e%2e",
        "out://../1/2",
        "models://../x",
        "http://169.254.169.254/",
    ],
)
def test_a_path_of_the_machine_is_refused(client: TestClient, source: str) -> None:
    document = refused(client.post("/v1/jobs", json=changed("spec.data.source", source)), 422, "invalid")
    assert "root:" not in json.dumps(document)
    assert document["where"] == "spec.data.source"


@pytest.mark.parametrize(
    "path", ["/v1/jobs/../../etc/passwd", "/v1/jobs/%2e%2e/%2e%2e", "/v1/jobs/..%2f..%2fetc/passwd", "//etc/passwd"]
)
def test_a_path_that_climbs_finds_nothing(client: TestClient, path: str) -> None:
    refused(client.get(path), 404, "not-found")


def cursors() -> Iterator[str]:
    import base64

    values: tuple[Any, ...] = (
        ["-created", 1],
        ["name", "a", 1],
        ["-created", None, None],
        ["-created", "\x00", 1],
        {},
        7,
    )
    for value in values:
        yield base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    yield base64.urlsafe_b64encode(json.dumps(["-created", 10**30, 10**30]).encode()).decode().rstrip("=")
    yield from ("x", "%00", "é", "=" * 9, "A" * 512)


@pytest.mark.parametrize("cursor", list(cursors()))
def test_a_bad_cursor_is_refused(client: TestClient, cursor: str) -> None:
    answer = client.get(f"/v1/jobs?cursor={urllib.parse.quote(cursor)}")
    assert refused(answer, 400, "bad-request")["where"] == "cursor"


@pytest.mark.parametrize(("field", "value"), [("apiVersion", "penstock.dev/v9"), ("apiVersion", 1), ("kind", "Pod")])
def test_a_manifest_of_another_version_is_refused(client: TestClient, field: str, value: Any) -> None:
    assert refused(client.post("/v1/jobs", json=changed(field, value)), 422, "invalid")["where"] == field


def test_records_of_another_version_are_refused(service: Service, client: TestClient) -> None:
    uid = add_job(service).uid
    shipper = client_of(service, Role.INGEST)
    for field, value in {"kind": "hologram", "nonsense": 1, "sequence": -1, "attempt": "1", "uid": 3}.items():
        record = {**step_records(uid, range(1))[0].to_manifest(), field: value}
        refused(shipper.post("/v1/ingest", json={"records": [record]}), 422, "invalid")


def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    """SQLite is allowed no further page, which is how it finds a full disk; reading goes on, and once there is room
    again so does writing.
    """
    service = new_service(tmp_path)
    client = client_of(service)
    assert client.post("/v1/jobs", json=job_manifest("first")).status_code == 201

    def fill(connection: Any, record: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # not below what there is

    service.engine.dispose()
    event.listen(service.engine, "connect", fill)
    answers = [client.post("/v1/jobs", json=job_manifest(f"job{i}", annotations={"a": "x" * 9000})) for i in range(9)]
    document = refused(answers[-1], 507, "storage-full")
    assert "free some space" in document["remedy"]
    assert client.get("/v1/jobs/default/first").status_code == 200
    assert client.get("/readyz").status_code == 200
    event.remove(service.engine, "connect", fill)
    service.engine.dispose()
    assert client.post("/v1/jobs", json=job_manifest("last")).status_code == 201
    names = [each["metadata"]["name"] for each in client.get("/v1/jobs").json()["items"]]
    kept = [each.json()["metadata"]["name"] for each in answers if each.status_code == 201]
    assert sorted(names) == sorted(["first", "last", *kept])
    service.close()


def test_a_post_of_another_site_changes_nothing(service: Service, client: TestClient) -> None:
    """By a form, which needs nobody's leave; by a page of another port, which has the same cookies; by nobody."""
    for origin in ("http://evil.example", "http://localhost:1", "null", None):
        browser = browser_of(service, origin=origin)
        for media in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            answer = browser.post("/v1/jobs", content=json.dumps(job_manifest()), headers={"Content-Type": media})
            refused(answer, 403, "cross-origin")
    assert client.get("/v1/jobs").json()["items"] == []


def test_another_site_is_not_let_read(service: Service, client: TestClient) -> None:
    """No answer allows it, to whatever is asked; so a browser does not send what needs leave."""
    for method in ("GET", "OPTIONS", "POST"):
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "DELETE"}
        answer = client.request(method, "/v1/jobs", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
