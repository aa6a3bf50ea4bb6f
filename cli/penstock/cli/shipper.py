"""The process that ships a run's records beside an attempt; see `penstock.cli.shipping`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.core.supervision import Order
from penstock.trainer.rundir import RunDir


@contextlib.contextmanager
def shipping(root: Path, order: Order) -> Iterator[None]:
    """A process that ships the run's records during the block, and goes on after it until all are acknowledged."""
    if not order.address_file:
        yield
        return
    process = _start(RunDir(root), Path(order.address_file), Path(order.token_file))
    assert process.stdin is not None
    with process.stdin:  # it goes on until this end is closed, by this block or by the death of this process
        yield


@contextlib.contextmanager
def shipping_at_most(run: RunDir, address_file: Path, token_file: Path, drain_seconds: float) -> Iterator[None]:
    """The same, but after the block it is waited for, and ended if it takes longer."""
    process = _start(run, address_file, token_file)
    assert process.stdin is not None
    try:
        with process.stdin:
            yield
    finally:
        _end(process, drain_seconds)


def _start(run: RunDir, address_file: Path, token_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.cli", "ship", str(run.root)]
    command += ["--address-file", str(address_file), "--token-file", str(token_file)]
    for option, folder in (("--host-dir", run.host), ("--local-dir", run.local)):
        command += [option, str(folder)] if folder is not None else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _end(process: subprocess.Popen[bytes], drain_seconds: float) -> None:
    """What it did not bring stays in the outbox. Killed, it may bring something twice, which does no harm."""
    try:
        process.wait(drain_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
