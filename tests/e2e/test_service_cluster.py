"""The service on a real cluster: whose token it is, what the cluster refuses, who owns which field of a status.

Nothing here runs a trainer: ranks are pods that print the token which was projected into them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.cluster.kube import Cluster as ServiceCluster
from penstock.api.cluster.membership import Following, Membership, ServiceInstance, following, join
from penstock.api.service import Service
from penstock.core.records import Record, RecordKind
from penstock.core.status import JobProgress
from penstock.kube.connecting import connect
from penstock.kube.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    INGEST_AUDIENCE,
    JOB_KIND,
    PEOPLE_AUDIENCE,
    SERVICE_LEASE,
    SERVICE_MANAGER,
    attempt_name,
    profile_name,
)
from penstock.kube.resources import CONFIG_MAPS, JOBS, LEASES, PODS
from penstock.kube.transport import KubeError
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.repository import ROOT
from tests.support.sample_run import sample_profile
from tests.support.service import HOST, Clock, job_manifest, new_service, step_records

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

PRINT = "print(open('/tokens/token').read(), flush=True); import time; time.sleep(600)"


@pytest.fixture(scope="module")
def crds(cluster: Cluster) -> None:
    """PipelineJobs can be made."""
    cluster.kubectl("apply", "--server-side", "--filename", str(ROOT / "deploy" / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/pipelinejobs.penstock.dev", "--timeout=60s")


RULES: list[tuple[str, str, list[str]]] = [
    ("penstock.dev", "pipelinejobs", ["get", "list", "watch", "create", "patch", "delete"]),
    ("penstock.dev", "pipelinejobs/status", ["patch"]),
    ("", "pods", ["get"]),
    ("batch", "jobs", ["get"]),
    ("jobset.x-k8s.io", "jobsets", ["get"]),
    ("", "configmaps", ["get", "create"]),
    ("coordination.k8s.io", "leases", ["get", "create", "update"]),
    ("authentication.k8s.io", "tokenreviews", ["create"]),
    ("authorization.k8s.io", "subjectaccessreviews", ["create"]),
]
"""What docs/guides/service.md says that the service needs. It has no more here."""


@pytest.fixture
def account(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A configuration for an account with these rights."""
    rules = [{"apiGroups": [group], "resources": [name], "verbs": verbs} for group, name, verbs in RULES]
    itself = {"resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"], "apiGroups": [""]}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": namespace}}
    cluster.create(namespace, {**role, "rules": [*rules, itself]})
    cluster.kubectl("--namespace", namespace, "create", "serviceaccount", "service")
    bound = (f"--clusterrole={namespace}", f"--serviceaccount={namespace}:service")
    cluster.kubectl("create", "clusterrolebinding", namespace, *bound)
    token = cluster.kubectl("--namespace", namespace, "create", "token", "service").strip()
    document = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--output", "json"))
    for user in document["users"]:
        user["user"] = {"token": token}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(document))
    yield path
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", namespace)


@pytest.fixture
def member(
    crds: None, account: Path, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Service, Membership]]:
    """A service that has joined the cluster, for the jobs of one namespace, with real time."""
    monkeypatch.setenv("KUBECONFIG", str(account))
    opened = replace(new_service(tmp_path, clock=Clock()), clock=time.time)
    client = connect(16)
    instance = ServiceInstance(own_namespace=namespace, name=f"test-{os.getpid()}", namespace=namespace)
    part = join(opened, ServiceCluster(client), instance)
    service = replace(opened, cluster=part)
    yield service, part
    service.close()
    client.rest_client.pool_manager.clear()


@pytest.fixture
def service(member: tuple[Service, Membership]) -> Service:
    return member[0]


@pytest.fixture
def part(member: tuple[Service, Membership]) -> Iterator[Following]:
    """What mirrors and reports, at work."""
    made = following(*member)
    made.run_once()
    yield made
    made.close()


def client_of(service: Service, token: str) -> TestClient:
    bearer = {"Authorization": f"Bearer {token}"}
    return TestClient(create_app(service), base_url=HOST, headers=bearer, raise_server_exceptions=False)


def person(cluster: Cluster, namespace: str, name: str, *verbs: str, audience: str = PEOPLE_AUDIENCE) -> str:
    """A token of an account that may do that to PipelineJobs in the namespace."""
    inside = ("--namespace", namespace)
    cluster.kubectl(*inside, "create", "serviceaccount", name)
    if verbs:
        allowed = [f"--verb={verb}" for verb in verbs]
        cluster.kubectl(*inside, "create", "role", name, *allowed, "--resource=pipelinejobs.penstock.dev")
        bound = (f"--role={name}", f"--serviceaccount={namespace}:{name}")
        cluster.kubectl(*inside, "create", "rolebinding", name, *bound)
    return cluster.kubectl(*inside, "create", "token", name, "--audience", audience).strip()


def reports(cluster: Cluster, namespace: str, job: dict[str, Any], attempt: int = 1) -> str:
    """The token in a pod of an attempt, which a real JobSet made."""
    metadata, name = job["metadata"], attempt_name(job["metadata"]["name"], attempt)
    pod = cluster.pod("unnamed", PRINT)["spec"]
    token = {"path": "token", "audience": INGEST_AUDIENCE, "expirationSeconds": 600}
    pod["volumes"] = [{"name": "tokens", "projected": {"sources": [{"serviceAccountToken": token}]}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "tokens", "mountPath": "/tokens"}]
    template = {"metadata": {"labels": {ATTEMPT_LABEL: str(attempt)}}, "spec": pod}
    owner = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": metadata["name"], "uid": metadata["uid"]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "ownerReferences": [{**owner, "controller": True}]},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": "ranks", "replicas": 1, "template": {"spec": {"backoffLimit": 0, "template": template}}}
            ],
        },
    }
    cluster.create(namespace, jobset)
    selector = f"{ATTEMPT_LABEL}={attempt}"

    def printed() -> str:
        return cluster.kubectl("--namespace", namespace, "logs", "--selector", selector, "--tail=1").strip()

    def running() -> bool:
        pods = cluster.all(PODS, namespace, selector)
        return [each["status"].get("phase") for each in pods] == ["Running"]

    cluster.wait(running, "the rank does not run")
    found: str = cluster.wait(printed, "the rank prints no token")
    return found


def made(cluster: Cluster, namespace: str, name: str = "tiny", **status: Any) -> dict[str, Any]:
    """A PipelineJob by kubectl, of which an operator has written that."""
    cluster.create(namespace, job_manifest(name))
    if status:
        patch = json.dumps({"status": status})
        where = ("--namespace", namespace, "patch", "pipelinejob", name, "--subresource=status")
        cluster.kubectl(*where, "--type=merge", "--patch", patch)
    return cluster.get(JOBS, name, namespace)


class TestPeople:
    def test_verbs_open_what_they_open_on_the_cluster(
        self, cluster: Cluster, namespace: str, service: Service, part: Following
    ) -> None:
        made(cluster, namespace)
        reader = client_of(service, person(cluster, namespace, "reader", "get", "list"))
        path = f"/v1/jobs/{namespace}/tiny"
        cluster.wait(lambda: reader.get(path).status_code == 200, "the job is not mirrored")
        assert reader.get(f"/v1/jobs?namespace={namespace}").status_code == 200
        assert reader.get("/v1/jobs?namespace=kube-system").status_code == 403
        assert reader.post(f"{path}/suspend").status_code == 403
        assert reader.delete(path).status_code == 403
        editor = client_of(service, person(cluster, namespace, "editor", "get", "update", "create", "delete"))
        assert editor.post(f"{path}/suspend").status_code == 200
        found = cluster.get(JOBS, "tiny", namespace)
        assert found["spec"]["runPolicy"]["suspend"] is True
        assert editor.delete(path).status_code == 202
        cluster.wait(lambda: reader.get(path).json()["metadata"].get("deletionTimestamp"), "it is not deleted")

    def test_a_token_for_the_apiserver_proves_nobody_here(
        self, cluster: Cluster, namespace: str, service: Service
    ) -> None:
        audience = "https://kubernetes.default.svc.cluster.local"
        token = person(cluster, namespace, "somebody", "get", "list", audience=audience)
        assert client_of(service, token).get("/v1/jobs").status_code == 401

    def test_a_job_is_made_and_refused_by_the_cluster(self, cluster: Cluster, namespace: str, service: Service) -> None:
        client = client_of(service, person(cluster, namespace, "maker", "create", "get"))
        manifest = job_manifest(namespace=namespace)
        proposed = client.post("/v1/jobs?dryRun=true", json=manifest)
        assert proposed.status_code == 200, proposed.text
        assert cluster.all(JOBS, namespace) == []
        answer = client.post("/v1/jobs", json=manifest, headers={"Idempotency-Key": "once"})
        assert answer.status_code == 201, answer.text
        found = cluster.get(JOBS, "tiny", namespace)
        assert found["metadata"]["uid"] == answer.json()["metadata"]["uid"]
        assert client.post("/v1/jobs", json=manifest).status_code == 409


class TestRanks:
    def test_one_reports_and_the_status_has_two_owners(
        self, cluster: Cluster, namespace: str, service: Service, part: Following
    ) -> None:
        job = made(cluster, namespace, phase="Running", reason="Bound", attempt=1, ranks=1)
        token, uid = reports(cluster, namespace, job), job["metadata"]["uid"]
        client = client_of(service, token)
        measured = Record(
            uid=uid,
            attempt=1,
            source="pod-0",
            sequence=0,
            recorded_at=time.time(),
            kind=RecordKind.PROFILE,
            profile=sample_profile(),
        )
        for records in ([measured], step_records(uid, range(3))):
            body = {"records": [each.to_manifest() for each in records]}
            answer = client.post("/v1/ingest", json=body)
            assert answer.status_code == 200, answer.text
        assert client.get("/v1/jobs").status_code == 403

        def written() -> Any:
            part.report()
            progress = cluster.get(JOBS, "tiny", namespace)["status"].get("progress", {})
            return progress if progress.get("step") == 3 and progress.get("profileRef") else None

        progress = cluster.wait(written, "the cluster is told nothing")
        name = profile_name("tiny", 1)
        assert (progress["epoch"], progress["profileRef"], progress["loss"]) == (1, name, "4.998")
        fields = cluster.get(JOBS, "tiny", namespace)["metadata"]["managedFields"]
        mine = [each for each in fields if each["manager"] == SERVICE_MANAGER]
        assert [(each["operation"], each["subresource"]) for each in mine] == [("Apply", "status")]
        assert list(mine[0]["fieldsV1"]["f:status"]) == ["f:progress"]
        laid = cluster.get(CONFIG_MAPS, name, namespace)
        assert laid["metadata"]["ownerReferences"][0]["uid"] == uid
        cluster.kubectl("--namespace", namespace, "delete", "pipelinejob", "tiny")

        def collected() -> bool:
            names = [each["metadata"]["name"] for each in cluster.all(CONFIG_MAPS, namespace)]
            return name not in names

        cluster.wait(collected, "the measurement outlives its job")

    def test_one_reports_for_no_other_job(self, cluster: Cluster, namespace: str, service: Service) -> None:
        first = made(cluster, namespace, phase="Running", reason="Bound", attempt=1, ranks=1)
        other = made(cluster, namespace, "other", phase="Running", reason="Bound", attempt=1, ranks=1)
        client = client_of(service, reports(cluster, namespace, first))
        for job, status in ((first, 200), (other, 403)):
            records = [each.to_manifest() for each in step_records(job["metadata"]["uid"], range(1))]
            assert client.post("/v1/ingest", json={"records": records}).status_code == status


def test_a_namesake_is_known_by_its_version(
    cluster: Cluster, namespace: str, member: tuple[Service, Membership]
) -> None:
    """Of a status alone a cluster takes what names another's uid, so the version has to say who is meant."""
    kube, progress = member[1].kube, JobProgress(attempt=1, step=3)
    gone = made(cluster, namespace, phase="Running", attempt=1)["metadata"]
    cluster.kubectl("--namespace", namespace, "delete", "pipelinejob", "tiny")
    job = made(cluster, namespace, phase="Running", attempt=1)
    meant = (namespace, "tiny", gone["uid"])
    with pytest.raises(KubeError) as raised:
        kube.report(meant, progress, gone["resourceVersion"])
    assert raised.value.is_conflict
    assert "progress" not in cluster.get(JOBS, "tiny", namespace)["status"]
    kube.report(meant, progress, job["metadata"]["resourceVersion"])
    assert cluster.get(JOBS, "tiny", namespace)["status"]["progress"]["step"] == 3


def test_the_lease_is_fresh(cluster: Cluster, namespace: str, part: Following) -> None:
    spec = cluster.get(LEASES, SERVICE_LEASE, namespace)["spec"]
    assert spec["holderIdentity"] == f"test-{os.getpid()}"
    part.close()
    assert not cluster.get(LEASES, SERVICE_LEASE, namespace)["spec"].get("holderIdentity")
