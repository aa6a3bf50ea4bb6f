"""One call in flight for each key, and one more if it is told again meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operator.workqueue import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Level, WorkQueue, backoff_seconds

Handle = Callable[[str], Awaitable[float | None]]


class Failures(list[tuple[str, int]]):
    """What went wrong, and how often in a row."""

    def __call__(self, key: str, error: Exception, number: int) -> None:
        self.append((key, number))


def ignore(key: str, error: Exception, number: int) -> None:
    """Nobody asks."""


async def settled(queue: WorkQueue) -> None:
    """Until nothing is in flight."""
    while queue.num_in_flight:
        await asyncio.sleep(0)


def test_a_key_that_is_told_again_meanwhile_is_seen_to_once_more() -> None:
    async def run() -> int:
        calls, gate = 0, asyncio.Event()

        async def handle(key: str) -> None:
            nonlocal calls
            calls += 1
            await gate.wait()

        queue = WorkQueue(handle, ignore)
        for _ in range(5):
            queue.add("a")
            await asyncio.sleep(0)
        assert (queue.num_in_flight, queue.num_waiting) == (1, 1)
        gate.set()
        await settled(queue)
        return calls

    assert asyncio.run(run()) == 2


def test_other_keys_do_not_wait() -> None:
    async def run() -> set[str]:
        entered, gate = set[str](), asyncio.Event()

        async def handle(key: str) -> None:
            entered.add(key)
            await gate.wait()

        queue = WorkQueue(handle, ignore)
        for key in "abc":
            queue.add(key)
        await asyncio.sleep(0.01)
        gate.set()
        await settled(queue)
        return entered

    assert asyncio.run(run()) == {"a", "b", "c"}


def test_it_is_called_again_when_it_asked_for() -> None:
    async def run() -> list[float]:
        loop, times = asyncio.get_running_loop(), list[float]()

        async def handle(key: str) -> float | None:
            times.append(loop.time())
            return 0.05 if len(times) < 3 else None

        queue = WorkQueue(handle, ignore)
        queue.add("a")
        await asyncio.sleep(0.3)
        assert queue.num_waiting == 0
        return times

    times = asyncio.run(run())
    assert len(times) == 3
    assert all(after - before >= 0.049 for before, after in pairwise(times))


def test_news_do_not_wait_for_a_timer() -> None:
    async def run() -> int:
        calls = 0

        async def handle(key: str) -> float:
            nonlocal calls
            calls += 1
            return 3600.0

        queue = WorkQueue(handle, ignore)
        for _ in range(3):
            queue.add("a")
            await asyncio.sleep(0.01)
        await queue.close()
        return calls

    assert asyncio.run(run()) == 3


def test_a_sooner_timer_counts() -> None:
    async def run() -> list[str]:
        calls = []

        async def handle(key: str) -> None:
            calls.append(key)

        queue = WorkQueue(handle, ignore)
        for seconds in (3600.0, 0.01, 1800.0):
            queue.add_after("a", seconds)
        await asyncio.sleep(0.1)
        return calls

    assert asyncio.run(run()) == ["a"]


def test_failures_wait_longer_and_longer_whatever_is_told() -> None:
    async def run() -> tuple[Failures, float]:
        failures, began = Failures(), asyncio.get_running_loop().time()

        async def handle(key: str) -> None:
            if len(failures) < 2:
                raise ValueError(key)

        queue = WorkQueue(handle, failures)
        queue.add("a")
        while not (len(failures) == 2 and queue.num_waiting == 0 and queue.num_in_flight == 0):
            queue.add("a")
            await asyncio.sleep(0.005)
            if asyncio.get_running_loop().time() - began > 5:
                break
        return failures, asyncio.get_running_loop().time() - began

    failures, seconds = asyncio.run(run())
    assert failures == [("a", 1), ("a", 2)]
    assert seconds >= 3 * FIRST_WAIT_SECONDS


NUM_WORKERS = 6


def turns(add: Callable[[WorkQueue], None]) -> list[str]:
    """Keys in the order in which they left a queue that first was told to resync ten thousand."""

    async def run() -> list[str]:
        calls = list[str]()

        async def handle(key: str) -> None:
            calls.append(key)
            if len(calls) == 20:
                add(queue)
            await asyncio.sleep(0)

        queue = WorkQueue(handle, ignore, num_workers=NUM_WORKERS, is_first=lambda key: key.startswith("new"))
        for number in range(10_000):
            queue.add(f"idle-{number}", Level.RESYNC)
        await settled(queue)
        assert (queue.num_waiting, queue.num_in_flight) == (0, 0)
        return calls

    return asyncio.run(run())


@pytest.mark.parametrize("key", ["new", "urgent", "idle-9999"])
def test_what_is_news_waits_for_no_resync(key: str) -> None:
    """Also a key that waits for its own resync: it is called once, and soon."""
    calls = turns(lambda queue: queue.add(key))
    assert calls.index(key) <= 20 + NUM_WORKERS
    assert Counter(calls).most_common(1) == [(calls[0], 1)]


def test_what_is_told_again_in_a_call_waits_for_no_resync() -> None:
    def add_and_resync(queue: WorkQueue) -> None:
        queue.add("urgent")
        queue.add("urgent", Level.RESYNC)

    calls = turns(add_and_resync)
    assert calls.index("urgent") <= 20 + NUM_WORKERS


def test_no_more_calls_are_in_flight_than_there_are_workers() -> None:
    async def run() -> tuple[int, int, list[str]]:
        gate, entered = asyncio.Event(), list[str]()

        async def handle(key: str) -> None:
            entered.append(key)
            await gate.wait()

        queue = WorkQueue(handle, ignore, num_workers=2, num_first=3, is_first=lambda key: key.startswith("new"))
        for number in range(5):
            queue.add(f"idle-{number}", Level.RESYNC)
            queue.add(f"new-{number}")
        await asyncio.sleep(0)
        numbers = queue.num_in_flight, queue.num_waiting
        gate.set()
        await settled(queue)
        return *numbers, entered[:5]

    in_flight, waiting, entered = asyncio.run(run())
    assert (in_flight, waiting) == (5, 5)
    assert sorted(entered) == ["idle-0", "idle-1", "new-0", "new-1", "new-2"]


@given(st.integers(1, 10_000))
def test_waits_grow_up_to_a_minute(failures: int) -> None:
    assert FIRST_WAIT_SECONDS <= backoff_seconds(failures) <= backoff_seconds(failures + 1) <= LONGEST_WAIT_SECONDS


def test_closing_waits_for_what_is_in_flight_and_starts_nothing() -> None:
    async def run() -> list[str]:
        told, gate = [], asyncio.Event()

        async def handle(key: str) -> float:
            told.append(f"begin {key}")
            await gate.wait()
            told.append(f"end {key}")
            return 0.0

        queue = WorkQueue(handle, ignore)
        queue.add("a")
        queue.add_after("b", 0.02)
        await asyncio.sleep(0)
        queue.add("a")
        asyncio.get_running_loop().call_later(0.01, gate.set)
        await queue.close()
        await asyncio.sleep(0.05)
        return told

    assert asyncio.run(run()) == ["begin a", "end a"]


@pytest.mark.parametrize("seed", range(3))
def test_never_two_at_once_of_one_key(seed: int) -> None:
    async def run() -> None:
        busy, most = Counter[str](), Counter[str]()

        async def handle(key: str) -> float | None:
            busy[key] += 1
            most[key] = max(most[key], busy[key])
            await asyncio.sleep(0.001 * (seed + 1))
            busy[key] -= 1
            return 0.002 if seed else None

        queue = WorkQueue(handle, ignore)
        for number in range(300):
            queue.add("abc"[number % 3])
            if number % 7 == 0:
                await asyncio.sleep(0.001)
        await queue.close()
        assert set(most.values()) == {1}

    asyncio.run(run())
