"""How long records are shipped: until the end and all is acknowledged, or nobody answers any more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent.record_upload import Reply
from penstock.agent.shipping import DRAIN_SECONDS, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, POLL_SECONDS
from tests.support.outboxes import fill, reply
from tests.support.ship_bench import LOST, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def ending_after(looks: int) -> Callable[[], bool]:
    """Ended from that look on."""
    counter = itertools.count()
    return lambda: next(counter) >= looks


def test_what_was_written_before_the_end_is_sent_after_it(bench: Bench) -> None:
    def ended() -> bool:
        fill(bench.outbox, 2)
        return len(bench.pauses) == 3

    assert bench.shipper().run(ended)
    assert bench.kept == list(range(8))
    assert bench.pauses == [POLL_SECONDS] * 3


def test_it_ends_only_when_all_is_acknowledged(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503), LOST, reply(500)]
    assert bench.shipper().run(lambda: True)
    assert bench.service.sent == [[0, 1]] * 4
    assert len(bench.pauses) == 3


def test_it_does_not_end_before_it_is_asked(bench: Bench) -> None:
    fill(bench.outbox, 2)
    assert bench.shipper().run(ending_after(50))
    assert len(bench.pauses) == 50


def test_it_waits_longer_after_each_failure_and_not_after_a_success(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 8
    bench.service.answers += [lambda: Reply(status=200, sequence=1)]

    def ended() -> bool:
        if len(bench.pauses) == 9:
            fill(bench.outbox, 1)
            bench.service.answers = [reply(503)]
        return len(bench.pauses) == 10

    assert bench.shipper().run(ended)
    doubled = [FIRST_WAIT_SECONDS * 2**n for n in range(5)]
    assert bench.pauses == [*doubled, *[LONGEST_WAIT_SECONDS] * 3, POLL_SECONDS, FIRST_WAIT_SECONDS]


def test_it_gives_up_some_time_after_the_end(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 10_000
    assert not bench.shipper().run(lambda: True)
    assert DRAIN_SECONDS <= sum(bench.pauses) <= DRAIN_SECONDS + LONGEST_WAIT_SECONDS
    assert max(bench.pauses) <= LONGEST_WAIT_SECONDS


def test_it_does_not_give_up_before_the_end(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 500
    assert bench.shipper().run(ending_after(400))
    assert sum(bench.pauses) > DRAIN_SECONDS
