"""The example on two real nodes: compares predicted and measured step time, and its losses with those of one machine.

    ./dev bench cluster_prediction

Needs root on Linux. Starts a lab with service and operator as in tests, and ends it. Control plane and ranks share the
cores of this machine, so the benchmark refuses to run while other processes use half a core or more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.on_lab import on_lab
from benchmarks.support import write_results

from penstock.core.lifecycle import Phase
from penstock.core.records import WARM_UP_STEPS
from penstock.core.serialization import yamltext
from tests.support.cluster_jobs import made, run_here, small_spec
from tests.support.installed import Installed

EXAMPLE = Path(__file__).parents[1] / "deploy" / "examples" / "stdlib-llama.yaml"
STEPS = 105
"""The first five are not counted."""

PATIENCE_SECONDS = 1800.0
POLL_SECONDS = 10.0
"""kubectl takes half a second of a core each time."""


def main() -> int:
    """Train there and here, and write the table."""
    with on_lab("prediction") as on:
        results = measured(on)
    write_results("cluster_prediction", json.dumps(results), table)
    return 0


def measured(on: Installed) -> dict[str, Any]:
    """The example on two nodes with storage of this lab, then by the same plan without a cluster."""
    example = yamltext.load(EXAMPLE.read_text(), str(EXAMPLE))
    example["spec"]["training"]["steps"] = STEPS
    example["spec"]["kubernetes"] = small_spec(on.cluster.image)["kubernetes"]
    job = made(on, example)
    status = job.wait_for(Phase.SUCCEEDED, seconds=PATIENCE_SECONDS, pause_seconds=POLL_SECONDS)
    assert status.plan is not None
    with tempfile.TemporaryDirectory() as folder:
        alone = run_here(Path(folder), example["spec"], job.run(1))
    return {
        "plan": status.plan.summary,
        "nodes": sorted({pod["spec"]["nodeName"] for pod in job.pods()}),
        "profile": job.run(1).read_profile().to_manifest(),
        "predicted_seconds": status.plan.step_seconds,
        "step_seconds": [metrics.step_seconds for metrics in job.metrics(1)[WARM_UP_STEPS:]],
        "alone_seconds": [metrics.step_seconds for metrics in alone[WARM_UP_STEPS:]],
        "losses": job.losses(),
        "same_losses": job.losses() == [metrics.loss for metrics in alone],
    }


def table(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    there, alone = (statistics.median(data[name]) for name in ("step_seconds", "alone_seconds"))
    error = data["predicted_seconds"] / there - 1
    same = "the same as" if data["same_losses"] else "NOT the same as"
    return f"""# The example on two nodes of a cluster

{data["machine"]}; a control plane, a rank on each of {" and ".join(data["nodes"])}, service and operator share it.

| plan | predicted | measured, median of {len(data["step_seconds"])} steps | error (target 15 %) | without a cluster |
|---|---:|---:|---:|---:|
| {data["plan"]} | {data["predicted_seconds"]:.3f} s | {there:.3f} s | {error:+.1%} | {alone:.3f} s |

The loss went from {data["losses"][0]:.2f} to {data["losses"][-1]:.2f}. All {len(data["losses"])} losses are {same}
those of a run without a cluster, by the same plan.
"""


if __name__ == "__main__":
    sys.exit(main())
