"""Jobs over REST."""

from __future__ import annotations

import base64
import gc
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import attempts, jobs
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Launch
from penstock.core.serialization import yamltext
from tests.support.service import Clock, add_job, client_of, job_manifest, new_service, step_records


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


SMALL_VALUES = b"[" + b"[]," * 2_800_000 + b"[]]"
"""8 MB, which would take 200 MB of memory as lists."""

YAML_BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n".encode() for i in range(1, 10)
)


DEEP_CURSOR = base64.urlsafe_b64encode(b"[" * 40_000).decode()


def problem(answer: Any, status: int, kind: str) -> dict[str, Any]:
    """The problem document, checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"].endswith(f"/{kind}")
    assert document["status"] == status
    assert document["detail"]
    assert document["remedy"]
    return document


class TestCreate:
    @pytest.mark.parametrize("media", ["application/json", "application/yaml", "text/yaml; charset=utf-8", ""])
    def test_json_and_yaml_make_the_same_job(self, client: TestClient, media: str) -> None:
        text = yamltext.dump(job_manifest()) if "yaml" in media else json.dumps(job_manifest())
        answer = client.post("/v1/jobs", content=text, headers={"Content-Type": media} if media else {})
        assert answer.status_code == 201
        made = answer.json()
        assert made["status"]["phase"] == "Pending"
        assert made["spec"] == PipelineJob.from_manifest(job_manifest()).to_manifest()["spec"]
        assert made["metadata"]["creationTimestamp"] == "2023-11-14T22:13:20Z"
        place = answer.headers["location"]
        assert place == "/v1/jobs/default/tiny"
        again = client.get(place)
        assert again.json() == made
        assert again.headers["etag"] == answer.headers["etag"]
        assert client.get(f"/v1/history/{made['metadata']['uid']}").json() == made

    def test_a_mistake_is_told_with_its_place(self, client: TestClient) -> None:
        manifest = job_manifest()
        manifest["spec"]["model"]["headz"] = 3
        document = problem(client.post("/v1/jobs", json=manifest), 422, "invalid")
        assert document["where"] == "spec.model.headz"
        assert "heads" in document["remedy"]

    def test_all_mistakes_are_told_at_once(self, client: TestClient) -> None:
        manifest = job_manifest()
        manifest["spec"]["model"] |= {"hidden": 100, "heads": 3, "kvHeads": 2}
        manifest["spec"]["training"]["optimizer"] = {"kind": "sgd", "learningRate": 0}
        manifest["spec"]["kubernetes"] = {"queueName": "no name", "ranksPerPod": 3}
        detail = problem(client.post("/v1/jobs", json=manifest), 422, "invalid")["detail"]
        for told in ("not divisible by heads 3", "spec.model.kvHeads", "spec.training.optimizer.kind"):
            assert told in detail
        assert "spec.training.optimizer.learningRate" in detail
        assert "spec.kubernetes.queueName" in detail

    def test_a_taken_name(self, client: TestClient) -> None:
        assert client.post("/v1/jobs", json=job_manifest()).status_code == 201
        document = problem(client.post("/v1/jobs", json=job_manifest()), 409, "name-taken")
        assert document["detail"] == "a job default/tiny exists"

    @pytest.mark.parametrize(
        ("body", "media", "status", "kind"),
        [
            (b"", "application/json", 400, "bad-request"),
            (b"{", "application/json", 400, "bad-request"),
            (b"[1]", "application/json", 422, "invalid"),
            (b'{"a": NaN}', "application/json", 400, "bad-request"),
            (b'{"a": Infinity}', "application/json", 400, "bad-request"),
            (b"[" * 100_000, "application/json", 400, "bad-request"),
            (b"\xff\xfe", "application/json", 400, "bad-request"),
            ("{}".encode("utf-16-be"), "application/json", 400, "bad-request"),
            (b"\xef\xbb\xbf{}", "application/json", 400, "bad-request"),
            (b"a: b: c", "application/yaml", 422, "invalid"),
            (b"!!python/object/apply:os.system ['true']", "application/yaml", 422, "invalid"),
            (YAML_BOMB, "application/yaml", 422, "invalid"),
            (b"a: &a [*a]", "application/yaml", 422, "invalid"),
            (b"- a\n" * 50_000, "application/yaml", 413, "too-large"),
            (b"{" * 10_000, "application/yaml", 422, "invalid"),
            (b"<job/>", "application/xml", 415, "unsupported-media-type"),
            (b"x" * (5 * 2**20), "application/json", 413, "too-large"),
            (SMALL_VALUES[: 4 * 2**20], "application/json", 413, "too-large"),
        ],
        ids=[
            "empty", "half", "list", "nan", "infinity", "deep", "binary", "utf-16", "mark", "yaml", "tag", "bomb",
            "ring", "long yaml", "deep yaml", "xml", "large", "values",
        ],
    )  # fmt: skip
    def test_a_bad_body(self, client: TestClient, body: bytes, media: str, status: int, kind: str) -> None:
        problem(client.post("/v1/jobs", content=body, headers={"Content-Type": media}), status, kind)
        assert client.get("/readyz").status_code == 200

    def test_a_body_without_length_is_counted(self, client: TestClient) -> None:
        endless = (b"x" * 2**20 for _ in range(10))
        answer = client.post("/v1/jobs", content=endless, headers={"Content-Type": "application/json"})
        problem(answer, 413, "too-large")


class TestOnce:
    """The same POST with the same key happens once."""

    def test_a_repeated_submission_gets_the_same_answer(self, client: TestClient) -> None:
        key = {"Idempotency-Key": "mine"}
        answers = [client.post("/v1/jobs", json=job_manifest(), headers=key) for _ in range(2)]
        assert answers[0].status_code == answers[1].status_code == 201
        assert answers[0].content == answers[1].content
        assert answers[0].headers["location"] == answers[1].headers["location"]
        assert len(client.get("/v1/jobs").json()["items"]) == 1

    def test_another_request_with_the_key_is_refused(self, client: TestClient) -> None:
        key = {"Idempotency-Key": "mine"}
        client.post("/v1/jobs", json=job_manifest(), headers=key)
        document = problem(client.post("/v1/jobs", json=job_manifest("other"), headers=key), 409, "conflict")
        assert document["where"] == "Idempotency-Key"

    def test_keys_of_others_are_others(self, service: Service, client: TestClient) -> None:
        key = {"Idempotency-Key": "mine"}
        client.post("/v1/jobs", json=job_manifest(), headers=key)
        other = client_of(service, Role.EDITOR)
        assert other.post("/v1/jobs", json=job_manifest("other"), headers=key).status_code == 201

    def test_what_failed_may_be_tried_again(self, client: TestClient) -> None:
        key = {"Idempotency-Key": "mine"}
        client.post("/v1/jobs", json=job_manifest())
        problem(client.post("/v1/jobs", json=job_manifest(), headers=key), 409, "name-taken")
        client.post("/v1/jobs/default/tiny/suspend", headers={"Idempotency-Key": "other"})
        assert client.post("/v1/jobs", json=job_manifest("next"), headers=key).status_code == 201

    def test_a_report_passes_over_a_key(self, service: Service, client: TestClient) -> None:
        """Its records are numbered: another batch with the same key is kept, and the same one is not kept again."""
        uid = client.post("/v1/jobs", json=job_manifest()).json()["metadata"]["uid"]
        service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
        shipper, records = client_of(service, Role.INGEST), step_records(uid, range(2))
        for part, sequence in ((records[:2], 1), (records[2:], 3), (records[:2], 3)):
            batch = {"records": [record.to_manifest() for record in part]}
            answer = shipper.post("/v1/ingest", json=batch, headers={"Idempotency-Key": "k"})
            assert (answer.status_code, answer.json()) == (200, {"sequence": sequence})


class TestDryRun:
    """What creation would answer, and nothing kept."""

    def test_the_job_is_told_as_it_would_be(self, client: TestClient) -> None:
        proposed = client.post("/v1/jobs?dryRun=true", json=job_manifest(labels={"a": "b"}))
        assert proposed.status_code == 200
        assert "location" not in proposed.headers
        assert client.get("/v1/jobs?deleted=true").json()["items"] == []
        made = client.post("/v1/jobs", json=job_manifest(labels={"a": "b"})).json()
        told = proposed.json()
        assert told["metadata"].pop("uid") != made["metadata"].pop("uid")
        assert told == made

    @pytest.mark.parametrize(
        ("part", "value", "where"),
        [
            ("data", {"source": "data://none/text", "sequenceLength": 32}, "spec.data.source"),
            ("parallelism", {"schedule": "theirs"}, "spec.parallelism.schedule"),
            ("checkpoint", {"resumeFrom": "out://none/1/2"}, "spec.checkpoint.resumeFrom"),
        ],
    )
    def test_what_only_the_service_knows_is_looked_at(
        self, client: TestClient, part: str, value: dict[str, Any], where: str
    ) -> None:
        manifest = job_manifest()
        manifest["spec"][part] = {**manifest["spec"].get(part, {}), **value}
        document = problem(client.post("/v1/jobs?dryRun=true", json=manifest), 422, "invalid")
        assert document["where"] == where

    def test_a_taken_name(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=job_manifest())
        problem(client.post("/v1/jobs?dryRun=true", json=job_manifest()), 409, "name-taken")

    def test_a_key_is_not_used_up(self, client: TestClient) -> None:
        key = {"Idempotency-Key": "mine"}
        assert client.post("/v1/jobs?dryRun=true", json=job_manifest("other"), headers=key).status_code == 200
        assert client.post("/v1/jobs", json=job_manifest(), headers=key).status_code == 201

    def test_it_is_no_change_to_write_down(self, service: Service, client: TestClient) -> None:
        client.post("/v1/jobs?dryRun=true", json=job_manifest())
        client.post("/v1/jobs", json=job_manifest())
        service.write("audit", lambda connection: None)
        entries = client.get("/v1/audit").json()["items"]
        assert [each["status"] for each in entries if each["action"] == "createJob"] == [201]


class TestChange:
    def test_suspend_and_resume(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=job_manifest())
        suspended = client.post("/v1/jobs/default/tiny/suspend")
        assert suspended.json()["spec"]["runPolicy"] == {"suspend": True}
        assert suspended.json()["metadata"]["generation"] == 2
        resumed = client.post("/v1/jobs/default/tiny/resume")
        assert resumed.json()["spec"]["runPolicy"] == {"suspend": False}

    def test_a_version_guards(self, client: TestClient) -> None:
        tag = client.post("/v1/jobs", json=job_manifest()).headers["etag"]
        first = client.post("/v1/jobs/default/tiny/suspend", headers={"If-Match": tag})
        assert first.status_code == 200
        again = client.post("/v1/jobs/default/tiny/resume", headers={"If-Match": tag})
        problem(again, 412, "changed-meanwhile")
        assert (
            client.post("/v1/jobs/default/tiny/resume", headers={"If-Match": first.headers["etag"]}).status_code == 200
        )
        assert client.post("/v1/jobs/default/tiny/suspend", headers={"If-Match": "*"}).status_code == 200

    @pytest.mark.parametrize("tag", ["x", '"-1"', '"99999999999"', '""'])
    def test_a_bad_version(self, client: TestClient, tag: str) -> None:
        client.post("/v1/jobs", json=job_manifest())
        problem(client.post("/v1/jobs/default/tiny/suspend", headers={"If-Match": tag}), 400, "bad-request")

    def test_delete_asks_once(self, client: TestClient, service: Service) -> None:
        uid = client.post("/v1/jobs", json=job_manifest()).json()["metadata"]["uid"]
        for _ in range(2):
            answer = client.delete("/v1/jobs/default/tiny")
            assert answer.status_code == 202
            assert answer.json()["metadata"]["deletionTimestamp"]
        kinds = [each["kind"] for each in client.get("/v1/jobs/default/tiny/events").json()["items"]]
        assert kinds == ["created", "delete-requested"]
        service.write(uid, lambda c: jobs.mark_deleted(c, uid, 0.0))
        problem(client.delete("/v1/jobs/default/tiny"), 404, "not-found")
        assert client.get("/v1/jobs/default/tiny").status_code == 200
        assert client.get("/v1/jobs").json()["items"] == []
        assert len(client.get("/v1/jobs?deleted=true").json()["items"]) == 1

    @pytest.mark.parametrize("method", ["GET", "DELETE"])
    def test_what_is_not_there(self, client: TestClient, method: str) -> None:
        document = problem(client.request(method, "/v1/jobs/default/none"), 404, "not-found")
        assert document["detail"] == "there is no job default/none"

    def test_a_wrong_method(self, client: TestClient) -> None:
        answer = client.patch("/v1/jobs")
        problem(answer, 405, "method-not-allowed")
        assert answer.headers["allow"]

    def test_an_unknown_path(self, client: TestClient) -> None:
        problem(client.get("/v2/jobs"), 404, "not-found")


class TestList:
    def test_pages(self, client: TestClient, service: Service) -> None:
        for i in range(5):
            add_job(service, f"job{i}", labels={"team": "ab"[i % 2]})
        first = client.get("/v1/jobs", params={"limit": 2, "sort": "name"}).json()
        second = client.get("/v1/jobs", params={"limit": 9, "sort": "name", "cursor": first["next"]}).json()
        names = [each["metadata"]["name"] for each in first["items"] + second["items"]]
        assert names == [f"job{i}" for i in range(5)]
        assert second["next"] is None
        found = client.get("/v1/jobs", params={"label": "team=b"}).json()["items"]
        assert [each["metadata"]["name"] for each in found] == ["job3", "job1"]

    @pytest.mark.parametrize(
        "query",
        [
            "cursor=x",
            f"cursor={DEEP_CURSOR}",
            "sort=colour",
            "limit=0",
            "limit=501",
            "limit=x",
            "phase=Dancing",
            "label=x",
            "label=%3Dx",
        ],
    )
    def test_a_bad_question(self, client: TestClient, query: str) -> None:
        document = problem(client.get(f"/v1/jobs?{query}"), 400, "bad-request")
        assert document["where"].startswith(query.partition("=")[0])


class TestIngest:
    @pytest.fixture
    def uid(self, client: TestClient, service: Service) -> str:
        uid: str = client.post("/v1/jobs", json=job_manifest()).json()["metadata"]["uid"]
        service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=1))
        return uid

    @pytest.fixture
    def shipper(self, service: Service) -> TestClient:
        return client_of(service, Role.INGEST)

    def test_progress_shows(self, client: TestClient, shipper: TestClient, uid: str) -> None:
        records = [record.to_manifest() for record in step_records(uid, range(1, 4))]
        for _ in range(2):
            body = gzip.compress(json.dumps({"records": records}).encode())
            answer = shipper.post("/v1/ingest", content=body, headers={"Content-Encoding": "gzip"})
            assert answer.json() == {"sequence": 5}
        progress = client.get("/v1/jobs/default/tiny").json()["status"]["progress"]
        assert (progress["step"], progress["numSteps"], progress["loss"]) == (4, 10, 4.997)

    def test_an_older_attempt_is_taken_in_until_it_is_closed(
        self, shipper: TestClient, service: Service, uid: str
    ) -> None:
        service.write(uid, lambda c: attempts.add(c, uid, Launch(1, 2, None), (), 0.0))
        service.write(uid, lambda c: jobs.add_event(c, uid, "launched", {}, 0.0, attempt=2))
        records = [record.to_manifest() for record in step_records(uid, range(1))]
        assert shipper.post("/v1/ingest", json={"records": records}).json() == {"sequence": 1}
        service.write(uid, lambda c: attempts.close(c, uid, 1, 1.0))
        document = problem(shipper.post("/v1/ingest", json={"records": records}), 409, "stale-attempt")
        assert "stop sending" in document["remedy"]

    def test_an_attempt_that_is_not_known_yet(self, shipper: TestClient, uid: str) -> None:
        records = [record.to_manifest() for record in step_records(uid, range(1), attempt=7)]
        answer = shipper.post("/v1/ingest", json={"records": records})
        assert "again after" in problem(answer, 425, "early-attempt")["remedy"]
        assert answer.headers["Retry-After"] == "2"

    @pytest.mark.parametrize(
        ("body", "encoding", "status", "kind"),
        [
            (b"", "identity", 400, "bad-request"),
            (b"[]", "identity", 422, "invalid"),
            (b'{"records": []}', "identity", 422, "invalid"),
            (b'{"records": [{}]}', "identity", 422, "invalid"),
            (b'{"records": [1]}', "identity", 422, "invalid"),
            (b'{"records": {}}', "identity", 422, "invalid"),
            (b"no gzip", "gzip", 400, "bad-request"),
            (gzip.compress(b"{}" * 1000)[:-9], "gzip", 400, "bad-request"),
            (gzip.compress(b" " * (40 * 2**20)), "gzip", 413, "too-large"),
            (gzip.compress(SMALL_VALUES), "gzip", 413, "too-large"),
            (b"{}", "br", 400, "bad-request"),
        ],
        ids=["empty", "list", "none", "fields", "number", "mapping", "no gzip", "cut", "bomb", "values", "brotli"],
    )
    def test_a_bad_batch(self, shipper: TestClient, body: bytes, encoding: str, status: int, kind: str) -> None:
        answer = shipper.post("/v1/ingest", content=body, headers={"Content-Encoding": encoding})
        problem(answer, status, kind)

    def test_a_refused_batch_is_not_kept(self, shipper: TestClient) -> None:
        """Nor until garbage is collected: a few hundred of them come sooner."""
        body, headers = gzip.compress(SMALL_VALUES), {"Content-Encoding": "gzip"}
        shipper.post("/v1/ingest", content=body, headers=headers)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                problem(shipper.post("/v1/ingest", content=body, headers=headers), 413, "too-large")
            assert tracemalloc.get_traced_memory()[0] < len(SMALL_VALUES)
        finally:
            tracemalloc.stop()
            gc.enable()


class TestTokens:
    def test_made_used_listed_revoked(self, client: TestClient, service: Service) -> None:
        wanted = {"name": "ci", "role": "editor", "lifetimeSeconds": 60}
        made = client.post("/v1/tokens", json=wanted).json()
        bearer = {"Authorization": f"Bearer {made['token']}"}
        plain = client_of(service, None)
        assert plain.get("/v1/jobs", headers=bearer).status_code == 200
        listed = client.get("/v1/tokens").json()["items"]
        assert "ci" in [each["name"] for each in listed]
        assert made["token"] not in json.dumps(listed)
        gone = client.delete(f"/v1/tokens/{made['id']}").json()
        assert gone["revokedAt"]
        assert plain.get("/v1/jobs", headers=bearer).status_code == 401

    @pytest.mark.parametrize(
        "wanted",
        [
            {"name": "x"},
            {"name": "X Y", "role": "admin"},
            {"name": "x", "role": "king"},
            {"name": "x", "role": "admin", "colour": 1},
            {"name": "x", "role": "admin", "lifetimeSeconds": -1},
        ],
    )
    def test_a_bad_wish(self, client: TestClient, wanted: dict[str, Any]) -> None:
        problem(client.post("/v1/tokens", json=wanted), 422, "invalid")

    def test_no_such_token(self, client: TestClient) -> None:
        problem(client.delete("/v1/tokens/x"), 404, "not-found")
