"""Checkpoints, retries and reproductions over REST, on both databases."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.files.exporting import ExportState
from penstock.api.http.reruns import next_name, pinned, retried
from penstock.api.service import Service
from penstock.api.store import jobs, plans, profiles
from penstock.core.job import PipelineJob
from penstock.core.layout import Operation
from penstock.core.lifecycle import Phase
from penstock.core.remaking import Recompute, uniform_remakes
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from tests.support.command import tiny_plan
from tests.support.local_run import local_job, local_plan, local_profile
from tests.support.run_files import add_checkpoint
from tests.support.service import NOW, add_job, client_of, job_manifest
from tests.support.small_plans import looped_schedule, small_plan

PATH = "/v1/jobs/default/tiny"


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


@pytest.fixture
def uid(service: Service) -> str:
    return add_job(service).uid


def end(service: Service, uid: str, phase: Phase = Phase.FAILED) -> None:
    service.write(uid, lambda c: jobs.enter_phase(c, uid, phase, "Because", "", NOW))


def root_of(service: Service, uid: str) -> Path:
    return service.settings.runs / uid


# Checkpoints


def test_checkpoints_name_where_others_may_begin(service: Service, client: TestClient, uid: str) -> None:
    assert client.get(f"{PATH}/checkpoints").json() == {"items": []}
    add_checkpoint(root_of(service, uid), 1, 4)
    add_checkpoint(root_of(service, uid), 2, 8, state="partial")
    partial, whole = client.get(f"{PATH}/checkpoints").json()["items"]
    assert (partial["complete"], partial["step"], partial["attempt"]) == (False, 8, 2)
    assert (whole["complete"], whole["bytes"], whole["export"]) == (True, 102, None)
    assert whole["uri"] == f"out://{uid}/1/4"
    wanted = job_manifest("next")
    wanted["spec"]["checkpoint"] = {"resumeFrom": whole["uri"]}
    assert client.post("/v1/jobs", json=wanted).status_code == 201
    wanted["spec"]["checkpoint"] = {"resumeFrom": partial["uri"]}
    assert client.post("/v1/jobs", json=wanted).status_code == 422


def test_an_export_is_asked_for_once(
    service: Service, client: TestClient, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoint(root_of(service, uid), 1, 4)
    begun: list[tuple[int, int]] = []
    start = type(service.exports).start

    def counted(self: Any, root: Path, attempt: int, step: int) -> bool:
        begun.append((attempt, step))
        return start(self, root, attempt, step)

    monkeypatch.setattr(type(service.exports), "start", counted)
    key = {"Idempotency-Key": "k"}
    answers = [client.post(f"{PATH}/checkpoints/1/4/export", headers=key) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert begun == [(1, 4)]
    export = answers[0].json()["export"]
    assert export["state"] in (ExportState.QUEUED, ExportState.RUNNING)
    assert export["folder"] == "exports/a1-step-4"
    assert [each.kind for each in service.read(lambda c: jobs.history(c, uid))][-1] == "export"


def test_a_checkpoint_that_is_not_whole_is_not_exported(service: Service, client: TestClient, uid: str) -> None:
    add_checkpoint(root_of(service, uid), 1, 8, state="partial")
    for place in ("1/8", "1/4", "9/9"):
        answer = client.post(f"{PATH}/checkpoints/{place}/export")
        assert (answer.status_code, answer.json()["where"]) == (404, "step")


# Retry


def test_a_retry_goes_on_from_the_newest_checkpoint(service: Service, client: TestClient, uid: str) -> None:
    for attempt, step, state in ((1, 4, "complete"), (2, 6, "complete"), (2, 8, "partial")):
        add_checkpoint(root_of(service, uid), attempt, step, state=state)
    end(service, uid)
    answer = client.post(f"{PATH}/retry")
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/jobs/default/tiny-2")
    made = answer.json()
    assert made["spec"]["checkpoint"]["resumeFrom"] == f"out://{uid}/2/6"
    assert (made["status"]["phase"], made["metadata"]["uid"] != uid) == ("Pending", True)
    old = client.get(PATH).json()
    assert {**made["spec"], "checkpoint": {}} == {**old["spec"], "checkpoint": {}}
    events = client.get("/v1/jobs/default/tiny-2/events").json()["items"]
    assert events[-1]["body"] == {"of": uid, "resumeFrom": f"out://{uid}/2/6"}


def test_a_retry_without_a_checkpoint_begins_where_the_old_one_did(
    service: Service, client: TestClient, uid: str
) -> None:
    end(service, uid)
    assert "resumeFrom" not in client.post(f"{PATH}/retry").json()["spec"].get("checkpoint", {})


def test_a_retry_is_made_once_by_key(service: Service, client: TestClient, uid: str) -> None:
    end(service, uid)
    key = {"Idempotency-Key": "k"}
    first, again = (client.post(f"{PATH}/retry", headers=key) for _ in range(2))
    assert (first.text, first.status_code) == (again.text, 201)
    other = client.post(f"{PATH}/retry", headers=key, json={"name": "mine"})
    assert (other.status_code, other.json()["where"]) == (409, "Idempotency-Key")
    assert [client.post(f"{PATH}/retry").json()["metadata"]["name"] for _ in range(2)] == ["tiny-3", "tiny-4"]


def test_a_retry_may_have_a_name(service: Service, client: TestClient, uid: str) -> None:
    end(service, uid)
    assert client.post(f"{PATH}/retry", json={"name": "mine"}).json()["metadata"]["name"] == "mine"
    taken = client.post(f"{PATH}/retry", json={"name": "mine"})
    assert (taken.status_code, taken.json()["type"].rpartition("/")[2]) == (409, "name-taken")
    assert client.post(f"{PATH}/retry", json={"name": "Not A Name"}).status_code == 422
    assert client.post(f"{PATH}/retry", json={"nam": "x"}).status_code == 422


@pytest.mark.parametrize("phase", [None, Phase.QUEUED, Phase.SUSPENDED])
def test_a_live_job_is_not_retried(service: Service, client: TestClient, uid: str, phase: Phase | None) -> None:
    if phase is not None:
        end(service, uid, phase)
    answer = client.post(f"{PATH}/retry")
    assert answer.status_code == 409
    assert "resume" in answer.json()["remedy"]


def test_a_deleted_job_is_retried_under_its_name(service: Service, client: TestClient, uid: str) -> None:
    service.write(uid, lambda c: jobs.mark_deleted(c, uid, NOW))
    add_checkpoint(root_of(service, uid), 1, 4)
    key = {"Idempotency-Key": "k"}
    first, again = (client.post(f"{PATH}/retry", json={"name": "tiny"}, headers=key) for _ in range(2))
    assert (first.status_code, first.text) == (201, again.text)
    assert first.json()["spec"]["checkpoint"]["resumeFrom"] == f"out://{uid}/1/4"


def test_a_job_that_did_all_its_steps_has_nothing_to_go_on_with(service: Service, client: TestClient, uid: str) -> None:
    add_checkpoint(root_of(service, uid), 1, 10)
    end(service, uid)
    answer = client.post(f"{PATH}/retry")
    assert answer.status_code == 409
    assert f"resumeFrom: out://{uid}/1/10" in answer.json()["remedy"]


def test_a_suspended_wish_is_not_inherited(service: Service, client: TestClient, uid: str) -> None:
    client.post(f"{PATH}/suspend")
    end(service, uid)
    assert "suspend" not in client.post(f"{PATH}/retry").json()["spec"].get("runPolicy", {})


@pytest.mark.parametrize(
    ("name", "taken", "expected"),
    [
        ("tiny", {"tiny"}, "tiny-2"),
        ("tiny", {"tiny", "tiny-2", "tiny-4"}, "tiny-3"),
        ("tiny-2", {"tiny", "tiny-2"}, "tiny-3"),
        ("llama-7", {"llama-7"}, "llama-7-2"),
        ("x" * 63, {"x" * 63}, "x" * 61 + "-2"),
        ("y" * 60 + "-zz", set(), "y" * 60 + "-2"),
    ],
)
def test_names_are_numbered(name: str, taken: set[str], expected: str) -> None:
    found = next_name(name, taken)
    assert found == expected
    retried(PipelineJob.from_manifest(job_manifest()), found, None)


# Reproduction


def test_a_job_without_a_plan_is_reproduced_by_its_manifest(client: TestClient, uid: str) -> None:
    found = client.get(f"{PATH}/reproduce").json()
    assert (found["planDigest"], found["versions"]) == (None, {})
    assert found["manifest"]["spec"] == client.get(PATH).json()["spec"]
    assert found["manifest"]["metadata"] == {"name": "tiny-2"}
    document, submit = found["commands"]
    assert submit == "penstock submit tiny-2.yaml --server http://localhost"
    assert yamltext.load(document.partition("\n")[2].removesuffix("\nEND"), "job") == found["manifest"]
    assert client.post("/v1/jobs", json=found["manifest"]).status_code == 201


def test_a_planned_job_is_reproduced_with_its_plan_and_versions(service: Service, client: TestClient) -> None:
    profile, plan = local_profile(), local_plan()
    made = client.post("/v1/jobs", json=local_job().to_manifest()).json()["metadata"]
    uid, launched = made["uid"], {"attempt": 1, "penstock": "0.1.0"}
    service.write(uid, partial(profiles.keep, profile=profile))
    service.write(uid, partial(plans.keep_plan, uid=uid, attempt=1, plan=plan, now=NOW))
    service.write(uid, lambda c: jobs.add_event(c, uid, "launched", launched, NOW))
    found = client.get(f"/v1/jobs/default/{made['name']}/reproduce").json()
    assert found["planDigest"] == plan.digest
    assert found["versions"] == {"penstock": "0.1.0", "torch": profile.key.torch_version}
    install = [
        "pip",
        "install",
        "--constraint",
        "WHEELS/penstock.txt",
        "penstock-cli==0.1.0",
        "penstock-agent==0.1.0",
        "penstock-trainer==0.1.0",
    ]
    assert shlex.split(found["commands"][0])[:7] == install
    assert client.post("/v1/jobs", json=found["manifest"]).status_code == 201
    again = PipelineJob.from_manifest(found["manifest"])
    decided = decide(problem_from_profile(again.spec, profile)).plan
    assert (decided.program_digest, decided.stages, decided.slices) == (plan.program_digest, plan.stages, plan.slices)


def test_a_pinned_job_says_all_that_its_plan_decided() -> None:
    plan = tiny_plan()
    job = pinned(PipelineJob.from_manifest(job_manifest()), plan)
    found = job.spec.parallelism
    assert (found.pp, found.dp, found.micro_batch, found.slices) == (2, 1, 1, (20, 12))
    assert (found.stages, found.schedule, job.spec.resources.ranks) == ((1.0, 1.0), "1f1b", 2)
    assert PipelineJob.from_manifest(job.to_manifest()) == job


@pytest.mark.parametrize("pin", Recompute)
def test_a_pinned_job_makes_again_what_its_plan_does(pin: Recompute) -> None:
    plan = tiny_plan()
    remakes = tuple(uniform_remakes(plan.model, stage, pin.operations) for stage in plan.stages)
    plan = replace(plan, recompute=remakes if any(remakes) else ())
    found = pinned(PipelineJob.from_manifest(job_manifest()), plan).spec.parallelism.recompute
    assert found is pin


def test_a_pinned_job_says_stage_by_stage_what_no_name_says() -> None:
    plan = tiny_plan()
    policy = (uniform_remakes(plan.model, plan.stages[0], (Operation.NORM,)), ())
    job = pinned(PipelineJob.from_manifest(job_manifest()), replace(plan, recompute=policy))
    assert job.spec.parallelism.recompute == policy
    assert PipelineJob.from_manifest(job.to_manifest()) == job


def test_a_pinned_list_of_actions_names_recomputation_only_where_the_plans_own_did() -> None:
    """Where a list names it, a stage makes everything again, and not what the plan says."""
    for recompute in (False, True):
        looped = looped_schedule(num_ranks=1, num_stages=2, num_microbatches=1, num_slices=3, recompute=recompute)
        plan = small_plan(schedule=looped, pp=1, num_stages=2, layers=2, slices=(20, 8, 4))
        remakes = tuple(uniform_remakes(plan.model, stage, (Operation.NORM,)) for stage in plan.stages)
        found = pinned(PipelineJob.from_manifest(job_manifest()), replace(plan, recompute=remakes)).spec.parallelism
        assert isinstance(found.schedule, ScheduleSpec)
        assert ("0R0.0" in found.schedule.text) == recompute
