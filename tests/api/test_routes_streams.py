"""Live streams over HTTP, from a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from penstock.api.http.problems import Problem
from penstock.api.http.routes.streams import opened
from penstock.api.live.listeners import Filter, ListListener, Share
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


class TestShares:
    """Nobody takes all streams: a token has a third, and a namespace half of what the others leave."""

    def opened(self, service: Service, share: Share, count: int = 1) -> int:
        """How many of so many more are taken; those that are stay open."""
        for number in range(count):
            try:
                opened(service, ListListener(filter=Filter(), share=share))
            except Problem:
                return number
            service.feed.add(ListListener(filter=Filter(), share=share))
        return count

    def test_of_a_token(self, tmp_path: Path) -> None:
        async def test() -> None:
            service = new_service(tmp_path, limits=Limits(streams=12))
            taken = [self.opened(service, Share(token=name, namespaces=(name,)), 12) for name in "ab"]
            assert taken == [4, 4]
            service.close()

        asyncio.run(test())

    def test_of_a_namespace(self, tmp_path: Path) -> None:
        """However many tokens it has, another's finds a stream."""

        async def test() -> None:
            service = new_service(tmp_path, limits=Limits(streams=100))
            taken = [
                sum(self.opened(service, Share(token=f"{name}{i}", namespaces=(name,)), 1) for i in range(100))
                for name in "abcd"
            ]
            assert taken == [50, 25, 13, 6]
            assert service.feed.num_listeners == sum(taken)
            service.close()

        asyncio.run(test())


def test_one_token_does_not_shut_out_others_over_http(tmp_path: Path) -> None:
    service = new_service(tmp_path, limits=Limits(streams=6))
    greedy, other = bearer(service, namespace="a"), bearer(service, namespace="b")
    with answering(service) as url, ExitStack() as stack:
        held = [stack.enter_context(stream(url, "/v1/events", greedy)) for _ in range(2)]
        assert [next(each).kind for each in held] == ["hello", "hello"]
        refused = httpx.get(f"{url}/v1/events", headers=greedy, trust_env=False, timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert next(stack.enter_context(stream(url, "/v1/events", other))).kind == "hello"
    service.close()
