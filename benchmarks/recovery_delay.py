"""Delay from a loss that the cluster can observe to the request for another attempt.

    ./dev bench recovery_delay

Needs root on Linux. A small job trains on two of three real nodes, with network cards so slow that ranks mostly wait
for them, as in `tests/e2e/test_recovery.py`. Control plane, service, operator and ranks share this machine's cores,
so the benchmark refuses to run while other processes use half a core or more.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.on_lab import in_processes, quiet_lab
from benchmarks.support import write_results

from deploy.installation import Installation
from penstock.core.lifecycle import Phase
from penstock.kube.resources import NODES
from tests.support.charted import chart_space, charted, nodes_of_programs, prefer, values
from tests.support.cluster_jobs import PINNED, ClusterJob, paced, small_training, submitted
from tests.support.installed import Installed, JobSpace
from tests.support.losing import BEGUN_STEPS, LOST, SIBLING, delete_a_pod, not_ready_since, only, spare, trained
from tools.lab import lab
from tools.lab.console import LabError

TIMES = 3
ENDLESS = 100_000
WANTED_SECONDS = 10.0
WITH_OPERATOR = "the node of operator, service and a rank loses its power"
"""Kubernetes evicts the operator's pod 30 s after it marks the node as lost. Only then another operator starts."""

LATER = (Phase.QUEUED, Phase.PLANNING, Phase.BINDING, Phase.RUNNING)

Losing = Callable[[Installed, ClusterJob], float]
"""Takes something from a job. Returns when the cluster could observe that, in seconds since the epoch."""


def main() -> int:
    """Cause each loss a few times and write the table."""
    with quiet_lab("recovery") as cluster:
        with in_processes(cluster) as on:
            know_the_pairs(on)
            with paced(on):
                results = {what: [delay(on, number, what) for number in range(TIMES)] for what in LOSSES}
        with chart_space(cluster) as space, charted(space, values(space)) as installation:
            results[WITH_OPERATOR] = [delay_with_operator(space, installation, number) for number in range(TIMES)]
    write_results("recovery_delay", json.dumps({"delays": results}), table)
    return 0


def know_the_pairs(on: Installed) -> None:
    """Measure both pairs of nodes that jobs run on, with fast cards, once."""
    done(submitted(on, "first", parallelism=PINNED, training=small_training(2)))
    with only(on, SIBLING), spare(on):
        done(submitted(on, "sibling", parallelism=PINNED, training=small_training(2)))


def done(job: ClusterJob) -> None:
    """Wait until the job has ended and holds no devices."""
    job.wait_for(Phase.SUCCEEDED)
    job.wait(job.has_left, "its pods hold their places")


def delay(on: Installed, number: int, what: str) -> float:
    """Seconds until a second attempt was requested. Whole seconds, since the API server stores no fractions."""
    lose, surroundings = LOSSES[what]
    job = trained(on, f"{what.split()[-1]}-{number}", ENDLESS)
    with surroundings(on):
        visible_at = lose(on, job)
        delay_seconds = job.jobset_made_at(2) - visible_at
        job.wait_for(Phase.RUNNING, attempt=2)
    on.kubectl("delete", "pj", job.name)
    job.wait(lambda: not job.pods(), "its pods stay")
    return delay_seconds


def delay_with_operator(space: JobSpace, installation: Installation, number: int) -> float:
    """Seconds until a second attempt was requested after the node of service, operator and a rank lost its power."""
    space.cluster.wait(lambda: not space.cluster.get(NODES, LOST)["spec"].get("taints"), f"{LOST} takes no pods")
    moved = {f"{program}.resources.requests.cpu": f"{101 + number}m" for program in ("operator", "service")}
    installation.install({**values(space), **prefer(LOST), **moved})  # replaces both pods; the new ones prefer the node
    if set(nodes_of_programs(space).values()) != {LOST}:
        raise LabError(f"operator and service are not both on {LOST}")
    job = submitted(space, f"all-{number}", parallelism=PINNED, training=small_training(ENDLESS))
    job.wait_for_step(BEGUN_STEPS)
    with spare(space):
        lab.crash(space.lab, LOST)
        visible_at = not_ready_since(space.cluster, LOST)
        seconds = job.jobset_made_at(2) - visible_at
        job.wait_for(Phase.RUNNING, attempt=2)
        lab.bring_back(space.lab, LOST)
    space.kubectl("delete", "pj", job.name)
    job.wait(lambda: not job.pods(), "its pods stay")
    return seconds


@contextmanager
def without_it(on: Installed) -> Iterator[None]:
    """Add another node during the block, and restore the lost one afterwards."""
    with spare(on):
        yield
        lab.set_link(on.lab, LOST, "up")
        lab.bring_back(on.lab, LOST)


@contextmanager
def as_it_was(on: Installed) -> Iterator[None]:
    """Change nothing: no node is lost."""
    yield


def kill_a_node(on: Installed, job: ClusterJob) -> float:
    """Kill the kubelet and the container runtime of a node of the job."""
    lab.kill(on.lab, LOST)
    return not_ready_since(on.cluster, LOST)


def pull_a_cable(on: Installed, job: ClusterJob) -> float:
    """Disconnect the network of a node of the job."""
    lab.set_link(on.lab, LOST, "down")
    return not_ready_since(on.cluster, LOST)


def stop_a_rank(on: Installed, job: ClusterJob) -> float:
    """Stop a rank, which then neither ends nor answers. The job's status has the time at which it counted as lost."""
    job.stop_rank(1)
    status = job.wait_for(*LATER, attempt=2)
    assert status.failed_at is not None
    return status.failed_at


LOSSES: Mapping[str, tuple[Losing, Callable[[Installed], Any]]] = {
    "a pod is deleted": (delete_a_pod, as_it_was),
    "a rank hangs": (stop_a_rank, as_it_was),
    "a node is killed": (kill_a_node, without_it),
    "a cable is pulled": (pull_a_cable, without_it),
}


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    delays = results["delays"]
    most = max(max(seconds) for what, seconds in delays.items() if what != WITH_OPERATOR)
    alone = max(delays[WITH_OPERATOR])
    lines = [
        "# From a loss to the next attempt",
        "",
        f"A job on two real nodes; all on one machine: {results['machine']}.",
        "Seconds from when the cluster can see it (a pod is being deleted, a node is not ready, no step was taken for",
        "a minute) until the next attempt's JobSet is made. The attempt may save a checkpoint meanwhile.",
        "",
        f"| what | times | median | most (wanted {WANTED_SECONDS:.0f}) |",
        "|---|---:|---:|---:|",
        *(
            f"| {what} | {len(values)} | {statistics.median(values):.0f} | {max(values):.0f} |"
            for what, values in delays.items()
        ),
        "",
        f"While operator and service run on other nodes: {most:.0f} s at most. With their node:",
        f"{alone:.0f} s at most, of which Kubernetes waits 30 s before it gives up their pods.",
        "Times of the cluster are whole seconds.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
