"""What is shown as under way, kept instead; see `penstock.cli.lines.Line`."""

from __future__ import annotations


class Remembering:
    """A line that keeps what it was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.shares: list[float | None] = []
        self.num_closed = 0

    def update(self, text: str, done: float | None) -> None:
        self.texts.append(text)
        self.shares.append(done)

    def close(self) -> None:
        self.num_closed += 1
