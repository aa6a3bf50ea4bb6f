"""What a job did, over REST, on both databases."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, update
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import plans
from penstock.api.store.ingest import Batch, take
from penstock.api.store.schema import jobs
from penstock.core.records import LogLine, Record, RecordKind
from penstock.core.timeline import Activity, Event, Source, Timeline
from tests.support.sample_run import sample_plan
from tests.support.service import NOW, add_job, client_of, step_records

PATH = "/v1/jobs/default/tiny"


@pytest.fixture
def uid(service: Service) -> str:
    """A job in its second attempt, which began again at step 5 and is at 6; the first came to 7."""
    uid = add_job(service).uid
    for attempt, steps in ((1, range(8)), (2, range(5, 7))):
        service.write(uid, partial(begin, uid=uid, attempt=attempt))
        send(service, [*step_records(uid, steps, attempt=attempt), *others(uid, attempt, first=100)])
    return uid


def begin(connection: Connection, uid: str, attempt: int) -> None:
    connection.execute(update(jobs).where(jobs.c.uid == uid).values(attempt=attempt))


def send(service: Service, records: list[Record]) -> None:
    batch = Batch.of(records, NOW)
    service.submit_joint(batch.uid, take, batch).result()


def others(uid: str, attempt: int, first: int) -> list[Record]:
    """Timelines of steps 2 and 5, and two lines of either rank."""
    contents: list[dict[str, Any]] = [{"timeline": timeline(step)} for step in (2, 5)]
    contents += [
        {"log": LogLine(rank=rank, level="info", message=f"{rank}: {attempt}.{i}")} for i in range(2) for rank in (0, 1)
    ]
    kinds = [RecordKind.TIMELINE] * 2 + [RecordKind.LOG] * 4
    return [
        Record(
            uid=uid,
            attempt=attempt,
            source="rank-0",
            sequence=first + i,
            recorded_at=NOW + attempt,
            kind=kind,
            **content,
        )
        for i, (kind, content) in enumerate(zip(kinds, contents, strict=True))
    ]


def timeline(step: int) -> Timeline:
    event = Event(rank=0, activity=Activity.COMPUTE, action="0F0.0", start_ns=0, stop_ns=step)
    peaks = (100 * step, 100 * step + 1)
    return Timeline(source=Source.MEASURED, num_ranks=2, step_ns=step, events=(event,), step=step, peak_bytes=peaks)


@pytest.fixture
def client(service: Service, uid: str) -> TestClient:
    return client_of(service, Role.VIEWER)


def test_metrics_show_the_newest_attempt(client: TestClient) -> None:
    found = {each["name"]: each for each in client.get(f"{PATH}/metrics").json()["series"]}
    assert set(found) == {
        "loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes",
    }  # fmt: skip
    loss = found["loss"]
    assert loss["rank"] is None
    assert [(point["step"], point["attempt"]) for point in loss["points"]] == [
        *((step, 1) for step in range(5)), (5, 2), (6, 2),
    ]  # fmt: skip
    point = loss["points"][3]
    assert point["min"] == point["mean"] == point["max"] == point["last"] == 4.997


def test_metrics_have_as_many_points_as_wanted(client: TestClient) -> None:
    for most in (1, 2, 3):
        (loss,) = [
            each["points"]
            for each in client.get(f"{PATH}/metrics", params={"points": most}).json()["series"]
            if each["name"] == "loss"
        ]
        assert 1 <= len(loss) <= most


def test_metrics_of_single_ranks_come_with_those_of_all(client: TestClient) -> None:
    """They are of the sampled steps: here 2 and 5, as the newest attempt has them."""
    found = client.get(f"{PATH}/metrics", params={"rank": [0, 1, 7]}).json()["series"]
    of_ranks = {
        (each["name"], each["rank"]): [(point["step"], point["attempt"], point["last"]) for point in each["points"]]
        for each in found
        if each["rank"] is not None
    }
    assert of_ranks == {
        ("busy_seconds", 0): [(2, 2, 2e-9), (5, 2, 5e-9)],
        ("busy_seconds", 1): [(2, 2, 0.0), (5, 2, 0.0)],
        ("peak_bytes", 0): [(2, 2, 200.0), (5, 2, 500.0)],
        ("peak_bytes", 1): [(2, 2, 201.0), (5, 2, 501.0)],
    }
    assert len([each for each in found if each["rank"] is None]) == 6
    refused = client.get(f"{PATH}/metrics", params={"rank": [0, -1]})
    assert (refused.status_code, refused.json()["where"]) == (400, "rank.1")


def test_a_job_without_numbers_has_none(service: Service, client: TestClient) -> None:
    add_job(service, "idle")
    assert client.get("/v1/jobs/default/idle/metrics").json() == {"series": []}
    assert client.get("/v1/jobs/default/idle/logs").json() == {"items": [], "next": "", "complete": False}
    assert client.get("/v1/jobs/default/idle/plans").json() == {"items": []}


def test_timelines_by_step_and_the_newest(client: TestClient) -> None:
    newest = client.get(f"{PATH}/timeline").json()
    assert (newest["attempt"], newest["step"]) == (2, 5)
    assert Timeline.from_manifest(newest["timeline"]) == timeline(5)
    assert client.get(f"{PATH}/timeline", params={"step": 2}).json()["attempt"] == 2
    missing = client.get(f"{PATH}/timeline", params={"step": 3})
    assert missing.status_code == 404
    assert missing.json()["remedy"] == "the newest sampled steps: 2, 5"


def test_logs_by_rank(client: TestClient) -> None:
    def messages(**query: Any) -> list[str]:
        return [each["message"] for each in client.get(f"{PATH}/logs", params=query).json()["items"]]

    assert messages(rank=1) == ["1: 1.0", "1: 1.1", "1: 2.0", "1: 2.1"]
    assert messages(rank=1, after=3) == ["1: 2.1"]
    assert messages(rank=0, limit=1) == ["0: 1.0"]
    assert messages(rank=0, limit=1, tail=True) == ["0: 2.1"]
    assert messages(tail=True, limit=2) == ["0: 2.1", "1: 2.1"]
    assert len(messages()) == 8


def test_logs_are_followed_by_cursor(service: Service, client: TestClient, uid: str) -> None:
    def page(cursor: str = "", **query: Any) -> tuple[list[str], str]:
        found = client.get(f"{PATH}/logs", params={"cursor": cursor, **query}).json()
        return [each["message"] for each in found["items"]], found["next"]

    first, cursor = page(limit=6)
    assert (first[-1], cursor) == ("1: 1.1", "0:4,1:2")
    assert page(cursor, limit=1) == (["1: 2.0"], "0:4,1:3")
    last, cursor = page(tail=True, limit=1)
    assert (last, cursor) == (["1: 2.1"], "0:4,1:4")
    assert page(cursor) == ([], cursor)
    send(service, others(uid, 2, first=200))
    assert page(cursor) == (["0: 2.0", "0: 2.1", "1: 2.0", "1: 2.1"], "0:6,1:6")
    assert page("0:5", rank=0)[0] == ["0: 2.1"]
    assert len(page("0:6")[0]) == 6


@pytest.mark.parametrize("cursor", ["x", "0", "0:", ":1", "0:1,", "-2:1", "0:1;1:2", "9" * 10 + ":1", "0:" + "9" * 16])
def test_a_cursor_that_is_none_is_refused(client: TestClient, cursor: str) -> None:
    answer = client.get(f"{PATH}/logs", params={"cursor": cursor})
    assert (answer.status_code, answer.json()["where"]) == (400, "cursor")


def test_plans_are_numbered_and_whole(service: Service, client: TestClient, uid: str) -> None:
    for attempt in (1, 2):
        service.write(uid, partial(plans.keep_plan, uid=uid, attempt=attempt, plan=sample_plan(), now=NOW))
    items = client.get(f"{PATH}/plans").json()["items"]
    assert [(each["revision"], each["attempt"]) for each in items] == [(1, 1), (2, 2)]
    assert {each["digest"] for each in items} == {sample_plan().digest}
    assert items[0]["plan"] == sample_plan().to_manifest()
    assert client.get(PATH).json()["status"]["planDigest"] == sample_plan().digest
