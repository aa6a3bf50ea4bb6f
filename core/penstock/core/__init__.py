"""Shared vocabulary: models, jobs, plans, schedules and timelines as plain data, and the files that components
exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__: str
"""Version of the installed distribution ``penstock-core``; all members of the workspace have the same."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Read the version on first access."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("penstock-core")
