"""The example on two real nodes: its predicted step time against the measured one, and a job suspended ten times.

    ./dev bench cluster_training

Root on Linux. A lab is started and ended, and service and operator run as in tests. Control plane and ranks share this
machine's cores, so nothing else should run: with a load of half a core or more it is refused.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from deploy.lab import lab
from penstock.core.lifecycle import Phase
from penstock.core.records import settled
from penstock.planner import yamltext
from tests.support.cluster import of
from tests.support.cluster_jobs import PINNED, ClusterJob, made, paced, small_spec, small_training, submitted
from tests.support.installed import Installed, installed

EXAMPLE = Path(__file__).parents[1] / "deploy" / "examples" / "stdlib-llama.yaml"
STEPS = 105
"""The first five are not counted."""

MOST_LOAD = 0.5
SUSPENSIONS, STEPS_BETWEEN, SUSPENDED_STEPS = 10, 15, 200
PATIENCE_SECONDS = 3600.0


def main() -> int:
    """Train both jobs, and write the table."""
    if (load := os.getloadavg()[0]) >= MOST_LOAD:
        print(f"the machine is busy: its load is {load:.1f}, and has to be below {MOST_LOAD}", file=sys.stderr)
        return 1
    found = lab.up(lab.Wanted(name="bench", num_nodes=3))
    try:
        with tempfile.TemporaryDirectory() as folder, installed(of(found), Path(folder)) as on:
            results = {**_predicted(on), **_suspended(on)}
    finally:
        lab.down("bench")
    write_results("cluster_training", json.dumps(results), table)
    return 0


def _predicted(on: Installed) -> dict[str, Any]:
    """The example, with storage of this lab."""
    example = yamltext.load(EXAMPLE.read_text(), str(EXAMPLE))
    example["spec"]["training"]["steps"] = STEPS
    example["spec"]["kubernetes"] = small_spec(on.cluster.image)["kubernetes"]
    job = made(on, example)
    status = job.wait_for(Phase.SUCCEEDED, seconds=PATIENCE_SECONDS)
    assert status.plan is not None
    steps = [each.step_seconds for each in settled(job.metrics(1))]
    return {
        "plan": status.plan.summary,
        "predicted_seconds": status.plan.step_seconds,
        "measured_seconds": statistics.median(steps),
        "step_seconds": steps,
        "losses": [job.losses()[0], job.losses()[-1]],
    }


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


def table(found: dict[str, Any]) -> str:
    """The results for people."""
    error = found["predicted_seconds"] / found["measured_seconds"] - 1
    stops: Sequence[int] = found["suspended_at"]
    same = "the same as" if found["same_losses"] else "NOT the same as"
    return f"""# Training on a cluster

{found["machine"]}; a control plane, two nodes with a rank each, service and operator share it.

| plan of the example | predicted | measured, median of {len(found["step_seconds"])} steps | error |
|---|---|---|---|
| {found["plan"]} | {found["predicted_seconds"]:.3f} s | {found["measured_seconds"]:.3f} s | {error:+.1%} |

Its loss went from {found["losses"][0]:.2f} to {found["losses"][1]:.2f}.

Another job was suspended {len(stops)} times, at steps {", ".join(map(str, stops))}. All losses are {same} those of one
that was not suspended.
"""


if __name__ == "__main__":
    sys.exit(main())
