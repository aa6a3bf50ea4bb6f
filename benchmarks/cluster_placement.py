"""Three nodes with unequal network cards: measured links, and the benefit of placing ranks where links are fast.

    ./dev bench cluster_placement

Needs root on Linux. Starts a lab with service and operator as in tests, and ends it. A job is measured, planned and
trained. Then its plan is rehearsed in pods (real messages, waiting instead of computing), with the plan's placement and
with the worst one. The benchmark refuses to run while other processes use half a core or more.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from statistics import median
from typing import Any

from benchmarks.on_lab import on_lab
from benchmarks.support import write_results

from penstock.core.curves import usual
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from tests.support.cluster_jobs import ClusterJob, shaped, submitted
from tests.support.installed import Installed
from tests.support.rehearsing import WAITS_FOR_LINKS, nodes_of, placed_everywhere, rehearsed
from tools.lab.network import bits_per_second

RATES = {"node1": "1gbit", "node2": "1gbit", "node3": "100mbit"}
VISITS = 5
"""Rehearsals of each placement, in alternation."""

POLL_SECONDS = 5.0
"""kubectl takes half a second of a core each time."""


def main() -> int:
    """Measure, rehearse, and write the tables."""
    with on_lab("placement", num_nodes=len(RATES)) as on, shaped(on, RATES):
        results = measured(on)
    write_results("cluster_placement", json.dumps(results), table)
    return 0


def measured(on: Installed) -> dict[str, Any]:
    """The job's links and plan, rehearsals of both placements, and whether a second job measured again."""
    job = submitted(on, "first", **WAITS_FOR_LINKS)
    status = job.wait_for(Phase.SUCCEEDED, pause_seconds=POLL_SECONDS)
    assert status.plan is not None
    plan, profile = job.run(1).read_plan(), job.run(1).read_profile()
    steps = placed_everywhere(plan, profile)
    placements = {"the planner's": plan.placement, "the worst": max(steps, key=lambda devices: steps[devices])}
    step_seconds: dict[str, list[float]] = {name: [] for name in placements}
    for visit in range(VISITS):
        for number, (name, devices) in enumerate(placements.items()):
            timeline = rehearsed(on, f"p{number}-v{visit}", dataclasses.replace(plan, placement=devices), profile)
            step_seconds[name].append(timeline.step_ns / 1e9)
    trained = usual([step.step_seconds for step in job.metrics(1)])
    return {
        "plan": status.plan.summary,
        "links": links_of(profile),
        "placements": [
            {
                "name": name,
                "nodes": [nodes_of(profile)[device] for device in devices],
                "predicted_seconds": steps[devices],
                "rehearsed_seconds": step_seconds[name],
            }
            for name, devices in placements.items()
        ],
        "predicted_seconds": sorted(steps.values()),
        "trained_seconds": trained.value if trained else None,
        "measured_again": measured_again(on, job),
    }


def links_of(profile: Profile) -> list[dict[str, Any]]:
    """The measurement of every link, and the limit of its slower end."""
    nodes = nodes_of(profile)
    return [
        {
            "source": nodes[link.source],
            "target": nodes[link.target],
            "bits_per_second": 8 * link.bytes_per_second,
            "shaped_bits_per_second": min(bits_per_second(RATES[nodes[end]]) for end in (link.source, link.target)),
            "latency_seconds": link.latency_seconds,
        }
        for link in profile.links
    ]


def measured_again(on: Installed, first: ClusterJob) -> bool:
    """Whether a second job of this kind measures the machine again instead of using the first job's profile."""
    second = submitted(on, "second", **WAITS_FOR_LINKS)
    status = second.wait_for(Phase.SUCCEEDED, pause_seconds=POLL_SECONDS)
    return status.profile != first.status().profile or "Profiling" in str(second.events())


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    best, worst = results["placements"]
    predicted = worst["predicted_seconds"] / best["predicted_seconds"]
    real = median(worst["rehearsed_seconds"]) / median(best["rehearsed_seconds"])
    again = "measured AGAIN" if results["measured_again"] else "went by the same measurement"
    return f"""# Unequal cards

{results["machine"]}; a control plane and three nodes, whose cards are shaped to {", ".join(RATES.values())}.

| link | shaped, Mbit/s | measured, Mbit/s | error (target 15 %) | latency, ms |
|---|---:|---:|---:|---:|
{chr(10).join(map(_link_row, results["links"]))}

{results["plan"]}, predicted and rehearsed with messages between pods of the three nodes, {VISITS} times by turns:

| placement | stages on | predicted | rehearsed, median | from | to | error |
|---|---|---:|---:|---:|---:|---:|
{chr(10).join(map(_placement_row, results["placements"]))}
| ratio | | {predicted:.3f} | {real:.3f} | | | {predicted / real - 1:+.1%} (target 15 %) |

Trained for a few steps where the planner put it, a step took {results["trained_seconds"]:.3f} s. The next job {again}.
"""


def _link_row(link: dict[str, Any]) -> str:
    shaped_rate, rate = (link[name] / 1e6 for name in ("shaped_bits_per_second", "bits_per_second"))
    error, latency = rate / shaped_rate - 1, 1e3 * link["latency_seconds"]
    return f"| {link['source']} to {link['target']} | {shaped_rate:.0f} | {rate:.1f} | {error:+.1%} | {latency:.2f} |"


def _placement_row(placement: dict[str, Any]) -> str:
    predicted, real = placement["predicted_seconds"], placement["rehearsed_seconds"]
    times = f"{predicted:.3f} s | {median(real):.3f} s | {min(real):.3f} s | {max(real):.3f} s"
    error = predicted / median(real) - 1
    return f"| {placement['name']} | {', '.join(placement['nodes'])} | {times} | {error:+.1%} |"


if __name__ == "__main__":
    sys.exit(main())
