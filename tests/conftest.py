"""Fixtures that several folders of tests share."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import not_run
from tests.support.told_at_once import TellsAtOnce

if TYPE_CHECKING:
    from tests.support.worker_pool import WorkerPool

POOL_RANKS = 16

settings.register_profile("penstock", deadline=None)  # a busy machine is no failure
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    """A shell has what it runs in the background ignore SIGINT, and so would all that is started here."""
    if not hasattr(config, "workerinput"):  # of pytest-xdist, whose workers have no terminal
        config.pluginmanager.register(TellsAtOnce(config))
        not_run.note_whole_run(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """After every other summary, where it is seen."""
    yield
    not_run.close(terminalreporter)


class _Pools:
    """The session's pool; a broken one is replaced, so that one failing test does not fail all that follow."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def get(self) -> WorkerPool:
        if self._pool is None or self._pool.broken:
            self.close()
            # Needs torch, which core's and planner's tests do without.
            from tests.support.worker_pool import WorkerPool

            self._pool = WorkerPool(POOL_RANKS)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


_pools = pytest.StashKey[_Pools]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_pools] = _Pools()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No pool waits next to tests without it: gloo wakes a hundred times a second in each of its processes."""
    not_run.leave_out_if_long(item)
    if "worker_pool" not in getattr(item, "fixturenames", ()):
        item.session.stash[_pools].close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.stash[_pools].close()


@pytest.fixture
def worker_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Sixteen processes joined by gloo. Mark tests that use it ``xdist_group("worker-pool")``: one pool is enough."""
    return request.session.stash[_pools].get()
