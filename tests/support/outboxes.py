"""Outbox files with records in them, where a service answers, and its answers."""

from __future__ import annotations

import itertools
from pathlib import Path

from penstock.agent.record_upload import Reply
from penstock.core.records import LogLine, RecordKind
from penstock.core.run.outbox import Outbox
from penstock.core.serialization.manifest_files import write
from penstock.core.supervision import Address


def reply(status: int, detail: str = "no") -> Reply:
    return Reply(status=status, detail=detail)


def address_file(path: Path, server: str, certificate: Path | None = None) -> Path:
    """The file, as a service writes it that answers there."""
    write(path, Address(server=server, ca_file=str(certificate or "")))
    return path


def opened(folder: Path, attempt: int = 1, source: str = "rank-0") -> Outbox:
    ticks = itertools.count(100.0)
    return Outbox(folder, uid="u-1", attempt=attempt, source=source, clock=lambda: next(ticks))


def log(box: Outbox, message: str = "hello") -> None:
    box.put(RecordKind.LOG, log=LogLine(rank=0, level="info", message=message))


def fill(folder: Path, count: int, *, attempt: int = 1, source: str = "rank-0", message: str = "hello") -> None:
    """That many more records in a source's file."""
    box = opened(folder, attempt, source)
    for _ in range(count):
        log(box, message)
    box.close()
