"""Requests to stop, by real signals."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from penstock.cli import main as command
from penstock.core.host.stopping import StopRequestedError, StopRequests, listening


def test_signals_are_counted_in_order() -> None:
    with listening() as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.received == [signal.SIGTERM, signal.SIGINT]


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with listening():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_cuts_short_only_what_may_be() -> None:
    reached = []

    def work() -> None:
        with requests.cutting():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("behind the signal")

    with listening() as requests:
        with pytest.raises(StopRequestedError):
            work()
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("outside")
    assert reached == ["outside"]


def test_a_signal_that_came_before_also_does() -> None:
    requests = StopRequests()
    requests(signal.SIGINT)
    with pytest.raises(StopRequestedError), requests.cutting():
        pytest.fail("the block must not begin")


def test_only_the_first_signal_cuts() -> None:
    """A second one must not interrupt the clean-up that the first began."""
    requests = StopRequests()
    cleaned = []

    def work() -> None:
        with requests.cutting():
            try:
                requests(signal.SIGINT)
            finally:
                requests(signal.SIGINT)
                cleaned.append(True)

    with pytest.raises(StopRequestedError):
        work()
    assert cleaned


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_it_says_who_asked_first(asked: signal.Signals) -> None:
    requests = StopRequests()
    requests.check()
    requests(asked)
    requests(signal.SIGINT)
    with pytest.raises(StopRequestedError) as stop:
        requests.check()
    assert stop.value.signal == asked


def test_it_is_no_exception_that_libraries_swallow() -> None:
    assert not issubclass(StopRequestedError, Exception)


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_says_by_what(
    asked: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer makes one code of every Ctrl-C."""
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def stopped() -> None:
        raise StopRequestedError(asked)

    monkeypatch.setattr(command, "app", app)
    assert command.main([]) == code
