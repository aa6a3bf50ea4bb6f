"""The client's live streams and downloads, from a real server whose connections break and end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.api.store import jobs
from penstock.api.store.schema import jobs as jobs_table
from penstock.client import AsyncClient, Client, Message, Past, Place, ServiceError, Target
from penstock.client.calls import MOST_TRIES
from penstock.client.listening import EventStream
from penstock.core.lifecycle import Phase
from tests.support.listening import answering, bearer
from tests.support.run_files import FILES, add_checkpoint, lay_out
from tests.support.service import NOW, Clock, add_job, new_service, send_lines

TINY = Place(name="tiny")
MODEL = "exports/a1-step-4/model.safetensors"
SHORT = Limits(stream_seconds=0.3)


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    """Its streams end soon, so that anyone who listens has to come again."""
    made = new_service(tmp_path, clock=clock, limits=SHORT)
    yield made
    made.close()


@pytest.fixture
def uid(service: Service) -> str:
    return add_job(service).uid


@pytest.fixture
def target(service: Service) -> Iterator[Target]:
    with answering(service) as url:
        yield Target(server=url, token=bearer(service, role=Role.ADMIN)["Authorization"].removeprefix("Bearer "))


@pytest.fixture
def client(target: Target) -> Iterator[Client]:
    with Client(target, pause=lambda seconds: None) as made:
        yield made


def enter(service: Service, uid: str, phase: Phase) -> None:
    service.write(uid, lambda c: jobs.enter_phase(c, uid, phase, "Because", "", NOW))


# Listening


def test_what_happens_is_heard_once_over_many_connections(service: Service, uid: str, client: Client) -> None:
    heard: list[Message] = []
    phases = iter([Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING])
    for message in client.listen(TINY):
        heard.append(message)
        if message.kind == "hello" and (phase := next(phases, None)) is not None:
            enter(service, uid, phase)
        if message.kind == "event" and message.data["number"] == 5:
            break
    assert [each.data["number"] for each in heard if each.kind == "event"] == [1, 2, 3, 4, 5]
    assert [each.kind for each in heard].count("hello") >= 4


def test_only_what_follows_is_heard(service: Service, uid: str, client: Client) -> None:
    for phase in (Phase.QUEUED, Phase.PROFILING):
        enter(service, uid, phase)
    events = (each for each in client.listen(TINY, after=2) if each.kind == "event")
    assert next(events).data["number"] == 3


def test_a_job_is_followed_by_its_uid_though_its_name_is_another_s(service: Service, uid: str, client: Client) -> None:
    followed = client.follow(Past(uid=uid))
    assert next(followed).status.phase is Phase.PENDING
    service.write(uid, lambda c: jobs.mark_deleted(c, uid, NOW))
    add_job(service)
    assert [job.uid for job in followed] == []
    past = client.get(Past(uid=uid))
    assert (past.uid, past.status.phase) == (uid, Phase.PENDING)


def test_all_jobs_are_heard_of(service: Service, client: Client) -> None:
    messages = client.listen(name="b")
    assert next(messages).kind == "hello"
    add_job(service, "a")
    add_job(service, "b")
    assert next(each for each in messages if each.kind == "job").data["name"] == "b"


def test_a_stream_that_is_refused(client: Client) -> None:
    with pytest.raises(ServiceError, match="there is no job"):
        next(client.listen(Place(name="none")))


class Breaking(httpx.HTTPTransport):
    """Cuts every answer after so many bytes, as long as ``left`` says."""

    def __init__(self, num_bytes: int, left: int) -> None:
        super().__init__()
        self._num_bytes, self.left = num_bytes, left
        self.asked: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("range"))
        answer = super().handle_request(request)
        if self.left <= 0:
            return answer
        self.left -= 1
        body = answer.stream
        assert isinstance(body, httpx.SyncByteStream)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=Cut(body, self._num_bytes))


class Cut(httpx.SyncByteStream):
    """The beginning of a stream."""

    def __init__(self, body: httpx.SyncByteStream, num_bytes: int) -> None:
        self._body, self._left = body, num_bytes

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._body:
            yield chunk[: self._left]
            self._left -= len(chunk)
            if self._left <= 0:
                raise httpx.ReadError("the connection broke")

    def close(self) -> None:
        self._body.close()


def test_a_connection_that_breaks_in_a_message_is_followed_by_another(
    service: Service, uid: str, target: Target
) -> None:
    for phase in (Phase.QUEUED, Phase.PROFILING):
        enter(service, uid, phase)
    with Client(target, transport=Breaking(250, left=4), pause=lambda seconds: None) as client:
        numbers = (each.data["number"] for each in client.listen(TINY) if each.kind == "event")
        assert list(itertools.islice(numbers, 3)) == [1, 2, 3]


def test_a_service_that_stays_away_is_told(target: Target) -> None:
    pauses: list[float] = []
    gone = Target(server="http://127.0.0.1:9", token=target.token)
    with Client(gone, pause=pauses.append) as client, pytest.raises(ServiceError, match="cannot be reached"):
        next(client.listen())
    assert len(pauses) == MOST_TRIES - 1


@pytest.mark.parametrize(
    ("lines", "kind", "data"),
    [
        (["event: job", 'data: {"a": 1}', ""], "job", {"a": 1}),
        (["event:job", "data:1", ""], "job", 1),
        (["data: 1", ""], "message", 1),
        ([":", "data: 1", ""], "message", 1),
    ],
)
def test_lines_of_a_stream(lines: list[str], kind: str, data: Any) -> None:
    stream = EventStream("http://here")
    *before, last = [stream.parse_line(line) for line in lines]
    assert (set(before), last) == ({None}, Message(kind, data))


def test_a_stream_says_when_to_come_again_and_after_what() -> None:
    stream = EventStream("http://here")
    for line in ("retry: 700", "id: 12", "data: 1", ""):
        stream.parse_line(line)
    assert stream.headers()["Last-Event-ID"] == "12"
    assert stream.retry_seconds == 0.7
    for line in ("data: {half a mess",):
        stream.parse_line(line)
    stream.headers()
    assert [stream.parse_line(line) for line in ("", "data: 2", "")] == [None, None, Message("message", 2)]


# Following


def test_a_job_is_followed_by_its_stream(service: Service, uid: str, client: Client) -> None:
    phases = iter([Phase.QUEUED, Phase.PROFILING, Phase.FAILED])
    seen: list[Phase] = []
    for job in client.follow(TINY):
        seen.append(job.status.phase)
        if (phase := next(phases, None)) is not None:
            enter(service, uid, phase)
    assert seen == [Phase.PENDING, Phase.QUEUED, Phase.PROFILING, Phase.FAILED]
    assert client.wait(TINY).status.reason == "Because"


def test_a_deleted_job_is_followed_no_further(service: Service, uid: str, client: Client) -> None:
    following = client.follow(TINY)
    next(following)
    client.suspend(TINY)
    service.write(uid, lambda c: jobs.mark_deleted(c, uid, NOW))
    assert list(following) == []


def test_what_a_stream_tells_of_a_job_is_taken_over(service: Service, uid: str, client: Client) -> None:
    service.write(uid, lambda c: c.execute(update(jobs_table).where(jobs_table.c.uid == uid).values(attempt=1)))
    before = client.get(TINY)
    client.suspend(TINY)
    told = jobs.Reported(attempt=1, step=3, loss=2.5, reported_at=NOW)
    service.write(uid, lambda c: jobs.report(c, [(uid, told)]))
    rows = (each.data for each in client.listen(TINY) if each.kind == "job")
    assert before.updated(next(rows)) == client.get(TINY)


# Downloads, logs, and what follows


def test_a_download_goes_on_where_it_broke(service: Service, uid: str, target: Target) -> None:
    lay_out(service.settings.runs / uid)
    network = Breaking(100_000, left=2)
    with Client(target, transport=network, pause=lambda seconds: None) as client:
        assert b"".join(client.download(TINY, MODEL)) == FILES[MODEL]
    assert network.asked == [None, "bytes=100000-", "bytes=200000-"]


def test_a_file_that_changes_meanwhile_is_not_mixed(service: Service, uid: str, target: Target) -> None:
    root = service.settings.runs / uid
    lay_out(root)
    with Client(target, transport=Breaking(1000, left=1), pause=lambda seconds: None) as client:
        pieces = client.download(TINY, MODEL)
        next(pieces)
        (root / MODEL).write_bytes(b"new")
        with pytest.raises(ServiceError, match="changed while it was sent"):
            list(pieces)


def test_files_checkpoints_and_what_reproduces_a_job(service: Service, uid: str, client: Client) -> None:
    root = service.settings.runs / uid
    lay_out(root)
    assert [each.name for each in client.artifacts(TINY)] == sorted(FILES)
    (found,) = client.checkpoints(TINY)
    assert (found.step, found.export and found.export.state) == (4, "done")
    assert client.export(TINY, found).export == found.export
    assert client.reproduce(TINY).manifest["metadata"]["name"] == "tiny-2"
    with pytest.raises(ServiceError, match="there is no artifact"):
        list(client.download(TINY, "none"))
    with pytest.raises(ServiceError, match="the job is Pending"):
        client.retry(TINY)
    enter(service, uid, Phase.FAILED)
    add_checkpoint(root, 1, 8)
    assert client.retry(TINY).job.spec.checkpoint.resume_from == f"out://{uid}/1/8"
    assert client.retry(TINY, "mine").name == "mine"


def test_lines_are_read_on_by_cursor(service: Service, uid: str, client: Client) -> None:
    send_lines(service, uid, (0, "a"), (1, "b"), (-1, "c"))
    page = client.logs(TINY)
    assert [(each.rank, each.message) for each in page.items] == [(-1, "c"), (0, "a"), (1, "b")]
    assert client.logs(TINY, cursor=page.next).items == ()
    send_lines(service, uid, (1, "d"), first=3)
    assert [each.message for each in client.logs(TINY, cursor=page.next).items] == ["d"]
    assert [each.message for each in client.logs(TINY, tail=2).items] == ["c", "d"]
    assert [each.message for each in client.logs(TINY, rank=-1).items] == ["c"]


# The client that awaits


def awaiting(target: Target, life: Callable[[AsyncClient], Any]) -> Any:
    async def whole() -> Any:
        async def at_once(seconds: float) -> None:
            pass

        async with AsyncClient(target, pause=at_once) as client:
            return await life(client)

    return asyncio.run(whole())


def test_the_awaiting_client_listens_and_follows(service: Service, uid: str, target: Target) -> None:
    phases = iter([Phase.QUEUED, Phase.PROFILING, Phase.FAILED])

    async def life(client: AsyncClient) -> list[Phase]:
        seen = []
        async for job in client.follow(TINY):
            seen.append(job.status.phase)
            if (phase := next(phases, None)) is not None:
                await asyncio.to_thread(enter, service, uid, phase)
        return seen

    assert awaiting(target, life) == [Phase.PENDING, Phase.QUEUED, Phase.PROFILING, Phase.FAILED]


def test_the_awaiting_client_brings_files(service: Service, uid: str, target: Target) -> None:
    lay_out(service.settings.runs / uid)
    send_lines(service, uid, (0, "a"))

    async def gathered(pieces: AsyncIterator[bytes]) -> bytes:
        return b"".join([piece async for piece in pieces])

    async def life(client: AsyncClient) -> tuple[Any, ...]:
        (checkpoint,) = await client.checkpoints(TINY)
        exported = await client.export(TINY, checkpoint)
        with pytest.raises(ServiceError, match="there is no artifact"):
            await gathered(client.download(TINY, "none"))
        lines = (await client.logs(TINY)).items
        files = await client.artifacts(TINY)
        return await gathered(client.download(TINY, MODEL)), exported.export, len(lines), len(files)

    content, export, num_lines, num_files = awaiting(target, life)
    assert (content, export.state, num_lines, num_files) == (FILES[MODEL], "done", 1, len(FILES))


def test_the_awaiting_client_retries(service: Service, uid: str, target: Target) -> None:
    enter(service, uid, Phase.FAILED)

    async def life(client: AsyncClient) -> tuple[str, dict[str, Any]]:
        return (await client.retry(TINY)).name, (await client.reproduce(TINY)).manifest["metadata"]

    assert awaiting(target, life) == ("tiny-2", {"name": "tiny-3"})
