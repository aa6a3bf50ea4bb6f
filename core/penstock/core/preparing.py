"""What preparing data tells while it works."""

from __future__ import annotations


class Reporter:
    """Hears how preparing goes. This one is silent; a command line overrides what it wants to show."""

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """``done_bytes`` of ``total_bytes`` of text have passed through ``stage``."""

    def warning(self, line: str) -> None:
        """Something was mended or left out; one line for a person."""


SILENT = Reporter()
