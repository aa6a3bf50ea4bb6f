"""Runs a job once for every write of the operator: the operator is killed after it, or the write fails with 409 or 500.

    ./dev bench operator_kills

Needs root on Linux. Starts a lab and ends it. Pods are real but do not train. Each job has three attempts, of which one
fails and one is suspended. Every run has to end the same way, and no child object may be created twice.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from penstock.core.lifecycle import Phase
from tests.support.cluster import of
from tests.support.cluster_jobs import submitted
from tests.support.installed import installed
from tests.support.troubled_operator import CONFLICT, FAILURE, KILL, Trouble
from tests.support.troubles import Sieve, sieve
from tools.lab import lab

LAB = "kills"
PATIENCE_SECONDS = 600.0


def main() -> int:
    """Run all lives and write the table."""
    made = lab.up(lab.Spec(name=LAB, num_nodes=3))
    try:
        with tempfile.TemporaryDirectory() as name, installed(of(made), Path(name)) as on:
            measured = submitted(on, "first")
            measured.wait_for(Phase.SUCCEEDED, seconds=PATIENCE_SECONDS)
            folder = Path(name) / "sieve"
            folder.mkdir()
            with sieve(on, measured, folder) as there:
                troubles = [_sieved(there, kind) for kind in (KILL, CONFLICT, FAILURE)]
    finally:
        lab.down(LAB)
    write_results("operator_kills", json.dumps({"troubles": troubles}), table)
    return 0


def _sieved(there: Sieve, kind: str) -> dict[str, Any]:
    """Run one life for each write, until a life has fewer writes. Stops at the first life with another end."""
    lives, began = [], time.monotonic()
    for number in itertools.count():
        name = f"{kind}-{number}"
        life = there.live(name, Trouble(kinds=(kind,), only=number))
        life.verify(name)
        if len(life.writes) <= number:
            break
        assert life.killed == int(kind == KILL), life
        lives.append(life.writes[number])
        print(f"{name}: {lives[-1]}", flush=True)
    return {"kind": kind, "writes": lives, "seconds": time.monotonic() - began}


NAMES = {KILL: "made, and the operator killed", CONFLICT: "409, not made", FAILURE: "500, made"}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = "\n".join(
        f"| {NAMES[row['kind']]} | {len(row['writes'])} | {_verbs(row['writes'])} | {row['seconds']:.0f} s |"
        for row in results["troubles"]
    )
    return f"""# An operator whose writes go wrong

{results["machine"]}; a control plane and three nodes with real kubelets share it.

For every write of a job's life one life was lived in which that write went wrong. Every one came to the same end: three
attempts, one failure, Succeeded, one JobSet of each name ever, those of attempts before removed.

| what went wrong | lives | writes | time |
|---|---:|---|---:|
{rows}
"""


def _verbs(writes: list[str]) -> str:
    """Number of uses of each verb on each kind."""
    counted = Counter(
        " ".join(word.split()[:2]) if not word.startswith("annotate") else "annotate Pod" for word in writes
    )
    return ", ".join(f"{number} {verb}" for verb, number in sorted(counted.items()))


if __name__ == "__main__":
    sys.exit(main())
