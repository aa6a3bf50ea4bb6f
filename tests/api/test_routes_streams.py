"""Live streams over HTTP, from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.api.store import jobs
from penstock.core.lifecycle import Phase
from tests.support.listening import answering, bearer, stream
from tests.support.service import Clock, add_job, new_service


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock, limits=Limits())
    yield made
    made.close()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with answering(service) as found:
        yield found


def enter(service: Service, uid: str, phase: Phase) -> None:
    service.write(uid, lambda connection: jobs.enter_phase(connection, uid, phase, "Because", "", service.clock()))


def test_a_jobs_stream(service: Service, url: str) -> None:
    uid = add_job(service).uid
    with stream(url, "/v1/jobs/default/tiny/events", bearer(service)) as heard:
        assert next(heard).kind == "hello"
        assert next(heard).data["kind"] == "created"
        assert next(heard).data["status"]["phase"] == "Pending"
        enter(service, uid, Phase.QUEUED)
        event = next(heard)
        assert (event.id, event.data["body"]["phase"]) == ("2", "Queued")
        row = next(heard).data
        assert row["status"]["phase"] == "Queued"
        assert row["version"] == 3


def test_last_event_id_goes_before_the_query(service: Service, url: str) -> None:
    uid = add_job(service).uid
    enter(service, uid, Phase.QUEUED)
    headers = {**bearer(service), "Last-Event-ID": "1"}
    with stream(url, "/v1/jobs/default/tiny/events", headers, after=0) as heard:
        assert [next(heard).kind, next(heard).id] == ["hello", "2"]


def test_the_same_path_answers_json(service: Service, url: str) -> None:
    add_job(service)
    found = httpx.get(f"{url}/v1/jobs/default/tiny/events", headers=bearer(service), trust_env=False)
    assert [each["kind"] for each in found.json()["items"]] == ["created"]


def test_a_list_stream_shows_ones_own_namespace(service: Service, url: str) -> None:
    mine, yours = add_job(service, namespace="mine").uid, add_job(service, namespace="yours").uid
    with stream(url, "/v1/events", bearer(service, namespace="mine")) as heard:
        assert next(heard).kind == "hello"
        enter(service, yours, Phase.QUEUED)
        enter(service, mine, Phase.QUEUED)
        assert next(heard).data["uid"] == mine
    refused = httpx.get(
        f"{url}/v1/events", params={"namespace": "yours"}, headers=bearer(service, namespace="mine"), trust_env=False
    )
    assert refused.status_code == 403


def test_an_unknown_job_has_no_stream(service: Service, url: str) -> None:
    headers = {**bearer(service), "Accept": "text/event-stream"}
    answer = httpx.get(f"{url}/v1/jobs/default/none/events", headers=headers, trust_env=False)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_only_so_many_streams_are_open(tmp_path: Path) -> None:
    service = new_service(tmp_path, limits=Limits(streams=1))
    with answering(service) as url, stream(url, "/v1/events", bearer(service)) as heard:
        next(heard)
        answer = httpx.get(f"{url}/v1/events", headers=bearer(service), trust_env=False)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "1 live streams are open" in answer.json()["detail"]
    service.close()
