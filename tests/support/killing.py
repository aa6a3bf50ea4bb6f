"""Kills one process of a running job or its service, and counts what the database holds afterwards."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, func, select

from penstock.api.store import series
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import points, rollups
from penstock.api.store.schema import series as series_table
from penstock.api.store.series import ALL_RANKS
from penstock.core.serialization.files import complete_lines
from tests.support.serving import Served, processes_of

VICTIMS = ("rank", "agent", "supervisor", "shipper", "service")
Losses = dict[tuple[int, int], float]
"""The loss of every step of every attempt."""


def kill(service: Served, uid: str, victim: str) -> bool:
    """SIGKILL one process of that kind; False if the job has none now. A killed service is started again."""
    if victim == "service":
        service.end(signal.SIGKILL)
        service.start()
        return True
    pids = processes_by_kind(service.run_dir(uid))[victim]
    with suppress(ProcessLookupError):
        if pids:
            os.kill(pids[-1], signal.SIGKILL)
            return True
    return False


def processes_by_kind(run: Path) -> dict[str, list[int]]:
    """The live processes of a run. Ranks are forked, so what they are follows from their parents."""
    arguments = {pid: words for pid in processes_of(run) if (words := arguments_of(pid))}
    parents = {pid: parent_of(pid) for pid in arguments}
    found: dict[str, list[int]] = {victim: [] for victim in VICTIMS}
    for pid in sorted(arguments):
        found[_kind(pid, arguments, parents)].append(pid)
    return found


def _kind(pid: int, arguments: Mapping[int, list[str]], parents: Mapping[int, int]) -> str:
    for word, kind in (("supervise", "supervisor"), ("ship", "shipper")):
        if word in arguments[pid]:
            return kind
    above = arguments.get(parents[pid])
    return "rank" if above is not None and "supervise" not in above else "agent"


def parent_of(pid: int) -> int:
    """0 if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def arguments_of(pid: int) -> list[str]:
    """Empty if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0") if word]
    return []


# What was kept


@contextmanager
def database(service: Served) -> Iterator[Connection]:
    """A connection to the service's SQLite file."""
    engine = make_engine(parse_url(f"sqlite:///{service.folder / 'data' / 'penstock.db'}"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def losses(service: Served, uid: str) -> dict[int, float]:
    """The loss of every step, as charts show it."""
    with database(service) as connection:
        chart = series.charts(connection, uid).get(("loss", ALL_RANKS))
    return {point.step: point.last for point in chart.points} if chart else {}


def recorded(service: Served, uid: str) -> Losses:
    """What the database has."""
    loss = select(series_table.c.id).where(series_table.c.uid == uid, series_table.c.name == "loss")
    chosen = select(points.c.attempt, points.c.step, points.c.value).where(points.c.series.in_(loss))
    with database(service) as connection:
        return {(attempt, step): value for attempt, step, value in connection.execute(chosen)}


def counted(service: Served, uid: str) -> int:
    """How many points the roll-ups have taken in; more than there are if any was taken twice."""
    loss = select(series_table.c.id).where(series_table.c.uid == uid, series_table.c.name == "loss")
    with database(service) as connection:
        found = connection.execute(
            select(func.sum(rollups.c.count)).where(rollups.c.series.in_(loss), rollups.c.steps == 16)
        )
        return int(found.scalar_one() or 0)


def written(service: Served, uid: str) -> Losses:
    """What the ranks left in metrics.jsonl."""
    lines = [json.loads(line) for line in complete_lines(service.run_dir(uid) / "metrics.jsonl")]
    found = {(line["attempt"], line["step"]): line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found
