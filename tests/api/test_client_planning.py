"""The client asks for plans and profiles of the real application; the command says how far they are."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.api.app import create_app
from penstock.api.service import Service
from penstock.cli.whatif import progress_text
from penstock.client import AsyncClient, Client, PlanRequest, ServiceError
from penstock.client.planning import Search
from penstock.core.speed import Speed
from penstock.planner.pricing import cost_of, run_time_of
from penstock.planner.worker.protocol import Answer
from tests.support.application import Application, here
from tests.support.fake_planner import FakePlanner
from tests.support.planning import DEVICE, cluster, profile_for
from tests.support.sample_run import sample_plan
from tests.support.service import Clock, new_service
from tests.support.whatif import keep_profile, plan_queue_of, tiny_job

MEASURED = profile_for(tiny_job().spec)


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def client_with(service: Service, planner: FakePlanner) -> Client:
    """One that lets the plan_queue turn whenever it waits."""
    plan_queue = plan_queue_of(service, planner)
    return Client(here(service), transport=Application(service), pause=lambda seconds: plan_queue.run_once())


def test_a_plan_is_asked_for_and_followed(service: Service) -> None:
    with client_with(service, FakePlanner()) as client:
        asked = client.plan(tiny_job(), cluster=cluster())
        assert (asked.state, asked.name, asked.namespace, asked.ended) == ("Queued", "tiny", "default", False)
        states = [(each.state, each.progress.candidates) for each in client.follow_plan(asked.id)]
        assert states == [("Queued", 0), ("Working", 0), ("Working", 1), ("Succeeded", 1)]
        found = client.planned(asked.id)
        assert (found.plan, found.plan_digest, found.ended) == (sample_plan(), sample_plan().digest, True)
        (listed,) = client.plans()
        assert (listed.id, listed.plan, listed.plan_digest) == (asked.id, None, sample_plan().digest)
        assert client.plans(namespace="other") == ()
        assert found.cost is None


def test_changes_are_planned_too_on_request(service: Service) -> None:
    planner = FakePlanner()
    with client_with(service, planner) as client:
        for what_if in (False, True):
            *_, found = client.follow_plan(client.plan(tiny_job(), cluster=cluster(), what_if=what_if).id)
            assert found.state == "Succeeded"
    assert [request.what_if for request in planner.requests] == [False, True]


def test_a_frontier_is_asked_for_and_the_time_of_all_steps_comes_back(service: Service) -> None:
    planner = FakePlanner()
    with client_with(service, planner) as client:
        *_, found = client.follow_plan(client.plan(tiny_job(), cluster=cluster(), frontier=True).id)
    assert [request.frontier for request in planner.requests] == [True]
    assert found.run_time == run_time_of(sample_plan(), tiny_job().spec, cluster())


def test_a_price_comes_back_as_a_cost(service: Service) -> None:
    with client_with(service, FakePlanner()) as client:
        priced = cluster(device=dataclasses.replace(DEVICE, price_per_hour=2.0))
        *_, found = client.follow_plan(client.plan(tiny_job(), cluster=priced).id)
    assert found.cost is not None
    assert found.cost == cost_of(sample_plan(), tiny_job().spec, priced)
    assert found.cost.per_hour == 4.0


def test_why_there_is_none_is_told(service: Service) -> None:
    answer = Answer(what="too large", where="spec.model", remedy="shrink it")
    with client_with(service, FakePlanner(answer=answer)) as client:
        *_, found = client.follow_plan(client.plan(tiny_job(), cluster=cluster()).id)
    assert found.error is not None
    assert (found.state, found.error.what, found.error.where) == ("Failed", "too large", "spec.model")


def test_canceled_then_forgotten(service: Service) -> None:
    with client_with(service, FakePlanner()) as client:
        asked = client.plan(tiny_job(), cluster=cluster())
        assert client.cancel_plan(asked.id).state == "Canceled"
        client.cancel_plan(asked.id)
        with pytest.raises(ServiceError, match="no plan request"):
            client.planned(asked.id)


def test_profiles_are_listed_and_read_and_planned_with(service: Service) -> None:
    digest = keep_profile(service, MEASURED)
    with client_with(service, FakePlanner()) as client:
        (listed,) = client.profiles()
        assert (listed.digest, listed.fresh, listed.num_ranks) == (digest, True, 2)
        assert client.profile(digest) == MEASURED
        for profile in (None, digest):
            assert client.plan(tiny_job(), profile=profile).state == "Queued"
        with pytest.raises(ServiceError, match="does not exist"):
            client.plan(tiny_job(), profile="none")


def test_the_awaiting_client_does_the_same(service: Service) -> None:
    keep_profile(service, MEASURED)
    plan_queue = plan_queue_of(service, FakePlanner())

    async def pause(seconds: float) -> None:
        await asyncio.to_thread(plan_queue.run_once)

    async def life() -> list[str]:
        transport = httpx.ASGITransport(app=create_app(service))
        async with AsyncClient(here(service), transport=transport, pause=pause) as client:
            asked = await client.plan(tiny_job())
            states = [each.state async for each in client.follow_plan(asked.id)]
            assert (await client.planned(asked.id)).plan == sample_plan()
            assert [each.id for each in await client.plans(limit=5)] == [asked.id]
            assert [each.digest for each in await client.profiles()] == [MEASURED.digest]
            assert await client.profile(MEASURED.digest) == MEASURED
            await client.cancel_plan(asked.id)
            assert await client.plans() == ()
            return states

    assert asyncio.run(life())[-1] == "Succeeded"


@pytest.mark.parametrize(
    ("state", "progress", "text"),
    [
        ("Queued", Search(), "waiting"),
        ("Working", Search(), "planning"),
        ("Working", Search(candidates=3), "3 simulated"),
        ("Working", Search(candidates=3, best_step_seconds=0.25), "3 simulated, best so far 250 ms per step"),
        (
            "Working",
            Search(candidates=3, best_step_seconds=0.25, best_speed=Speed(tokens_per_second_per_device=4096.0)),
            "3 simulated, best so far 250 ms per step, 4,096 tokens/s per device",
        ),
    ],
)
def test_how_far_it_is_in_a_line(state: str, progress: Search, text: str) -> None:
    assert progress_text(PlanRequest(id="r", namespace="n", name="j", state=state, progress=progress)) == text
