"""Compares a job on two real nodes that is suspended ten times with one that is not.

    ./dev bench cluster_training

Needs root on Linux. Starts a lab with service and operator as in tests, and ends it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.on_lab import on_lab
from benchmarks.support import write_results

from penstock.core.lifecycle import Phase
from tests.support.cluster_jobs import PINNED, ClusterJob, paced, small_training, submitted
from tests.support.installed import Installed

SUSPENSIONS, STEPS_BETWEEN, SUSPENDED_STEPS = 10, 15, 400


def main() -> int:
    """Train both jobs, and write the table."""
    with on_lab("bench") as on:
        results = _suspended(on)
    write_results("cluster_training", json.dumps(results), table)
    return 0


def _suspended(on: Installed) -> dict[str, Any]:
    """The steps at which a job was suspended, and whether its losses are those of one that was not."""
    wanted = {"parallelism": PINNED, "training": small_training(SUSPENDED_STEPS)}
    job, begun = submitted(on, "suspended", **wanted), 0
    with paced(on):
        stops = []
        for attempt in range(1, SUSPENSIONS + 1):
            job.wait_for_step(begun + STEPS_BETWEEN, attempt)
            begun = _suspend(job)
            stops.append(begun)
            job.suspend(False)
    job.wait_for(Phase.SUCCEEDED)
    other = submitted(on, "undisturbed", **wanted)
    other.wait_for(Phase.SUCCEEDED)
    return {"suspended_at": stops, "same_losses": job.losses() == other.losses()}


def _suspend(job: ClusterJob) -> int:
    job.suspend(True)
    job.wait_for(Phase.SUSPENDED)
    return job.checkpoints()[0][1]


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    stops: Sequence[int] = results["suspended_at"]
    same = "the same as" if results["same_losses"] else "NOT the same as"
    return f"""# A job that is suspended again and again

{results["machine"]}; a control plane, two nodes with a rank each, service and operator share it.

The job was suspended {len(stops)} times, at steps {", ".join(map(str, stops))}. All losses are {same} those of one
that was not suspended.
"""


if __name__ == "__main__":
    sys.exit(main())
