"""Work on a loop of its own goes on while the loops of its callers come and go."""

from __future__ import annotations

import asyncio

import pytest

from penstock.operator.background import BackgroundLoop

SOON = 5.0


async def add(first: int, second: int) -> int:
    await asyncio.sleep(0)
    return first + second


async def fail() -> None:
    raise ValueError("as scripted")


def test_results_and_errors_come_back() -> None:
    with BackgroundLoop() as background:
        assert asyncio.run(background.run(add(1, 2))) == 3
        assert background.wait_for(add(3, 4)) == 7
        with pytest.raises(ValueError, match="as scripted"):
            asyncio.run(background.run(fail()))
        with pytest.raises(ValueError, match="as scripted"):
            background.wait_for(fail())
    assert background.loop.is_closed()


def test_a_task_outlives_the_loop_that_began_it() -> None:
    ended: list[int] = []

    async def begin() -> asyncio.Task[None]:
        async def later() -> None:
            await asyncio.sleep(0.1)
            ended.append(1)

        return asyncio.get_running_loop().create_task(later())

    with BackgroundLoop() as background:
        task = asyncio.run(background.run(begin()))
        assert not ended

        async def wait() -> None:
            await asyncio.wait_for(task, SOON)

        background.wait_for(wait())
    assert ended == [1]


def test_the_caller_s_loop_goes_on_meanwhile() -> None:
    async def test(background: BackgroundLoop) -> int:
        ticks = 0
        work = asyncio.ensure_future(background.run(asyncio.sleep(0.2)))
        while not work.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks

    with BackgroundLoop() as background:
        assert asyncio.run(test(background)) > 2
