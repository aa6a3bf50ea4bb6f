"""The lock that keeps a second process from running the job in a run directory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from penstock.core.host.locks import alone


def locked(root: Path) -> AbstractContextManager[None]:
    """Hold the run directory; raises `UserError` while another process holds it."""
    remedy = "wait for it, stop it, or choose another directory with --run-dir"
    return alone(root / ".lock", f"run directory {root}", remedy)
