"""Fifty SIGKILLs at random moments under load: nothing acknowledged is lost, nothing is counted twice.

Run as ``python -m benchmarks.service_kills``; writes ``benchmarks/results/service_kills.{md,json}``. On SQLite one
service is killed, on PostgreSQL two in turn.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.service_load import KINDS, database
from benchmarks.support import write_results

from tests.support.load import Load, prepare
from tests.support.load_kills import kill_under
from tests.support.load_service import lone_services

NUM_KILLS = 50
LOAD = Load(num_jobs=500, num_reports=60, period_seconds=5.0)


def measure(kind: str) -> dict[str, Any]:
    """All kills on one kind of database."""
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as folder, database(kind) as url:
        target = prepare(LOAD, Path(folder), url)
        with lone_services(target, 1 if kind == "sqlite" else 2) as services:
            survived = kill_under(LOAD, target, services, NUM_KILLS, seed=1)
    again = sum(each.tries > 1 for each in survived.sending.sent)
    return {
        "database": kind,
        "services": len(services),
        "kills": survived.num_kills,
        "acknowledged": len(survived.sending.sent),
        "sent_again": again,
        "wrong": survived.kept.missing(LOAD),
    }


def markdown(results: dict[str, Any]) -> str:
    """The table for people."""
    return "\n".join(
        [
            "# The service killed under load",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. {LOAD.num_jobs} jobs, a report every "
            f"{LOAD.period_seconds:.0f} s each, for {LOAD.seconds:.0f} s.",
            "",
            "| database | services | kills | acknowledged | sent more than once | lost or doubled |",
            "|---|---:|---:|---:|---:|---|",
            *(
                f"| {row['database']} | {row['services']} | {row['kills']} | {row['acknowledged']} "
                f"| {row['sent_again']} | {'; '.join(row['wrong']) or 'nothing'} |"
                for row in results["rows"]
            ),
            "",
        ]
    )


def main() -> int:
    """Kill, count and write both files."""
    load_before = os.getloadavg()[0]
    rows = [measure(kind) for kind in KINDS]
    write_results("service_kills", json.dumps({"load_before": load_before, "rows": rows}), markdown)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
