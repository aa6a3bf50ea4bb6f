"""Cost of kopf's watch of PipelineJobs, compared with the operator before it (docs/adr/0057).

    ./dev bench front_door

Both operators run as processes, each against a scripted apiserver in this process that takes 6 ms for every write.
Bursts alternate between the two operators. Reports of running jobs go to both at the same time, so that other load on
the machine affects both. The former operator's sources come from the repository's history. Neither uses uvloop, which
the operator's image lacks.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.operator_cluster import SPEC
from benchmarks.operator_process import Operator
from benchmarks.support import write_results

from penstock.core.instants import format_instant
from penstock.kube.names import API_VERSION, JOB_KIND
from penstock.kube.resources import JOBS
from tests.support.fake_apiserver import Call, FakeApiserver, Found, served
from tests.support.operator_process import operator_process, wait_for

ROOT = Path(__file__).parents[1]
MEMBERS = ("core", "planner", "view", "trainer", "agent", "kube", "client", "cli", "operator", "api")
BEFORE = "780c4164dc69"
"""The last commit whose operator follows PipelineJobs by a watch of its own."""

BURST_JOBS, BURST_ROUNDS = 400, 7
STEADY_JOBS, REPORTS_PER_SECOND, STEADY_SECONDS = 1_000, 150.0, 90.0
WRITE_SECONDS = 0.006
PATIENCE_SECONDS = 180.0
START = """
import sys
sys.modules["uvloop"] = None
from penstock.operator.__main__ import main
sys.argv = ["penstock-operator"]
main()
"""


class SlowApiserver(FakeApiserver):
    """A scripted apiserver that takes `WRITE_SECONDS` for every write, like a real one with etcd."""

    def answer(self, call: Call) -> Any:
        if call.method != "GET":
            time.sleep(WRITE_SECONDS)
        return super().answer(call)


def main() -> int:
    """Run the benchmark and write the table."""
    with tempfile.TemporaryDirectory() as name:
        before = checked_out(Path(name) / "before")
        doors = {"before": before, "kopf": ROOT}
        bursts: dict[str, list[dict[str, float]]] = {door: [] for door in doors}
        for number in range(BURST_ROUNDS):
            for door in sorted(doors, reverse=number % 2 == 1):
                bursts[door].append(burst(doors[door]))
                print(f"burst {number} {door}: {bursts[door][-1]}", flush=True)
        load = [os.getloadavg()[0]]
        steady = hold_steady(doors)
        load.append(os.getloadavg()[0])
    results = {"bursts": bursts, "steady": steady, "load": load}
    write_results("front_door", json.dumps(results), table)
    return 0


def checked_out(folder: Path) -> Path:
    """Write the sources of `BEFORE` to the folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"commit {BEFORE} is not in this clone\n  remedy: git fetch --unshallow")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
        sources.extractall(folder, filter="data")
    return folder


@contextlib.contextmanager
def operated(sources: Path) -> Iterator[tuple[SlowApiserver, Operator]]:
    """An operator of these sources and its apiserver, without jobs."""
    fake, path = SlowApiserver(), os.pathsep.join(str(sources / member) for member in MEMBERS)
    with (
        tempfile.TemporaryDirectory() as name,
        served(fake) as client,
        operator_process(client, Path(name), [sys.executable, "-c", START], PYTHONPATH=path) as operator,
    ):
        wait_for(operator.is_healthy, PATIENCE_SECONDS, "the operator starts")
        time.sleep(1.0)
        yield fake, Operator(operator.process)


def burst(sources: Path) -> dict[str, float]:
    """Create jobs at once. Returns jobs per second until the last JobSet, and processor time per job."""
    with operated(sources) as (fake, operator):
        return submit(fake, operator, BURST_JOBS)


def submit(fake: FakeApiserver, operator: Operator, count: int) -> dict[str, float]:
    """Create jobs and wait for their JobSets."""
    cpu, began = operator.cpu_seconds, time.monotonic()
    for number in range(count):
        fake.add_job(job(f"job-{number}"))
    wait_for(lambda: len(fake.of("jobsets")) == count, PATIENCE_SECONDS, "all JobSets")
    seconds = time.monotonic() - began
    time.sleep(2.0)
    return {"jobs_per_second": count / seconds, "cpu_ms_per_job": 1e3 * (operator.cpu_seconds - cpu) / count}


def hold_steady(doors: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Report steps of many jobs to all operators at the same time. Returns the use of a core of each."""
    with contextlib.ExitStack() as stack:
        running = {door: stack.enter_context(operated(sources)) for door, sources in doors.items()}
        for fake, operator in running.values():
            submit(fake, operator, STEADY_JOBS)
        with ThreadPoolExecutor(len(doors)) as threads:
            return dict(zip(doors, threads.map(lambda pair: report(*pair), running.values()), strict=True))


def report(fake: FakeApiserver, operator: Operator) -> dict[str, float]:
    """Report steps of all jobs in turn."""
    jobs, total = fake.of(JOBS.plural), round(STEADY_SECONDS * REPORTS_PER_SECOND)
    cpu, began = operator.cpu_seconds, time.monotonic()
    for step in range(total):
        progress = {"attempt": 1, "step": step, "epoch": 1, "loss": "2.5", "stepSeconds": 0.5}
        fake.touch(jobs[step % len(jobs)], progress={**progress, "reportedAt": format_instant(time.time())})
        time.sleep(max(began + (step + 1) / REPORTS_PER_SECOND - time.monotonic(), 0.0))
    seconds = time.monotonic() - began
    return {
        "cores": (operator.cpu_seconds - cpu) / seconds,
        "reports_per_second": total / seconds,
        "mib": operator.held_bytes / 2**20,
    }


def job(name: str) -> Found:
    """A job with one rank."""
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name}, "spec": copy.deepcopy(SPEC)}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    bursts, steady = results["bursts"], results["steady"]
    median = {
        door: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for door, rows in bursts.items()
    }
    pairs = zip(bursts["kopf"], bursts["before"], strict=True)
    share = statistics.median(new["jobs_per_second"] / old["jobs_per_second"] for new, old in pairs)
    before, kopf = median["before"], median["kopf"]
    lines = [
        "# kopf's watch of PipelineJobs",
        "",
        f"Operator and a scripted apiserver on one machine: {results['machine']}, load average "
        f"{results['load'][0]:.1f} after the bursts and {results['load'][1]:.1f} at the end.",
        f"*before* is the operator of commit {BEFORE}, with a watch of its own.",
        "",
        "| quantity | before | kopf | target |",
        "|---|---:|---:|---:|",
        f"| {BURST_JOBS} jobs at once, median of {len(bursts['kopf'])} | {before['jobs_per_second']:.1f} jobs/s "
        f"| {kopf['jobs_per_second']:.1f} jobs/s | |",
        f"| {BURST_JOBS} jobs at once, median of paired ratios | | {share:.0%} | 90 % |",
        f"| {BURST_JOBS} jobs at once, processor time per job | {before['cpu_ms_per_job']:.1f} ms "
        f"| {kopf['cpu_ms_per_job']:.1f} ms | |",
        f"| {STEADY_JOBS} jobs, {steady['kopf']['reports_per_second']:.0f} reports a second | "
        f"{steady['before']['cores']:.3f} cores | {steady['kopf']['cores']:.3f} cores | 0.24 cores |",
        f"| {STEADY_JOBS} jobs, memory | {steady['before']['mib']:.0f} MiB | {steady['kopf']['mib']:.0f} MiB | |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
