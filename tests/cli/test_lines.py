"""What is under way, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.cli import output
from penstock.cli.lines import PLAIN_SECONDS, LiveLine, PlainLine, line, working


def test_a_log_gets_a_line_every_few_seconds(screen: io.StringIO) -> None:
    now = 0.0
    plain = PlainLine(lambda: now)
    for second in range(100):
        now = second / 10
        plain.update(f"at {now}", None)
    plain.close()
    assert screen.getvalue().split("\n") == [f"  at {PLAIN_SECONDS}", ""]


def test_where_nobody_watches_lines_are_plain(screen: io.StringIO) -> None:
    assert isinstance(line(), PlainLine)


def test_a_terminal_gets_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    monkeypatch.setattr(output, "terminal", lambda: console)
    shown = line()
    assert isinstance(shown, LiveLine)
    shown.update("step 1/2", 0.5)
    shown.update("step 2/2", 1.0)
    shown.close()
    shown.close()
    assert "step 2/2" in text.getvalue()
    shown.update("again", None)
    shown.close()
    assert "again" in text.getvalue()


def test_work_is_announced_only_to_watchers(screen: io.StringIO) -> None:
    with working("planning"):
        pass
    assert screen.getvalue() == ""


def test_work_on_a_terminal_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(output, "terminal", lambda: Console(file=text, force_terminal=True, width=80))
    with working("planning") as report:
        report("4 simulated")
    assert "planning: 4 simulated" in text.getvalue()
