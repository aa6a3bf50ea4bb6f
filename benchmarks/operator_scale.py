"""Number of jobs that the operator can handle, on a real control plane with kwok's nodes, all on this machine.

    ./dev bench operator_scale

It starts a lab (root on Linux), applies jobs and watches the cluster: figures come from the cluster's objects, not from
the operator. Jobs have one pod each. They use an existing profile. This script acts as the service and reports their
steps.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.operator_cluster import Cluster
from benchmarks.operator_process import Operator
from benchmarks.support import write_results

from tools.lab import lab

NODES = 10
FEW, MANY, LATE = 100, 1_000, 50
PATIENCE_SECONDS = 600.0
PROGRESS_SECONDS = 5.0
STEADY_SECONDS = 60.0


def main() -> int:
    """Run the benchmark and write the tables."""
    with Cluster.started(lab.Spec(name="scale", num_nodes=1, kwok=True)) as cluster:
        cluster.add_fake_nodes(NODES)
        results = measure(cluster)
    write_results("operator_scale", json.dumps(results), table)
    return 0


def measure(cluster: Cluster) -> dict[str, Any]:
    """Measure all figures, one after the other, on one cluster."""
    with Operator.started(cluster) as operator:
        few = burst(cluster, "few", FEW)
        cluster.remove_jobs()
        many = burst(cluster, "many", MANY)
        running = run_all(cluster, operator)
        operator.kill()
    return {"few": few, "many": many, "running": running, "restart": restart(cluster)}


def burst(cluster: Cluster, name: str, count: int) -> dict[str, Any]:
    """Create many jobs at once. Returns seconds from each job's creation to its JobSet, and jobs per second."""
    with cluster.watching("jobsets") as jobsets:
        began = time.monotonic()
        created = cluster.create_jobs([f"{name}-{number}" for number in range(count)])
        applied = time.monotonic() - began
        made = {f"{job}-a1": at for job, at in created.items()}
        jobsets.wait_until(lambda names: made.keys() <= names, PATIENCE_SECONDS)
    delays = sorted(jobsets.first_seen[jobset] - at for jobset, at in made.items())
    last = max(jobsets.first_seen[jobset] for jobset in made) - began
    return {
        "jobs": count,
        "applied_seconds": applied,
        "p50_seconds": statistics.median(delays),
        "p99_seconds": delays[int(0.99 * (len(delays) - 1))],
        "seconds": last,
        "jobs_per_second": count / last,
    }


def run_all(cluster: Cluster, operator: Operator) -> dict[str, Any]:
    """Bring all jobs to running and reporting. Returns the operator's memory, and its processor time once all run."""
    cluster.lay_out_profile(num_ranks=1)
    began = time.monotonic()
    with operator.weighed() as held_bytes:
        cluster.bring_to_running(PATIENCE_SECONDS)
        until_running = time.monotonic() - began
        with cluster.progressing(PROGRESS_SECONDS) as reports:
            time.sleep(10.0)
            cpu, count_before, at = operator.cpu_seconds, reports.count, time.monotonic()
            time.sleep(STEADY_SECONDS)
            seconds = time.monotonic() - at
            steady = {
                "cores": (operator.cpu_seconds - cpu) / seconds,
                "reports_per_second": (reports.count - count_before) / seconds,
            }
    return {
        "jobs": len(cluster.jobs()),
        "seconds_until_all_ran": until_running,
        "peak_mib": max(held_bytes) / 2**20,
        "mib": held_bytes[-1] / 2**20,
        **steady,
    }


def restart(cluster: Cluster) -> dict[str, Any]:
    """Submit jobs and delete pods of others while no operator runs, then start an operator."""
    lost = cluster.delete_pods(LATE)
    late = cluster.create_jobs([f"late-{number}" for number in range(LATE)])
    wanted = {f"{job}-a1" for job in late} | {f"{job}-a2" for job in lost}
    with cluster.watching("jobsets") as jobsets:
        began = time.monotonic()
        with Operator.started(cluster):
            jobsets.wait_until(lambda names: wanted <= names, PATIENCE_SECONDS)
            seconds = time.monotonic() - began
            time.sleep(5.0)
    held = [jobset_name.rpartition("-a")[0] for jobset_name in cluster.names("jobsets")]
    return {"seconds": seconds, "jobs": len(cluster.jobs()), "duplicates": len(held) - len(set(held))}


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    few, many, running, again = (results[name] for name in ("few", "many", "running", "restart"))
    rows = [
        (f"{few['jobs']} jobs applied at once, each until its JobSet is there, p99", few["p99_seconds"], "s", "5 s"),
        ("the same, median", few["p50_seconds"], "s", ""),
        (f"{many['jobs']} jobs, from the first job to the last JobSet", many["jobs_per_second"], "jobs/s", "25 jobs/s"),
        (f"{running['jobs']} jobs run, {running['reports_per_second']:.0f} reports a second: memory, planning included",
         running["peak_mib"], "MiB", "400 MB"),
        ("the same: processor", running["cores"], "cores", "0.5 cores"),
        (f"operator killed; {LATE} jobs new and {LATE} pods gone meanwhile: until all have their JobSet",
         again["seconds"], "s", "20 s"),
        ("JobSets that are there twice for one job after that", again["duplicates"], "", "0"),
    ]  # fmt: skip
    lines = [
        "# The operator and many jobs",
        "",
        f"Control plane, kwok, JobSet's controller, the operator and this script on one machine: {results['machine']}.",
        "",
        "| what | figure | wanted |",
        "|---|---:|---:|",
        *(f"| {what} | {figure:.3g} {unit} | {wanted} |" for what, figure, unit, wanted in rows),
        "",
    ]
    return "\n".join(lines)
