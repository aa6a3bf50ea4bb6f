"""Fifty SIGKILLs at random times under load, while real jobs run: nothing is lost, duplicated, or run twice.

Run as ``python -m benchmarks.service_kills``; writes ``benchmarks/results/service_kills.{md,json}``. The service is
`penstock serve` with its executor. On SQLite one service is killed. On PostgreSQL two services, which both launch jobs
as two machines would, are killed in turn. Reports from outside are counted in the database afterwards. Each job that a
service runs itself must have succeeded in its first attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.service_load import KINDS, database
from benchmarks.support import write_results

from tests.support.load import Load, prepare
from tests.support.load_kills import kill_under
from tests.support.serving import Served, served, wait_until

NUM_KILLS, NUM_REAL = 50, 12
LOAD = Load(num_jobs=500, num_reports=60, period_seconds=5.0)
CONFIGURATION = Path("config") / "penstock" / "service.json"
PATIENCE_SECONDS = 3600.0


def measure(
    kind: str, kills: int, load: Load = LOAD, num_real: int = NUM_REAL, cache: Path | None = None
) -> dict[str, Any]:
    """Run all kills on one kind of database. The machine is profiled unless ``cache`` has a profile."""
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as name, database(kind) as url, ExitStack() as ends:
        folder = Path(name)
        services = started(ends, folder, url, cache)
        target = prepare(load, folder, url or f"sqlite:///{services[0].folder / 'data' / 'penstock.db'}")
        jobs = [f"real-{number}" for number in range(num_real)]
        for job in jobs:
            services[0].submit(job)
        survived = kill_under(load, target, services, kills, seed=1)
        wait_until(lambda: all(phase(services, job) in ("Succeeded", "Failed") for job in jobs), PATIENCE_SECONDS)
        statuses = [services[0].status(job) for job in jobs]
    return {
        "database": kind,
        "services": len(services),
        "kills": survived.num_kills,
        "acknowledged": len(survived.sending.sent),
        "sent_again": sum(request.tries > 1 for request in survived.sending.sent),
        "wrong": survived.kept.missing(load),
        "real": len(statuses),
        "succeeded": sum(status["phase"] == "Succeeded" for status in statuses),
        "once": sum((status["attempt"], status["failures"]) == (1, 0) for status in statuses),
    }


def started(ends: ExitStack, folder: Path, url: str, cache: Path | None) -> list[Served]:
    """Start one service on SQLite, two on PostgreSQL. The first one's token is used for both."""
    first = ends.enter_context(served(folder / "0", *(["--database", url] if url else []), cache=cache))
    if not url:
        return [first]
    known = folder / "1" / CONFIGURATION
    known.parent.mkdir(parents=True)
    shutil.copy(first.folder / CONFIGURATION, known)
    return [first, ends.enter_context(served(folder / "1", "--database", url, cache=cache))]


def phase(services: Sequence[Served], job: str) -> str:
    """The job's phase, as the first service reports it."""
    job_phase: str = services[0].status(job)["phase"]
    return job_phase


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    return "\n".join(
        [
            "# The service killed under load",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. {LOAD.num_jobs} jobs that others run, a "
            f"report every {LOAD.period_seconds:.0f} s each, and {NUM_REAL} that the service runs itself, two ranks "
            "each, all on the same two cores.",
            "",
            "| database | services | kills | reports acknowledged | sent more than once | lost or doubled "
            "| jobs run | succeeded | in their first attempt |",
            "|---|---:|---:|---:|---:|---|---:|---:|---:|",
            *(
                f"| {row['database']} | {row['services']} | {row['kills']} | {row['acknowledged']} "
                f"| {row['sent_again']} | {'; '.join(row['wrong']) or 'nothing'} | {row['real']} | {row['succeeded']} "
                f"| {row['once']} |"
                for row in results["rows"]
            ),
            "",
        ]
    )


def main() -> int:
    """Kill, count and write both files. With fewer kills than usual it only prints."""
    parser = argparse.ArgumentParser(prog="service_kills")
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--on", choices=KINDS)
    options = parser.parse_args(sys.argv[1:])
    load_before = os.getloadavg()[0]
    rows = [measure(kind, options.kills) for kind in ([options.on] if options.on else KINDS)]
    text = json.dumps({"load_before": load_before, "rows": rows})
    if options.on or options.kills != NUM_KILLS:
        print(text)
    else:
        write_results("service_kills", text, markdown)
    return int(any(row["wrong"] or row["once"] < row["real"] or row["succeeded"] < row["real"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
