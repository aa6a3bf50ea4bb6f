"""Wherever the service says how long a job's step takes, it says how fast that is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, update
from starlette.testclient import TestClient

from penstock.api.live.messages import message
from penstock.api.schemas.jobs import job_row
from penstock.api.service import Service
from penstock.api.store import jobs, plans, step_predictions
from penstock.api.store.documents import pack
from penstock.api.store.jobs import Query, StoredJob
from penstock.api.store.schema import jobs as jobs_table
from penstock.api.store.schema import plans as plans_table
from penstock.core.plan import Plan
from penstock.core.speed import Speed
from tests.support.filled_job import report_step, running_job
from tests.support.sample_run import explained_plan
from tests.support.service import Clock, add_job, client_of, new_service

HTML = {"Accept": "text/html"}
STEP_SECONDS = 0.5
"""What `report_step` tells."""


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def fast_job(service: Service, name: str = "tiny", plan: Plan | None = None) -> StoredJob:
    """A job whose plan knows the peak of its devices, and that has reported a step."""
    uid, chosen = add_job(service, name).uid, plan or explained_plan()
    service.write(uid, lambda connection: plans.keep_plan(connection, uid, 0, chosen, service.clock()))
    report_step(service, uid, 3)
    return service.read(lambda connection: jobs.get(connection, uid))


def as_json(speed: Speed | None) -> dict[str, Any]:
    assert speed is not None
    return {
        "tokensPerSecondPerDevice": pytest.approx(speed.tokens_per_second_per_device),
        "modelFlopsUtilization": speed.model_flops_utilization and pytest.approx(speed.model_flops_utilization),
    }


def columns(page: str) -> list[str]:
    return re.findall(r"<th[^>]*>([^<]*)</th>", page)


def cells(page: str) -> dict[str, str]:
    return dict(re.findall(r'<td data-name="([^"]*)">([^<]*)</td>', page))


def test_progress_has_the_speed_of_its_step(service: Service) -> None:
    stored, speed = fast_job(service), as_json(explained_plan().speed(STEP_SECONDS))
    assert speed["modelFlopsUtilization"] is not None
    client = client_of(service)
    for answer in (
        client.get("/v1/jobs/default/tiny").json(),
        client.get("/v1/jobs").json()["items"][0],
        client.get(f"/v1/history/{stored.uid}").json(),
    ):
        assert answer["status"]["progress"]["stepSeconds"] == STEP_SECONDS
        assert answer["status"]["progress"]["speed"] == speed
    sent = message("job", job_row(stored)).decode().partition("data: ")[2]
    assert json.loads(sent)["status"]["progress"]["speed"] == speed, "live streams tell the same"


def test_without_a_known_peak_there_is_no_utilization(service: Service) -> None:
    running_job(service)
    progress = client_of(service).get("/v1/jobs/default/tiny").json()["status"]["progress"]
    assert progress["speed"]["tokensPerSecondPerDevice"] > 0
    assert progress["speed"]["modelFlopsUtilization"] is None


def test_without_a_plan_there_is_no_speed(service: Service) -> None:
    report_step(service, add_job(service).uid, 3)
    progress = client_of(service).get("/v1/jobs/default/tiny").json()["status"]["progress"]
    assert (progress["stepSeconds"], progress["speed"]) == (STEP_SECONDS, None)


def test_the_list_of_jobs_shows_both_next_to_the_step_time(service: Service) -> None:
    fast_job(service)
    page = client_of(service).get("/", headers=HTML).text
    assert columns(page)[-4:] == ["per step", "tokens/s per device", "MFU", "age"]
    speed = explained_plan().speed(STEP_SECONDS)
    assert speed is not None
    shown = cells(page)
    assert shown["per step"] == "500 ms"
    assert shown["tokens/s per device"] == f"{speed.tokens_per_second_per_device:,.0f}"
    assert shown["MFU"] == speed.utilization_text


def test_the_list_has_no_column_for_what_is_known_of_no_job(service: Service) -> None:
    uid = running_job(service).uid
    assert columns(client_of(service).get("/", headers=HTML).text)[-3:] == ["per step", "tokens/s per device", "age"]
    service.write(uid, lambda connection: jobs.request_delete(connection, uid, "somebody", service.clock()))
    service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, service.clock()))
    add_job(service)
    assert columns(client_of(service).get("/", headers=HTML).text)[-2:] == ["per step", "age"]


def test_a_plan_is_read_once_for_all_jobs_that_go_by_it(service: Service) -> None:
    plan = replace(explained_plan(), profile_digest="read once")
    for number in range(3):
        fast_job(service, f"job-{number}", plan)
    read: list[str] = []

    @event.listens_for(service.engine, "before_cursor_execute")
    def hear(connection: Connection, cursor: Any, statement: str, *rest: Any) -> None:
        read.append(statement)

    step_predictions._remembered.pop(plan.digest)
    for _ in range(2):
        found, _ = service.read(lambda connection: jobs.page(connection, Query()))
        assert len({each.speed for each in found}) == 1
        assert found[0].speed is not None
    assert sum("plans" in statement for statement in read) == 1


def test_the_oldest_predictions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_predictions, "_remembered", {})
    monkeypatch.setattr(step_predictions, "MOST_REMEMBERED", 2)
    for digest in ("a", "b", "c"):
        step_predictions._remember({digest: step_predictions.StepPrediction()})
    assert list(step_predictions._remembered) == ["b", "c"]


def test_a_plan_that_cannot_be_read_hides_no_job(service: Service) -> None:
    """Another version may have made it."""
    stored, body = fast_job(service), {**explained_plan().to_manifest(), "later": 1}

    def change(connection: Connection) -> None:
        row = {"digest": "other", "body": pack(body), "timeline": None, "created_at": 0.0}
        connection.execute(insert(plans_table).values(row))
        connection.execute(update(jobs_table).where(jobs_table.c.uid == stored.uid).values(plan_digest="other"))

    service.write(stored.uid, change)
    (job,) = client_of(service).get("/v1/jobs").json()["items"]
    assert job["status"]["progress"]["speed"] is None


@pytest.mark.parametrize("step_seconds", [0.0, 5e-324])
def test_a_step_that_takes_no_time_has_no_speed(service: Service, step_seconds: float) -> None:
    uid = fast_job(service).uid
    reported = jobs.Reported(attempt=0, step=4, step_seconds=step_seconds, reported_at=service.clock())
    service.write(uid, lambda connection: jobs.report(connection, [(uid, reported)]))
    client: TestClient = client_of(service)
    assert client.get("/v1/jobs/default/tiny").json()["status"]["progress"]["speed"] is None
    assert client.get("/", headers=HTML).status_code == 200
