"""Progress reports of data preparation."""

from __future__ import annotations


class Reporter:
    """Receives progress reports. This one ignores them; a command line overrides the methods that it needs."""

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """``done_bytes`` of ``total_bytes`` of text have passed through ``stage``."""

    def warning(self, line: str) -> None:
        """Something was fixed or left out; one line for a person."""


SILENT = Reporter()
