"""Jobs are made, changed and removed on the cluster; what it refuses is a problem document that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, delete
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from penstock.api.store.schema import idempotency, jobs
from penstock.core.job_policy import SECRETS_LABEL
from penstock.core.records import Progress, Record, RecordKind
from tests.support.fake_apiserver import Call, FakeApiserver, Found, RefusedError
from tests.support.on_cluster import OWN_NAMESPACE, OnCluster, instant, on_cluster
from tests.support.service import HOST, NOW, Clock, client_of, job_manifest

KEY = {"Idempotency-Key": "once"}
EDITOR = tuple((verb, "") for verb in ("get", "list", "create", "update", "delete"))


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@pytest.fixture
def here(tmp_path: Path, database: str, fake: FakeApiserver, clock: Clock) -> Iterator[OnCluster]:
    with on_cluster(tmp_path, database, fake, clock) as made:
        yield made


@pytest.fixture
def client(here: OnCluster) -> TestClient:
    return here.person("eve", *EDITOR)


def ended(job: Found, here: OnCluster, name: str = "Failed") -> None:
    here.fake.touch(job, phase=name, reason="Because", phaseEnteredAt=instant(NOW), attempt=1)
    here.mirror()


class TestCreate:
    def test_it_is_a_custom_resource(self, here: OnCluster, client: TestClient) -> None:
        answer = client.post("/v1/jobs", json=job_manifest(labels={"team": "a"}))
        assert answer.status_code == 201, answer.text
        made = here.fake.job("tiny")
        assert answer.json()["metadata"]["uid"] == made["metadata"]["uid"]
        assert answer.headers["Location"] == "/v1/jobs/default/tiny"
        assert (made["apiVersion"], made["kind"]) == ("penstock.dev/v1alpha1", "PipelineJob")
        assert made["metadata"]["annotations"] == {"penstock.dev/submitted-by": "eve"}
        assert made["metadata"]["labels"] == {"team": "a"}
        assert made["spec"]["training"]["steps"] == 10

    def test_it_is_read_at_once(self, client: TestClient) -> None:
        made = client.post("/v1/jobs", json=job_manifest()).json()
        found = client.get("/v1/jobs/default/tiny")
        assert found.json() == made
        assert client.get(f"/v1/history/{made['metadata']['uid']}").json() == made

    def test_the_mirror_finds_nothing_new(self, here: OnCluster, client: TestClient) -> None:
        client.post("/v1/jobs", json=job_manifest())
        before = here.stored()
        here.mirror()
        assert here.stored() == before
        assert [(kind, body["by"]) for kind, body in here.events(before.uid)] == [("created", "eve")]

    def test_who_asked_is_known_also_if_the_mirror_was_quicker(self, here: OnCluster, client: TestClient) -> None:
        client.post("/v1/jobs", json=job_manifest())
        here.service.write("all", forget_everything)
        here.mirror()
        assert here.stored().created_by == "eve"

    def test_a_dry_run_is_the_cluster_s(self, here: OnCluster, client: TestClient) -> None:
        answer = client.post("/v1/jobs?dryRun=true", json=job_manifest())
        assert answer.status_code == 200, answer.text
        assert answer.json()["spec"]["training"]["steps"] == 10
        (call,) = [call for call in here.fake.calls if call.place[0] == "pipelinejobs"]
        assert call.query["dryRun"] == "All"
        assert client.get("/v1/jobs/default/tiny").status_code == 404

    def test_a_name_is_given_once(self, here: OnCluster, client: TestClient) -> None:
        here.fake.add_job(job_manifest())
        answer = client.post("/v1/jobs", json=job_manifest())
        assert (answer.status_code, answer.json()["where"]) == (409, "metadata.name")

    def test_data_and_schedules_are_the_cluster_s_to_judge(self, client: TestClient) -> None:
        manifest = job_manifest()
        manifest["spec"]["data"]["source"] = "data://corpus/a.txt"
        assert client.post("/v1/jobs", json=manifest).status_code == 201

    def test_a_token_of_penstock_s_own_is_as_good(self, here: OnCluster) -> None:
        assert client_of(here.service).post("/v1/jobs", json=job_manifest()).status_code == 201
        assert here.stored().created_by == "a-admin"


ESCAPE = {
    "image": "evil:1",
    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "penstock-db", "key": "url"}}}],
    "tolerations": [{"operator": "Exists"}],
    "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
}


def asking(namespace: str = "default", **kubernetes: Any) -> dict[str, Any]:
    manifest = job_manifest()
    manifest["metadata"]["namespace"] = namespace
    manifest["spec"]["kubernetes"] = kubernetes
    return manifest


class TestPolicy:
    """The service submits with rights of its own, so it asks what the operator asks before it launches."""

    @pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs?dryRun=true"])
    def test_every_reason_is_told_and_the_cluster_is_not_asked(
        self, here: OnCluster, client: TestClient, path: str
    ) -> None:
        answer = client.post(path, json=asking(OWN_NAMESPACE, **ESCAPE))
        assert (answer.status_code, answer.json()["title"]) == (403, "The policy for jobs does not allow this")
        told = answer.json()
        assert told["where"] == "metadata.namespace"
        for word in ("'evil:1'", "'penstock-db'", "tolerations[0]", "control-plane"):
            assert word in told["detail"]
        assert "jobPolicy.images" in told["remedy"]
        assert not [word for word in here.fake.words("POST") if "pipelinejobs" in word]

    def test_an_administrator_s_token_is_bound_too(self, here: OnCluster) -> None:
        answer = client_of(here.service).post("/v1/jobs", json=asking("kube-system"))
        assert (answer.status_code, answer.json()["where"]) == (403, "metadata.namespace")

    def test_secrets_need_a_label_of_the_namespace(self, here: OnCluster, client: TestClient) -> None:
        manifest = asking(env=ESCAPE["env"])
        answer = client.post("/v1/jobs", json=manifest)
        assert answer.status_code == 403
        assert f"{SECRETS_LABEL}=true" in answer.json()["remedy"]
        here.fake.add("namespaces", {"metadata": {"name": "default", "labels": {SECRETS_LABEL: "true"}}})
        assert client.post("/v1/jobs", json=manifest).status_code == 201

    def test_a_retry_is_asked_about_as_well(self, here: OnCluster, client: TestClient) -> None:
        """It was submitted when its image was allowed, or by kubectl."""
        ended(here.fake.add_job(asking(image="evil:1")), here)
        answer = client.post("/v1/jobs/default/tiny/retry")
        assert (answer.status_code, answer.json()["where"]) == (403, "spec.kubernetes.image")


class TestEditors:
    """An editor's token acts in its namespace; on a machine, where there is one user's, it may leave it out."""

    def test_without_a_namespace_it_reads_and_changes_nothing(self, here: OnCluster) -> None:
        client_of(here.service).post("/v1/jobs", json=job_manifest())
        editor = client_of(here.service, Role.EDITOR)
        assert editor.get("/v1/jobs/default/tiny").status_code == 200
        assert editor.get("/v1/me").json()["role"] == "viewer"
        for method, path in (
            ("POST", "/v1/jobs"),
            ("POST", "/v1/jobs/default/tiny/suspend"),
            ("DELETE", "/v1/jobs/default/tiny"),
        ):
            answer = editor.request(method, path, json=job_manifest("other"))
            assert answer.status_code == 403, path
        assert here.fake.job("tiny")["spec"].get("runPolicy", {}).get("suspend") is None

    def test_neither_does_its_session(self, here: OnCluster) -> None:
        editor = client_of(here.service, Role.EDITOR)
        code = editor.post("/v1/login-links").json()["path"].partition("#")[2]
        origin = {"Origin": HOST}
        browser = TestClient(create_app(here.service), base_url=HOST, headers=origin)
        assert browser.post("/login", data={"code": code}, follow_redirects=False).status_code in (200, 303)
        assert browser.get("/v1/me").json()["role"] == "viewer"
        assert browser.post("/v1/jobs", json=job_manifest()).status_code == 403

    def test_with_one_it_acts_there(self, here: OnCluster) -> None:
        editor = client_of(here.service, Role.EDITOR, "default")
        assert editor.post("/v1/jobs", json=job_manifest()).status_code == 201
        answer = editor.post("/v1/jobs", json=asking("other"))
        assert (answer.status_code, "--namespace other" in answer.json()["remedy"]) == (403, True)

    def test_none_is_made_without(self, here: OnCluster) -> None:
        admin = client_of(here.service)
        answer = admin.post("/v1/tokens", json={"name": "ed", "role": "editor"})
        assert (answer.status_code, answer.json()["where"]) == (422, "namespace")
        assert admin.post("/v1/tokens", json={"name": "ed", "role": "editor", "namespace": "a"}).status_code == 201
        assert admin.post("/v1/tokens", json={"name": "vi", "role": "viewer"}).status_code == 201


class TestOnce:
    def test_a_key_makes_one_job(self, here: OnCluster, client: TestClient) -> None:
        first = client.post("/v1/jobs", json=job_manifest(), headers=KEY)
        again = client.post("/v1/jobs", json=job_manifest(), headers=KEY)
        assert (again.status_code, again.content) == (201, first.content)
        assert here.fake.words("POST").count("POST pipelinejobs default") == 1

    def test_also_if_the_service_died_before_it_wrote_that_down(self, here: OnCluster, client: TestClient) -> None:
        first = client.post("/v1/jobs", json=job_manifest(), headers=KEY)
        here.service.write("all", forget_everything)
        again = client.post("/v1/jobs", json=job_manifest(), headers=KEY)
        assert again.status_code == 201
        assert again.json()["metadata"]["uid"] == first.json()["metadata"]["uid"]

    def test_another_request_of_that_name_does_not_pass_for_it(self, here: OnCluster, client: TestClient) -> None:
        client.post("/v1/jobs", json=job_manifest(), headers=KEY)
        other = client.post("/v1/jobs", json=job_manifest(), headers={"Idempotency-Key": "other"})
        assert other.status_code == 409

    def test_a_user_cannot_write_the_mark(self, here: OnCluster, client: TestClient) -> None:
        mine = {"penstock.dev/request": "forged", "penstock.dev/submitted-by": "root"}
        client.post("/v1/jobs", json=job_manifest(annotations=mine))
        assert here.fake.job("tiny")["metadata"]["annotations"] == {"penstock.dev/submitted-by": "eve"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("refusal", "status", "where", "detail"),
        [
            (
                RefusedError(422, "Invalid", "is invalid", [{"field": "spec.model.heads", "message": "too many"}]),
                422,
                "spec.model.heads",
                "too many",
            ),
            (RefusedError(422, "Invalid", "is invalid"), 422, "", "is invalid"),
            (RefusedError(400, "BadRequest", 'unknown field "spec.x"'), 422, "", 'unknown field "spec.x"'),
            (
                RefusedError(404, "NotFound", 'namespaces "default" not found'),
                422,
                "metadata.namespace",
                "does not exist on the cluster",
            ),
            (RefusedError(403, "Forbidden", "exceeded quota"), 403, "", "the cluster refuses: exceeded quota"),
            (RefusedError(429, "TooManyRequests", "slow down"), 503, "", "the cluster does not answer"),
            (RefusedError(500, "InternalError", "etcd"), 503, "", "the cluster does not answer"),
        ],
    )
    def test_each_is_a_problem(
        self, here: OnCluster, client: TestClient, refusal: RefusedError, status: int, where: str, detail: str
    ) -> None:
        here.fake.hook = on_jobs(refusal)
        answer = client.post("/v1/jobs", json=job_manifest())
        document = answer.json()
        assert (answer.status_code, document["where"]) == (status, where)
        assert document["detail"].startswith(detail)
        assert document["remedy"]
        assert ("Retry-After" in answer.headers) == (status == 503)

    def test_what_core_refuses_is_not_sent(self, here: OnCluster, client: TestClient) -> None:
        manifest = job_manifest()
        manifest["spec"]["model"]["heads"] = 3
        assert client.post("/v1/jobs", json=manifest).status_code == 422
        assert "POST pipelinejobs default" not in here.fake.words("POST")


class TestChanges:
    def test_suspend_and_resume_go_to_the_resource(self, here: OnCluster, client: TestClient) -> None:
        here.fake.add_job(job_manifest())
        for path, wanted in (("suspend", True), ("resume", False)):
            answer = client.post(f"/v1/jobs/default/tiny/{path}")
            assert answer.status_code == 200, answer.text
            assert here.fake.job("tiny")["spec"]["runPolicy"]["suspend"] is wanted
            assert answer.json()["spec"].get("runPolicy", {}).get("suspend", False) is wanted
        told = [(kind, body["by"]) for kind, body in here.events(here.stored().uid)]
        assert told[1:] == [("suspend-requested", "eve"), ("resume-requested", "eve")]

    def test_one_that_is_suspended_or_ended_is_left_alone(self, here: OnCluster, client: TestClient) -> None:
        job = here.fake.add_job(job_manifest())
        client.post("/v1/jobs/default/tiny/suspend")
        client.post("/v1/jobs/default/tiny/suspend")
        ended(job, here)
        client.post("/v1/jobs/default/tiny/resume")
        assert here.fake.words("PATCH") == ["PATCH pipelinejobs default tiny"]

    def test_delete_goes_to_the_resource(self, here: OnCluster, client: TestClient) -> None:
        here.fake.add_job(job_manifest())
        answer = client.delete("/v1/jobs/default/tiny")
        assert answer.status_code == 202, answer.text
        assert here.fake.words("DELETE") == ["DELETE pipelinejobs default tiny"]
        here.mirror()
        assert here.stored().deleted_at is not None
        assert client.delete("/v1/jobs/default/tiny").status_code == 404

    def test_who_deleted_is_told_also_when_it_is_gone_at_once(
        self, here: OnCluster, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The watch may be faster than anyone who asked."""
        job = here.fake.add_job(job_manifest())
        here.mirror()
        asked = type(here.member.kube).delete

        def gone_at_once(*arguments: Any) -> None:
            asked(here.member.kube, *arguments)
            here.member.mirror.remove(job)

        monkeypatch.setattr(type(here.member.kube), "delete", lambda kube, *arguments: gone_at_once(*arguments))
        assert client.delete("/v1/jobs/default/tiny").status_code == 202
        found = client.get("/v1/jobs/default/tiny").json()
        assert found["metadata"]["deletionTimestamp"]
        assert "delete-requested" in [kind for kind, _ in here.events(job["metadata"]["uid"])]

    def test_a_version_guards(self, here: OnCluster, client: TestClient) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        etag = client.get("/v1/jobs/default/tiny").headers["ETag"]
        here.fake.touch(job, progress={"attempt": 1, "step": 1})
        assert client.post("/v1/jobs/default/tiny/suspend", headers={"If-Match": etag}).status_code == 200
        answer = client.delete("/v1/jobs/default/tiny", headers={"If-Match": etag})
        assert answer.status_code == 412
        assert here.fake.words("DELETE") == []

    def test_a_version_guards_also_what_the_mirror_has_not_seen(self, here: OnCluster, client: TestClient) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        etag = client.get("/v1/jobs/default/tiny").headers["ETag"]
        here.fake.touch(job, phase="Running", reason="Bound", phaseEnteredAt=instant(NOW), attempt=1)
        assert client.delete("/v1/jobs/default/tiny", headers={"If-Match": etag}).status_code == 412

    def test_progress_in_between_is_no_change(self, here: OnCluster, client: TestClient) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        etag = client.get("/v1/jobs/default/tiny").headers["ETag"]
        steps = iter(range(3))

        def hook(call: Call) -> None:
            if call.method == "PATCH" and (step := next(steps, None)) is not None:
                here.fake.touch(job, progress={"attempt": 1, "step": step})

        here.fake.hook = hook
        assert client.post("/v1/jobs/default/tiny/suspend", headers={"If-Match": etag}).status_code == 200

    def test_none_that_is_there_is_told(self, client: TestClient) -> None:
        assert client.post("/v1/jobs/default/tiny/suspend").status_code == 404
        assert client.delete("/v1/jobs/default/tiny").status_code == 404


class TestRetry:
    def saved(self, here: OnCluster, uid: str, attempt: int, step: int) -> None:
        told = Progress(step=step, num_steps=10, phase="Running", last_checkpoint=step)
        record = Record(
            uid=uid,
            attempt=attempt,
            source="rank-0",
            sequence=0,
            recorded_at=NOW,
            kind=RecordKind.PROGRESS,
            progress=told,
        )
        assert here.send(f"pod.of.{attempt}", [record]).status_code == 200

    def test_it_goes_on_from_the_newest_checkpoint(self, here: OnCluster, client: TestClient) -> None:
        manifest = job_manifest()
        manifest["spec"]["kubernetes"] = {
            "volumes": {
                "out": {"template": {"size": "1Gi"}},
                "data/corpus": {"template": {"size": "1Gi"}, "reclaim": "Delete"},
            }
        }
        job = here.fake.add_job(manifest)
        for attempt in (1, 2, 3):
            here.fake.touch(job, attempt=attempt, phase="Running", reason="Bound", phaseEnteredAt=instant(NOW))
            here.fake.add_rank(job, attempt, f"pod.of.{attempt}")
            here.mirror()
            if attempt < 3:
                self.saved(here, job["metadata"]["uid"], attempt, 3 * attempt)
        here.fake.touch(job, phase="Failed", reason="Lost", phaseEnteredAt=instant(NOW + 1))
        here.mirror()
        answer = client.post("/v1/jobs/default/tiny/retry")
        assert answer.status_code == 201, answer.text
        spec = here.fake.job("tiny-2")["spec"]
        assert spec["checkpoint"]["resumeFrom"] == f"out://{job['metadata']['uid']}/2/6"
        volumes = spec["kubernetes"]["volumes"]
        assert volumes["out"] == {"claim": "tiny-out"}
        assert volumes["data/corpus"]["reclaim"] == "Delete"
        assert ("retry", {"of": job["metadata"]["uid"], "resumeFrom": spec["checkpoint"]["resumeFrom"]}) in here.events(
            here.stored("tiny-2").uid
        )

    def test_one_that_runs_is_not_retried(self, here: OnCluster, client: TestClient) -> None:
        job = here.fake.add_job(job_manifest())
        ended(job, here, "Running")
        assert client.post("/v1/jobs/default/tiny/retry").status_code == 409

    def test_one_that_saved_nothing_begins_where_it_began(self, here: OnCluster, client: TestClient) -> None:
        ended(here.fake.add_job(job_manifest()), here)
        assert client.post("/v1/jobs/default/tiny/retry").status_code == 201
        assert "checkpoint" not in here.fake.job("tiny-2")["spec"]


def test_files_are_elsewhere(here: OnCluster, client: TestClient) -> None:
    here.fake.add_job(job_manifest())
    here.mirror()
    for path in ("checkpoints", "artifacts"):
        answer = client.get(f"/v1/jobs/default/tiny/{path}")
        assert (answer.status_code, answer.json()["type"]) == (421, "https://penstock.dev/problems/elsewhere")


def on_jobs(refusal: RefusedError) -> Any:
    def hook(call: Call) -> None:
        if call.place[0] == "pipelinejobs":
            raise refusal

    return hook


def forget_everything(connection: Connection) -> None:
    """The service died after the cluster had answered, and before anything was written down."""
    for table in (idempotency, jobs):
        connection.execute(delete(table))
