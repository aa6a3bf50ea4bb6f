"""What the command line writes, to look at."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from penstock.cli import output
from tests.support.own_state import own_state

__all__ = ["own_state"]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is written to stderr, where it is no terminal."""
    text = io.StringIO()
    console = Console(file=text, width=200, highlight=False)
    monkeypatch.setattr(output, "terminal", lambda: console)
    yield text
    console.file.close()
