"""The webhook: told of every job's end, by a signed call, at least once, anyone who fails or dies in between."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.api.service import Service
from penstock.api.store import deliveries, jobs
from penstock.api.store.jobs import StoredJob
from penstock.api.webhook import (
    BACKOFF_SECONDS,
    CLAIM_SECONDS,
    GIVE_UP_SECONDS,
    MOST_BACKOFF_SECONDS,
    Deliverer,
    Webhook,
    backoff_seconds,
)
from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase
from tests.support.filled_job import enter, running_job
from tests.support.receiver import SECRET, Receiver, receiving
from tests.support.repository import ROOT
from tests.support.service import Clock, add_job

GUIDE = ROOT / "docs" / "guides" / "monitoring.md"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def deliverer(service: Service, receiver: Receiver, clock: Clock) -> Deliverer:
    return deliverer_to(service, receiver.url, clock)


def deliverer_to(service: Service, url: str, clock: Clock) -> Deliverer:
    return Deliverer(service, Webhook(url=url, secret=SECRET), "http://here:8470", clock.seconds)


def ended(service: Service, phase: Phase = Phase.SUCCEEDED, name: str = "tiny") -> StoredJob:
    return enter(service, running_job(service, name).uid, phase, "as it happened")


class TestCall:
    @pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
    def test_it_says_what_became_of_the_job(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock, phase: Phase
    ) -> None:
        job = ended(service, phase)
        deliverer.run_once()
        (call,) = receiver.calls
        assert (call.method, call.path) == ("POST", "/ended?of=penstock")
        assert call.headers["Content-Type"] == "application/json"
        assert call.message == {
            "type": f"job.{phase.lower()}",
            "uid": job.uid,
            "namespace": "default",
            "name": "tiny",
            "phase": phase.value,
            "reason": "Because",
            "message": "as it happened",
            "attempt": 0,
            "createdAt": clock.now,
            "startedAt": None,
            "finishedAt": clock.now,
            "url": "http://here:8470/jobs/default/tiny",
        }

    def test_it_is_signed(self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock) -> None:
        job = ended(service)
        deliverer.run_once()
        (call,) = receiver.calls
        assert call.headers["webhook-id"] == job.uid
        assert call.headers["webhook-timestamp"] == str(int(clock.now))
        assert call.proves(SECRET)
        assert not call.proves(SECRET + b"!")

    def test_a_redirect_is_not_followed(self, service: Service, receiver: Receiver, deliverer: Deliverer) -> None:
        receiver.answers, receiver.location = [307], receiver.url.replace("ended", "elsewhere")
        ended(service)
        deliverer.run_once()
        assert [call.path for call in receiver.calls] == ["/ended?of=penstock"]

    @pytest.mark.parametrize("phase", [Phase.RECOVERING, Phase.SUSPENDED])
    def test_there_is_none_while_the_job_may_go_on(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, phase: Phase
    ) -> None:
        add_job(service, "waits")
        ended(service, phase)
        deliverer.run_once()
        assert receiver.calls == []

    def test_there_is_none_for_a_job_that_is_deleted_before_its_end(
        self, service: Service, receiver: Receiver, deliverer: Deliverer
    ) -> None:
        uid = running_job(service).uid
        service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, service.clock()))
        deliverer.run_once()
        assert receiver.calls == []

    def test_a_job_that_is_deleted_after_its_end_is_told_of(
        self, service: Service, receiver: Receiver, deliverer: Deliverer
    ) -> None:
        uid = ended(service).uid
        service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, service.clock()))
        deliverer.run_once()
        assert len(receiver.calls) == 1


class TestDelivery:
    def test_it_happens_once_if_all_goes_well(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock
    ) -> None:
        ended(service)
        for _ in range(3):
            deliverer.run_once()
            clock.now += 3600
        deliverer_to(service, receiver.url, clock).run_once()
        assert len(receiver.calls) == 1

    def test_a_receiver_that_fails_at_first_is_told_again(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock
    ) -> None:
        receiver.answers = [500, 404]
        job, began, at = ended(service), clock.now, []
        for _ in range(60):
            before = len(receiver.calls)
            deliverer.run_once()
            at += [clock.now - began] * (len(receiver.calls) - before)
            clock.now += 1
        assert at == [0, BACKOFF_SECONDS, 3 * BACKOFF_SECONDS]
        assert {call.body for call in receiver.calls} == {receiver.calls[0].body}
        assert {call.headers["webhook-id"] for call in receiver.calls} == {job.uid}
        assert all(call.proves(SECRET) for call in receiver.calls)

    def test_one_that_is_not_there_is_called_again(
        self, service: Service, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ended(service)
            with caplog.at_level(logging.WARNING):
                deliverer_to(service, f"http://127.0.0.1:{closed.getsockname()[1]}/secret-path", clock).run_once()
        assert "default/tiny" in caplog.text
        assert "retrying in 5 s" in caplog.text
        assert "secret-path" not in caplog.text
        restarted = deliverer_to(service, receiver.url, clock)
        restarted.run_once()
        assert receiver.calls == []
        clock.now += CLAIM_SECONDS
        restarted.run_once()
        assert len(receiver.calls) == 1

    def test_it_is_given_up_after_a_day(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        receiver.answers = [500] * 10_000
        ended(service)
        began, last = clock.now, 0.0
        while clock.now < began + 2 * GIVE_UP_SECONDS:
            before = len(receiver.calls)
            deliverer.run_once()
            last = clock.now if len(receiver.calls) > before else last
            clock.now += 600
        assert GIVE_UP_SECONDS - 2 * MOST_BACKOFF_SECONDS < last - began <= GIVE_UP_SECONDS
        assert 24 < len(receiver.calls) < 40
        assert caplog.messages[-1].endswith("giving up")

    def test_one_that_fails_keeps_no_other_back(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock
    ) -> None:
        receiver.answers = [500]
        first = ended(service, name="first")
        clock.now += 1
        ended(service, name="second")
        deliverer.run_once()
        deliverer.run_once()
        assert [call.message["name"] for call in receiver.calls] == ["first", "second"]
        clock.now += BACKOFF_SECONDS
        deliverer.run_once()
        assert receiver.calls[-1].message["uid"] == first.uid

    def test_whoever_dies_during_the_call_leaves_it_to_the_next(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock
    ) -> None:
        """The receiver has it, and nobody noted that down."""
        job = ended(service)
        found = deliverer._claimed()
        assert found is not None
        assert found[0].uid == job.uid
        other = deliverer_to(service, receiver.url, clock)
        other.run_once()
        assert receiver.calls == []
        clock.now += CLAIM_SECONDS
        other.run_once()
        assert len(receiver.calls) == 1

    @pytest.mark.parametrize("jump", [-3600.0, 3600.0])
    def test_a_jump_of_the_clock_moves_no_retry(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock, jump: float
    ) -> None:
        receiver.answers = [500]
        ended(service)
        deliverer.run_once()
        clock.ahead = jump
        deliverer.run_once()
        clock.now += BACKOFF_SECONDS - 0.1
        deliverer.run_once()
        assert len(receiver.calls) == 1
        clock.now += 0.1
        deliverer.run_once()
        assert len(receiver.calls) == 2

    @pytest.mark.parametrize("ahead", [-3600.0, -60.0, 60.0, 3600.0])
    def test_a_service_with_another_clock_does_not_call_at_the_same_time(
        self, service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock, ahead: float
    ) -> None:
        ended(service)
        assert deliverer._claimed() is not None
        other_clock = Clock(clock.now, ahead)
        other = deliverer_to(replace(service, clock=other_clock), receiver.url, other_clock)
        other.run_once()
        other_clock.now += CLAIM_SECONDS - 0.1
        other.run_once()
        assert receiver.calls == []
        other_clock.now += 0.1
        other.run_once()
        assert len(receiver.calls) == 1

    def test_two_services_do_not_call_at_once(self, service: Service, clock: Clock) -> None:
        job = ended(service)
        claimed = [
            service.write(job.uid, lambda connection: deliveries.claim(connection, job.uid, 0, clock.now + 1))
            for _ in range(2)
        ]
        assert claimed == [True, False]

    def test_what_was_told_goes_with_the_job(self, service: Service, receiver: Receiver, deliverer: Deliverer) -> None:
        job = ended(service)
        deliverer.run_once()
        service.write(job.uid, lambda connection: jobs.forget(connection, job.uid))
        deliverer.run_once()
        assert len(receiver.calls) == 1


def test_a_receiver_that_follows_the_guide_believes_it(
    service: Service, receiver: Receiver, deliverer: Deliverer, clock: Clock
) -> None:
    (code,) = re.findall(r"```python\n(import base64.*?)```", GUIDE.read_text(), re.DOTALL)
    guided: dict[str, Any] = {}
    exec(code, guided)
    clock.now = time.time()
    ended(service)
    deliverer.run_once()
    (call,) = receiver.calls
    assert guided["is_genuine"](call.headers, call.body, SECRET)
    assert not guided["is_genuine"](call.headers, call.body + b" ", SECRET)
    assert not guided["is_genuine"]({**call.headers, "webhook-timestamp": "1700000000"}, call.body, SECRET)


def test_waits_grow_to_an_hour() -> None:
    waits = [backoff_seconds(tries) for tries in range(1, 2000)]
    assert waits[:3] == [5, 10, 20]
    assert max(waits) == waits[-1] == MOST_BACKOFF_SECONDS


@pytest.mark.parametrize("url", ["", "x", "ftp://a/b", "file:///etc/passwd", "http://", "http://me:secret@a/", "//a/b"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="--webhook: is not a URL for POST requests"):
        Webhook(url=url, secret=SECRET)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UserError, match="openssl rand -hex 32"):
        Webhook(url="http://a/", secret=b"short")


def test_secrets_are_not_shown() -> None:
    shown = repr(Webhook(url="https://hooks.example/T0/secret", secret=SECRET))
    assert "secret" not in shown
    assert SECRET.decode() not in shown
