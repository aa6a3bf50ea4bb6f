"""What a real rank's token opens: reports for its own job, as long as its pod lives, and nothing else anywhere."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.lifecycle import Phase
from penstock.core.pod import TOKEN_FILE
from penstock.core.records import LogLine, Record, RecordKind
from penstock.kube.names import INGEST_AUDIENCE, PEOPLE_AUDIENCE, REPORTER_CONTAINER, TRAINER_CONTAINER
from penstock.kube.resources import PODS
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import ClusterJob, paced, small_training, submitted
from tests.support.installed import READER, READY, Installed
from tests.support.story import Story

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

UNENDING_STEPS = 5000
SECRETS = "/var/run/secrets/*"


@dataclass(frozen=True)
class Rank:
    """A pod that trains, and the token that it holds."""

    job: ClusterJob
    pod: str
    token: str


@pytest.fixture(scope="module")
def training(penstock_there: Installed, first: Story) -> Iterator[list[Rank]]:
    """The first pod of a job that trains as long as it is needed; empty before it starts and after a test ended it."""
    ranks: list[Rank] = []
    with paced(penstock_there):
        yield ranks
    for rank in ranks:
        end(penstock_there, rank)


@pytest.fixture
def rank(penstock_there: Installed, training: list[Rank]) -> Rank:
    if not training:
        job = submitted(penstock_there, "narrow", training=small_training(UNENDING_STEPS))
        job.wait_for(Phase.RUNNING)
        pod = job.pods()[0]["metadata"]["name"]
        token = penstock_there.kubectl("exec", pod, "-c", REPORTER_CONTAINER, "--", "cat", TOKEN_FILE)
        training.append(Rank(job, pod, token))
    return training[0]


def end(on: Installed, rank: Rank) -> None:
    on.kubectl("delete", "pj", rank.job.name)
    on.wait_for_room([rank.job.name])


def apiserver(on: Installed, token: str) -> httpx.Client:
    trusted = ssl.create_default_context(cafile=on.lab.certificates / "ca.crt")
    return httpx.Client(base_url=on.lab.addresses.apiserver, headers=bearer(token), verify=trusted, trust_env=False)


def service(on: Installed, token: str) -> httpx.Client:
    return httpx.Client(base_url=on.service.health.removesuffix(READY), headers=bearer(token), trust_env=False)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def report(uid: str, attempt: int = 1) -> dict[str, Any]:
    """A line that a rank of that job could have printed, as it is brought to the service."""
    line = LogLine(rank=0, level="info", message="tried")
    told: dict[str, Any] = {
        "uid": uid,
        "attempt": attempt,
        "source": "tried",
        "sequence": 0,
        "recorded_at": time.time(),
    }
    return {"records": [Record(**told, kind=RecordKind.LOG, log=line).to_manifest()]}


def test_its_pod_holds_no_other_token(penstock_there: Installed, rank: Rank) -> None:
    found = {TRAINER_CONTAINER: [], REPORTER_CONTAINER: ["penstock"]}
    for container, names in found.items():
        look = ("exec", rank.pod, "-c", container, "--", "find", "/var/run/", "-maxdepth", "2", "-path", SECRETS)
        assert [Path(path).name for path in penstock_there.kubectl(*look).split()] == names
    spec = penstock_there.cluster.get(PODS, rank.pod, penstock_there.namespace)["spec"]
    assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/namespaces/{namespace}/pods"),
        ("GET", "/api/v1/namespaces/{namespace}/secrets"),
        ("GET", "/apis/penstock.dev/v1alpha1/namespaces/{namespace}/pipelinejobs/narrow"),
        ("DELETE", "/apis/penstock.dev/v1alpha1/namespaces/{namespace}/pipelinejobs/narrow"),
        ("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews"),
    ],
)
def test_the_apiserver_knows_nobody_by_it(penstock_there: Installed, rank: Rank, method: str, path: str) -> None:
    with apiserver(penstock_there, rank.token) as client:
        answer = client.request(method, path.format(namespace=penstock_there.namespace))
    assert answer.status_code == 401, answer.text


def test_the_account_behind_it_may_nothing(penstock_there: Installed, rank: Rank) -> None:
    """Even if somebody had a token of it that the apiserver takes."""
    pod = penstock_there.cluster.get(PODS, rank.pod, penstock_there.namespace)
    account = f"system:serviceaccount:{penstock_there.namespace}:{pod['spec']['serviceAccountName']}"
    listed = penstock_there.kubectl("auth", "can-i", "--list", "--no-headers", f"--as={account}")
    named = [line.split()[0] for line in listed.splitlines() if not line.startswith(" ")]
    assert {name.partition(".")[0] for name in named} <= {
        "selfsubjectreviews",
        "selfsubjectaccessreviews",
        "selfsubjectrulesreviews",
    }


def test_it_reports_for_its_own_attempt_alone(penstock_there: Installed, first: Story, rank: Rank) -> None:
    tried = {"own": report(rank.job.uid), "of another": report(first.job.uid), "later": report(rank.job.uid, 2)}
    with service(penstock_there, rank.token) as client:
        found = {name: client.post("/v1/ingest", json=body).status_code for name, body in tried.items()}
    assert found == {"own": 200, "of another": 403, "later": 403}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/{namespace}/narrow"),
        ("GET", "/v1/jobs/{namespace}/narrow/metrics"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/jobs/{namespace}/narrow/suspend"),
        ("DELETE", "/v1/jobs/{namespace}/narrow"),
        ("GET", "/metrics"),
    ],
)
def test_to_the_service_it_is_no_person(penstock_there: Installed, rank: Rank, method: str, path: str) -> None:
    with service(penstock_there, rank.token) as client:
        answer = client.request(method, path.format(namespace=penstock_there.namespace))
    assert answer.status_code == 403, answer.text


def test_a_person_reports_nothing(penstock_there: Installed, rank: Rank) -> None:
    token = penstock_there.kubectl("create", "token", READER, "--audience", PEOPLE_AUDIENCE).strip()
    with service(penstock_there, token) as client:
        assert client.post("/v1/ingest", json=report(rank.job.uid)).status_code == 403


def test_it_ends_with_its_pod(penstock_there: Installed, training: list[Rank], rank: Rank) -> None:
    """One that the service has not seen yet is refused at once; one that it has, a minute later."""
    pod = penstock_there.cluster.get(PODS, rank.pod, penstock_there.namespace)["metadata"]
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={rank.pod}", f"--bound-object-uid={pod['uid']}")
    token = penstock_there.kubectl("create", "token", "default", "--audience", INGEST_AUDIENCE, *bound).strip()
    training.remove(rank)
    end(penstock_there, rank)
    with service(penstock_there, token) as client:
        assert client.post("/v1/ingest", json=report(rank.job.uid)).status_code == 401
