"""The process that ships a run's records beside an attempt; see `penstock.cli.shipping`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.core.supervision import Order


@contextlib.contextmanager
def shipping(root: Path, order: Order) -> Iterator[None]:
    """A process that ships the run's records during the block, and goes on after it until all are acknowledged."""
    if not order.address_file:
        yield
        return
    command = [sys.executable, "-m", "penstock.cli", "ship", str(root)]
    command += ["--address-file", order.address_file, "--token-file", order.token_file]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with process.stdin:  # it goes on until this end is closed, by this block or by the death of this process
        yield
