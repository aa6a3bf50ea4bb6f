"""Plans without running, over REST: the planner's own plans from real processes, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.http.routes.plans import BODY, MOST_OF_NAMESPACE, MOST_OF_TOKEN, MOST_WAITING
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.store import plan_requests
from penstock.api.store.plan_requests import PlanInput
from penstock.core.layout import Precision
from penstock.core.plan import Plan
from penstock.core.profile_matching import OLDEST_SECONDS
from penstock.core.serialization import yamltext
from penstock.planner.worker.__main__ import answer as answer_to
from penstock.planner.worker.process import ProcessPlanner
from penstock.planner.worker.protocol import PlanningRequest
from tests.support.fake_planner import FakePlanner
from tests.support.planning import cluster, profile_for
from tests.support.service import Clock, client_of, job_manifest, new_service
from tests.support.whatif import asked_for, keep_profile, plan_queue_of, tiny_job, turn_until

SPEC = tiny_job().spec


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service, Role.EDITOR)


def ask(client: TestClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = client.post("/v1/plans", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/plans/{found['id']}"
    return found


def refused(client: TestClient, body: Any) -> dict[str, Any]:
    answer = client.post("/v1/plans", json=body)
    assert answer.status_code == 422, answer.text
    found: dict[str, Any] = answer.json()
    return found


def planned(service: Service, client: TestClient, request: str) -> dict[str, Any]:
    """The request once a real process has answered it."""
    plan_queue = plan_queue_of(service, ProcessPlanner())
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(client.get(f"/v1/plans/{request}").json())
        return found["state"] not in ("Queued", "Working")

    turn_until(plan_queue, ended)
    return found


def test_described_hardware_is_planned_for_as_the_planner_does(service: Service, client: TestClient) -> None:
    asked = ask(client, asked_for())
    assert (asked["state"], asked["plan"], asked["error"]) == ("Queued", None, None)
    found = planned(service, client, asked["id"])
    expected = answer_to(PlanningRequest(spec=SPEC, cluster=cluster())).plan
    assert expected is not None
    assert (found["state"], found["planDigest"]) == ("Succeeded", expected.digest)
    assert Plan.from_manifest(found["plan"]) == expected
    assert found["plan"]["reasons"]
    assert (found["job"], found["cluster"]) == (asked_for()["job"], asked_for()["cluster"])


def test_a_measured_machine_is_planned_for_as_the_planner_does(service: Service, client: TestClient) -> None:
    measured = profile_for(SPEC)
    digest = keep_profile(service, measured)
    expected = answer_to(PlanningRequest(spec=SPEC, profile=measured)).plan
    assert expected is not None
    for body in ({"job": tiny_job().to_manifest()}, {"job": tiny_job().to_manifest(), "profile": digest}):
        asked = ask(client, body)
        assert asked["profile"] == digest
        assert planned(service, client, asked["id"])["planDigest"] == expected.digest


def test_what_would_help_is_planned_on_request(service: Service, client: TestClient) -> None:
    """The same plan, and each change with a search of its own; without, only what the plan itself says."""
    plans = []
    for body in (asked_for(), asked_for() | {"whatIf": True}):
        found = planned(service, client, ask(client, body)["id"])
        assert found["state"] == "Succeeded"
        plans.append(found["plan"])
    assert plans[0]["programDigest"] == plans[1]["programDigest"]
    assert plans[0]["prediction"]["speed"]["tokensPerSecondPerDevice"] > 0
    few, all_of_them = ({each["method"] for each in variations(plan)} for plan in plans)
    assert few == {"same plan simulated"}
    assert "new search" in all_of_them
    assert len(variations(plans[0])) < len(variations(plans[1]))


def variations(plan: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plan["prediction"]["explanation"]["variations"]
    return found


def test_what_fits_nowhere_fails_with_place_and_remedy(service: Service, client: TestClient) -> None:
    asked = ask(client, asked_for(tiny_job(memoryPerRank="1Ki")))
    found = planned(service, client, asked["id"])
    assert (found["state"], found["plan"]) == ("Failed", None)
    assert "nothing fits" in found["error"]["what"]
    assert found["error"]["where"] == "spec.resources.memoryPerRank"
    assert found["error"]["remedy"]


def test_the_documented_example_is_planned(service: Service, client: TestClient) -> None:
    asked = ask(client, BODY["requestBody"]["content"]["application/json"]["example"])
    assert planned(service, client, asked["id"])["state"] == "Succeeded"


def test_yaml_is_read_as_well(client: TestClient) -> None:
    headers = {"Content-Type": "application/yaml"}
    answer = client.post("/v1/plans", content=yamltext.dump(asked_for()), headers=headers)
    assert answer.status_code == 202


def test_a_request_is_made_once_for_its_key(client: TestClient) -> None:
    first, second = (ask(client, asked_for(), **{"Idempotency-Key": "k"}) for _ in range(2))
    assert first == second
    assert len(client.get("/v1/plans").json()["items"]) == 1


class TestProfiles:
    """Which measurement a request without one means."""

    def test_the_newest_that_fits(self, service: Service, client: TestClient, clock: Clock) -> None:
        keep_profile(service, profile_for(SPEC, measured_at=clock.now - 500))
        newest = keep_profile(service, profile_for(SPEC, measured_at=clock.now - 100))
        keep_profile(service, profile_for(SPEC, measured_at=clock.now, num_ranks=4))
        keep_profile(service, profile_for(SPEC, measured_at=clock.now, model_digest="1" * 64))
        keep_profile(service, profile_for(SPEC, measured_at=clock.now, units=profile_for(SPEC).units[:9]))
        assert ask(client, {"job": tiny_job().to_manifest()})["profile"] == newest

    def test_not_an_old_one(self, service: Service, client: TestClient, clock: Clock) -> None:
        digest = keep_profile(service, profile_for(SPEC, measured_at=clock.now))
        clock.now += OLDEST_SECONDS + 1
        problem = refused(client, {"job": tiny_job().to_manifest()})
        assert (problem["where"], "in the field cluster" in problem["remedy"]) == ("profile", True)
        assert ask(client, {"job": tiny_job().to_manifest(), "profile": digest})["profile"] == digest

    def test_of_this_machine(self, tmp_path: Path, clock: Clock) -> None:
        new_service(tmp_path, clock=clock).close()
        for host, status in (("desk", 202), ("elsewhere", 422)):
            made = open_service(Settings(folder=tmp_path, machine=host), clock)
            measured = profile_for(SPEC)
            keep_profile(made, dataclasses.replace(measured, key=dataclasses.replace(measured.key, host="desk")))
            body = {"job": tiny_job().to_manifest()}
            assert client_of(made).post("/v1/plans", json=body).status_code == status
            made.close()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"model_digest": "1" * 64}, "another model"),
            ({"num_ranks": 4}, "4 ranks"),
            ({"precision": Precision.BF16}, "bf16"),
        ],
    )
    def test_a_named_one_must_fit(
        self, service: Service, client: TestClient, changes: dict[str, Any], reason: str
    ) -> None:
        digest = keep_profile(service, profile_for(SPEC, **changes))
        problem = refused(client, {"job": tiny_job().to_manifest(), "profile": digest})
        assert problem["where"] == "profile"
        assert reason in problem["detail"]


def with_source(source: str) -> dict[str, Any]:
    body = asked_for()
    body["job"]["spec"]["data"]["source"] = source
    return body


def with_device(**changes: float) -> dict[str, Any]:
    body = asked_for()
    body["cluster"]["device"] |= changes
    return body


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("field", ["peakFlops", "memoryBandwidth", "actionOverheadSeconds", "pricePerHour"])
def test_what_is_no_number_is_refused(client: TestClient, field: str, number: str) -> None:
    """JSON has none of them, YAML does."""
    body = yamltext.dump(with_device(**{field: 77.25})).replace("77.25", number)
    answer = client.post("/v1/plans", content=body, headers={"Content-Type": "application/yaml"})
    assert (answer.status_code, answer.json()["where"]) == (422, f"cluster.device.{field}")


@pytest.mark.parametrize(
    ("body", "where", "said"),
    [
        ([], "", "a mapping"),
        ({}, "job", "is missing"),
        ({"job": {}}, "job.apiVersion", "is not penstock.dev/v1alpha1"),
        ({"job": job_manifest()}, "profile", "no fresh profile"),
        ({"job": job_manifest(), "profile": "0" * 64}, "profile", "does not exist"),
        ({"job": job_manifest(), "profile": 7}, "profile", "not a string"),
        ({**asked_for(), "profile": "0" * 64}, "profile", "cannot be combined"),
        ({**asked_for(), "budget": 3}, "budget", "unknown field"),
        ({"job": job_manifest(), "cluster": {"name": "c"}}, "cluster.device", "is missing"),
        ({**asked_for(), "cluster": {**asked_for()["cluster"], "numNodes": 0}}, "cluster.numNodes", "less than 1"),
        (with_device(peakFlops=0.0), "cluster.device.peakFlops", "not positive"),
        (with_device(memoryBandwidth=-1.0), "cluster.device.memoryBandwidth", "not positive"),
        (with_device(actionOverheadSeconds=-1.0), "cluster.device.actionOverheadSeconds", "negative"),
        (with_source("/etc"), "spec.data.source", "/etc"),
        (with_source("data://secret/x"), "spec.data.source", "secret"),
    ],
)
def test_a_bad_body_is_refused_with_its_place(client: TestClient, body: Any, where: str, said: str) -> None:
    problem = refused(client, body)
    assert problem["where"] == where
    assert said in problem["detail"]


def test_a_schedule_that_is_code_is_refused(client: TestClient) -> None:
    body = asked_for()
    body["job"]["spec"]["parallelism"] = {"schedule": "evil"}
    assert refused(client, body)["where"] == "spec.parallelism.schedule"


def wait(service: Service, count: int, by: str = "", namespace: str = "") -> None:
    """So many requests wait, each of somebody else and of another namespace unless these are said."""
    for i in range(count):
        body = asked_for()
        body["job"]["metadata"]["namespace"] = namespace or f"n{i}"
        plan_input = PlanInput.from_manifest(body)
        asked = partial(plan_requests.create, plan_input=plan_input, request=f"{by}{i}", by=by or f"u{i}", now=1.0)
        service.write("requests", asked)


def test_a_full_queue_says_when_to_come_again(service: Service, client: TestClient) -> None:
    wait(service, MOST_WAITING - 1)
    mine = ask(client, asked_for())["id"]
    answer = client.post("/v1/plans", json=asked_for())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "DELETE /v1/plans" in answer.json()["remedy"]
    client.delete(f"/v1/plans/{mine}")
    ask(client, asked_for())


def test_nobody_fills_the_queue_for_the_others(service: Service, client: TestClient) -> None:
    """A token without a namespace may name any, so its own requests count wherever they are."""
    wait(service, MOST_OF_TOKEN, by="a-editor")
    answer = client.post("/v1/plans", json=asked_for())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
    assert "of a-editor are open" in answer.json()["detail"]
    other = client_of(service, Role.ADMIN)
    assert other.post("/v1/plans", json=asked_for()).status_code == 202


def test_neither_do_all_of_one_namespace(service: Service, client: TestClient) -> None:
    wait(service, MOST_OF_NAMESPACE, namespace="default")
    answer = client.post("/v1/plans", json=asked_for())
    assert (answer.status_code, "of namespace default" in answer.json()["detail"]) == (429, True)
    body = asked_for()
    body["job"]["metadata"]["namespace"] = "another"
    assert client.post("/v1/plans", json=body).status_code == 202


def test_requests_are_listed_newest_first(client: TestClient) -> None:
    ids = [ask(client, asked_for())["id"] for _ in range(3)]
    items = client.get("/v1/plans").json()["items"]
    assert [each["id"] for each in items] == ids[::-1]
    assert "plan" not in items[0]
    assert [each["id"] for each in client.get("/v1/plans", params={"limit": 1}).json()["items"]] == ids[2:]


def test_progress_is_told(service: Service, client: TestClient) -> None:
    asked = ask(client, asked_for())
    plan_queue = plan_queue_of(service, FakePlanner())
    plan_queue.run_once()
    plan_queue.run_once()
    found = client.get(f"/v1/plans/{asked['id']}").json()
    assert (found["state"], found["progress"]["candidates"]) == ("Working", 1)


def test_canceled_then_forgotten(service: Service, client: TestClient) -> None:
    path = f"/v1/plans/{ask(client, asked_for())['id']}"
    canceled = client.delete(path)
    assert (canceled.status_code, canceled.json()["state"]) == (200, "Canceled")
    assert client.get(path).json()["finishedAt"]
    assert client.delete(path).json() == canceled.json()
    for answer in (client.get(path), client.delete(path)):
        assert answer.status_code == 404
        assert answer.json()["remedy"] == "list the plan requests with GET /v1/plans"


def test_a_namespace_keeps_its_requests(service: Service) -> None:
    mine, other = client_of(service, Role.EDITOR, "mine"), client_of(service, Role.EDITOR, "other")
    body = asked_for()
    assert mine.post("/v1/plans", json=body).status_code == 403
    body["job"]["metadata"]["namespace"] = "mine"
    path = f"/v1/plans/{ask(mine, body)['id']}"
    assert [mine.get(path).status_code, other.get(path).status_code, other.delete(path).status_code] == [200, 403, 403]
    assert other.get("/v1/plans").json() == {"items": []}
    assert other.get("/v1/plans", params={"namespace": "mine"}).status_code == 403
    viewer = client_of(service, Role.VIEWER, "mine")
    assert (viewer.get(path).status_code, viewer.delete(path).status_code) == (200, 403)
