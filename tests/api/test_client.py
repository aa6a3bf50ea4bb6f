"""The client against the real application, and against a network that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.app import create_app
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.client import AsyncClient, Checkpoint, Client, Past, Place, ServiceError, Status, target
from penstock.client.calls import MOST_TRIES
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from tests.support.application import Application, here
from tests.support.filled_job import running_job
from tests.support.sample_report import sample_report
from tests.support.service import NOW, Clock, add_job, job_manifest, new_service

TINY = Place(name="tiny")
JOB = PipelineJob.from_manifest(job_manifest(labels={"a": "b"}))


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(here(service), transport=Application(service), pause=lambda seconds: None) as made:
        yield made


def test_a_job_from_submission_to_deletion(client: Client) -> None:
    made = client.submit(JOB)
    assert (made.name, made.status.phase, made.job.spec) == ("tiny", Phase.PENDING, JOB.spec)
    assert client.get(TINY) == made
    assert client.suspend(TINY).job.spec.run_policy.suspend
    assert not client.resume(TINY).job.spec.run_policy.suspend
    client.delete(TINY)
    assert [event.kind for event in client.events(TINY)] == [
        "created", "suspend-requested", "resume-requested", "delete-requested",
    ]  # fmt: skip
    assert [event.number for event in client.events(TINY, after=2)] == [3, 4]


def test_a_method_of_the_class_takes_the_client(client: Client) -> None:
    made = client.submit(JOB)
    assert Client.get(client, TINY) == made


def test_a_string_that_is_not_unicode_is_refused_by_the_service(client: Client) -> None:
    client.submit(JOB)
    with pytest.raises(ServiceError, match="name") as caught:
        client.retry(TINY, name="\ud800")
    assert caught.value.status == 422


def test_a_change_of_a_job_that_changed_meanwhile_is_refused(client: Client) -> None:
    read = client.submit(JOB)
    client.suspend(TINY, etag=read.etag)
    for change in (client.suspend, client.resume, client.delete):
        with pytest.raises(ServiceError, match="the job has version") as caught:
            change(TINY, etag=read.etag)
        assert caught.value.kind == "changed-meanwhile"
    client.delete(TINY, etag=client.resume(TINY, etag=client.get(TINY).etag).etag)


def test_a_guarded_deletion_whose_answer_was_lost_is_done(service: Service) -> None:
    network = Failing(service, [], after=True)
    with Client(here(service), transport=network, pause=lambda seconds: None) as client:
        made = client.submit(JOB)
        network.script.append(lost)
        client.delete(TINY, etag=made.etag)
        assert [event.kind for event in client.events(TINY)] == ["created", "delete-requested"]


def test_what_a_job_did_is_read(client: Client, service: Service) -> None:
    running_job(service)
    loss, *_ = [each for each in client.metrics(TINY, points=3) if each.name == "loss"]
    assert loss.rank is None
    assert 1 <= len(loss.points) <= 3
    assert {each.rank for each in client.metrics(TINY, ranks=(0, 1))} == {None, 0, 1}
    newest = client.timeline(TINY)
    assert (newest.step, newest.timeline) == (120, sample_report().measured)
    assert client.timeline(Past(uid=uid(service)), step=120) == newest
    with pytest.raises(ServiceError, match="step 3 was not sampled"):
        client.timeline(TINY, step=3)
    (plan,) = client.plans_of(TINY)
    assert (plan.revision, plan.plan.digest) == (1, plan.digest)


def test_which_service_it_is(client: Client) -> None:
    found = client.version()
    assert (found.version, found.api) == (version("penstock-core"), "v1")
    assert found.schema_revision


def test_a_dry_run_makes_nothing(client: Client) -> None:
    told = client.submit(JOB, dry_run=True)
    assert (told.name, told.status.phase, told.job.spec) == ("tiny", Phase.PENDING, JOB.spec)
    assert list(client.jobs()) == []


def test_all_jobs_are_listed_page_by_page(client: Client, service: Service) -> None:
    names = [add_job(service, f"job{i}").name for i in range(7)]
    assert [job.name for job in client.jobs(sort="name", limit=3)] == names
    assert list(client.jobs(phase="Running")) == []


def test_a_refusal_says_what_where_and_what_to_do(client: Client) -> None:
    client.submit(JOB)
    with pytest.raises(ServiceError, match="a job default/tiny exists") as caught:
        client.submit(JOB)
    error = caught.value
    assert (error.status, error.kind, error.where) == (409, "name-taken", "metadata.name")
    assert "choose another name" in error.remedy


def test_a_job_is_followed_to_its_end(client: Client, service: Service) -> None:
    uid = client.submit(JOB).uid
    phases = iter([Phase.QUEUED, Phase.QUEUED, Phase.FAILED])

    def happens(seconds: float) -> None:
        phase = next(phases)
        if client.get(TINY).status.phase is not phase:
            service.write(uid, lambda c: jobs.enter_phase(c, uid, phase, "Because", "", NOW))

    with Client(here(service), transport=Application(service), pause=happens) as watching:
        assert [job.status.phase for job in watching.follow(TINY)] == [Phase.PENDING, Phase.QUEUED, Phase.FAILED]
    assert client.wait(TINY).status.reason == "Because"


def test_the_awaiting_client_does_the_same(service: Service) -> None:
    async def life() -> list[str]:
        transport = httpx.ASGITransport(app=create_app(service))
        async with AsyncClient(here(service), transport=transport) as client:
            assert (await client.submit(JOB, dry_run=True)).name == "tiny"
            assert [job async for job in client.jobs()] == []
            await client.submit(JOB)
            suspended = await client.suspend(TINY)
            resumed = await client.resume(TINY, etag=suspended.etag)
            with pytest.raises(ServiceError, match="the job has version"):
                await client.suspend(TINY, etag=suspended.etag)
            await client.delete(TINY, etag=resumed.etag)
            assert (await client.version()).api == "v1"
            assert await client.metrics(TINY, ranks=(0,)) == ()
            assert await client.plans_of(TINY) == ()
            with pytest.raises(ServiceError, match="no step was sampled"):
                await client.timeline(TINY)
            assert [job.name async for job in client.jobs()] == ["tiny"]
            with pytest.raises(ServiceError, match="there is no job"):
                await client.get(Place(name="none"))
            service.write("x", lambda c: jobs.enter_phase(c, uid(service), Phase.FAILED, "", "", NOW))
            assert (await client.wait(TINY)).status.phase is Phase.FAILED
            return [event.kind for event in await client.events(TINY)]

    assert asyncio.run(life())[-1] == "phase"


SOME = Checkpoint(step=8, attempt=2, complete=True, bytes=1, created_at="", uri="")
SENT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "submit": ((JOB,), {"dry_run": True}),
    "get": ((Past(uid="a/b"),), {}),
    "suspend": ((TINY,), {"etag": "1"}),
    "resume": ((TINY,), {}),
    "delete": ((TINY,), {"etag": "2"}),
    "events": ((TINY, 7), {}),
    "retry": ((TINY, "again"), {}),
    "reproduce": ((TINY,), {}),
    "logs": ((TINY,), {"rank": 1, "cursor": "c", "tail": 3}),
    "metrics": ((TINY,), {"ranks": (0, 1)}),
    "timeline": ((TINY, 4), {}),
    "plans_of": ((TINY,), {}),
    "checkpoints": ((TINY,), {}),
    "export": ((TINY, SOME), {}),
    "artifacts": ((TINY,), {}),
    "version": ((), {}),
    "login_link": ((), {}),
    "plan": ((JOB,), {"profile": "d", "what_if": True}),
    "planned": (("1",), {}),
    "plans": ((), {"namespace": "team"}),
    "cancel_plan": (("1",), {}),
    "profiles": ((), {}),
    "profile": (("d",), {}),
}
"""Every method that sends one request, with arguments."""


def requests_of(send: Callable[[httpx.MockTransport], Any]) -> list[tuple[Any, ...]]:
    """The requests, without their keys, of a client that is refused."""
    requests: list[tuple[Any, ...]] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name != "idempotency-key"}
        requests.append((request.method, str(request.url), request.content, headers))
        return httpx.Response(403, json={})

    with pytest.raises(ServiceError):
        send(httpx.MockTransport(refuse))
    return requests


@pytest.mark.parametrize("name", SENT)
def test_both_clients_send_the_same_request(service: Service, name: str) -> None:
    (arguments, named), there = SENT[name], here(service)

    async def awaited(transport: httpx.MockTransport) -> None:
        async with AsyncClient(there, transport=transport) as client:
            await getattr(client, name)(*arguments, **named)

    def sent(transport: httpx.MockTransport) -> None:
        with Client(there, transport=transport) as client:
            getattr(client, name)(*arguments, **named)

    requests = requests_of(sent)
    assert len(requests) == 1
    assert requests == requests_of(lambda transport: asyncio.run(awaited(transport)))


def test_both_clients_have_the_same_methods() -> None:
    methods, awaited = (
        {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")} for cls in (Client, AsyncClient)
    )
    assert methods.keys() == awaited.keys()
    assert methods.keys() - SENT.keys() == {"jobs", "download", "listen", "follow", "wait", "follow_plan", "send"}
    for name in SENT:
        assert methods[name].__doc__ == awaited[name].__doc__


def uid(service: Service) -> str:
    return service.read(lambda c: jobs.find(c, "default", "tiny")).uid


class Failing(httpx.BaseTransport):
    """Fails as the script says, then hands over to the application; remembers what was asked."""

    def __init__(self, service: Service, script: list[Callable[[], httpx.Response]], after: bool = False) -> None:
        self._application, self.script, self._after = Application(service), script, after
        self.keys: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        if not self.script:
            return self._application.handle_request(request)
        if self._after:
            self._application.handle_request(request)
        return self.script.pop(0)()


def lost() -> httpx.Response:
    raise httpx.ReadTimeout("lost")


def busy() -> httpx.Response:
    return httpx.Response(503, headers={"Retry-After": "7"}, json={"detail": "busy"})


@pytest.mark.parametrize("after", [False, True], ids=["before it was done", "after it was done"])
def test_a_lost_answer_is_asked_for_again_and_done_once(service: Service, after: bool) -> None:
    network = Failing(service, [lost, busy, lost], after)
    pauses: list[float] = []
    with Client(here(service), transport=network, pause=pauses.append) as client:
        assert client.submit(JOB).name == "tiny"
        assert len(list(client.jobs())) == 1
    assert len(set(network.keys[:4])) == 1
    assert pauses == [0.2, 7.0, 0.8]


def test_tries_end(service: Service) -> None:
    network = Failing(service, [lost] * 99)
    client = Client(here(service), transport=network, pause=lambda seconds: None)
    with client, pytest.raises(ServiceError, match=r"cannot be reached: lost\n.*penstock serve"):
        client.get(TINY)
    assert len(network.keys) == MOST_TRIES


def test_an_answer_without_a_reason_is_told_as_such(service: Service) -> None:
    network = Failing(service, [lambda: httpx.Response(418, text="<html>")])
    client = Client(here(service), transport=network)
    with client, pytest.raises(ServiceError, match="answered 418 without a reason"):
        client.get(TINY)


class TestTarget:
    """Which service is meant."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> Path:
        (tmp_path / ".config" / "penstock").mkdir(parents=True)
        written = {"server": "http://127.0.0.1:8470", "token": "written"}
        (tmp_path / ".config" / "penstock" / "service.json").write_text(json.dumps(written))
        return tmp_path

    @pytest.mark.parametrize(
        ("server", "environment", "expected"),
        [
            (None, {}, ("http://127.0.0.1:8470", "written")),
            ("http://127.0.0.1:8470", {}, ("http://127.0.0.1:8470", "written")),
            (None, {"PENSTOCK_TOKEN": "mine"}, ("http://127.0.0.1:8470", "mine")),
            ("http://far/", {"PENSTOCK_TOKEN": "mine"}, ("http://far", "mine")),
            (None, {"PENSTOCK_SERVER": "http://far", "PENSTOCK_TOKEN": "mine"}, ("http://far", "mine")),
        ],
    )
    def test_is_found(
        self, home: Path, server: str | None, environment: dict[str, str], expected: tuple[str, str]
    ) -> None:
        found = target(server, environment, home)
        assert (found.server, found.token) == expected

    def test_a_token_goes_to_its_own_service_only(self, home: Path) -> None:
        with pytest.raises(UserError, match="no token is configured for http://far"):
            target("http://far", {}, home)

    def test_none_is_known(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no service is configured"):
            target(None, {}, tmp_path)

    @pytest.mark.parametrize("text", ["{", "\xff"])
    def test_a_broken_file_is_named(self, home: Path, text: str) -> None:
        path = home / ".config" / "penstock" / "service.json"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"service\.json: cannot be read"):
            target(None, {}, home)


def test_fields_of_a_newer_service_are_passed_over(client: Client) -> None:
    value: dict[str, Any] = {"phase": "Running", "mood": "fine", "progress": {"step": 1, "numSteps": 2, "mood": 1}}
    status = Status.from_manifest(value)
    assert (status.phase, status.progress and status.progress.step) == (Phase.RUNNING, 1)
