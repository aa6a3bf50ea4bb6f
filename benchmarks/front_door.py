"""Cost of kopf's watch of PipelineJobs, compared with the operator before it (docs/adr/0057).

    ./dev bench front_door

Both operators run as processes against an apiserver of this process, which takes 6 ms for every write. They alternate,
so that other load on the machine meets both. The former operator's sources come from the repository's history. Neither
uses uvloop, which the operator's image does not have.

`OPERATOR_PROFILE=FOLDER` writes a cProfile of every operator to the folder.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.operator_cluster import SPEC
from benchmarks.operator_process import LISTS, Operator
from benchmarks.support import write_results

from penstock.core.host.ports import free_port
from penstock.core.instants import format_instant
from penstock.kube.names import API_VERSION, JOB_KIND
from tests.support.fake_apiserver import Call, FakeApiserver, Found, kubeconfig_of, served

ROOT = Path(__file__).parents[1]
MEMBERS = ("core", "planner", "view", "trainer", "agent", "kube", "client", "cli", "operator", "api")
BEFORE = "780c41642ea0"
"""The last commit whose operator follows PipelineJobs by a watch of its own."""

BURST_JOBS, BURST_ROUNDS = 400, 5
STEADY_JOBS, REPORTS_PER_SECOND, STEADY_SECONDS = 1_000, 150.0, 65.0
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
    """Takes a while for every write, as one with etcd does."""

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
        steady = {}
        for door, sources in doors.items():
            steady[door] = hold_steady(sources)
            print(f"steady {door}: {steady[door]}", flush=True)
    results = {"bursts": bursts, "steady": steady, "load": os.getloadavg()[0]}
    write_results("front_door", json.dumps(results), table)
    return 0


def checked_out(folder: Path) -> Path:
    """Write the sources of `BEFORE` to the folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(folder, filter="data")
    return folder


@contextlib.contextmanager
def operated(sources: Path) -> Iterator[tuple[SlowApiserver, Operator]]:
    """An operator of these sources and its apiserver, without jobs."""
    fake = SlowApiserver()
    with tempfile.TemporaryDirectory() as name, served(fake) as client:
        folder = Path(name)
        policy = folder / "policy.json"
        policy.write_text(json.dumps({"everywhere": {kind: ["*"] for kind in LISTS}}))
        environ = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig_of(client, folder)),
            "PENSTOCK_POLICY_FILE": str(policy),
            "PENSTOCK_METRICS_PORT": "0",
            "PENSTOCK_LIVENESS_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(str(sources / member) for member in MEMBERS),
        }
        profile = os.environ.get("OPERATOR_PROFILE")
        command = [sys.executable, "-c", START]
        if profile:
            script = folder / "start.py"
            script.write_text(START)
            command = [sys.executable, "-m", "cProfile", "-o", f"{profile}/{sources.name}.prof", str(script)]
        with (Path(os.environ.get("OPERATOR_LOG", name)) / "operator.log").open("ab") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            wait_until(lambda: any(call.place[0] == "clusterprofiles" for call in fake.calls))
            time.sleep(1.0)
            yield fake, Operator(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def burst(sources: Path) -> dict[str, float]:
    """Create jobs at once. Returns jobs per second until the last JobSet, and processor time per job."""
    with operated(sources) as (fake, operator):
        return submit(fake, operator, BURST_JOBS)


def submit(fake: FakeApiserver, operator: Operator, count: int) -> dict[str, float]:
    """Create jobs and wait for their JobSets."""
    cpu, began = operator.cpu_seconds, time.monotonic()
    for number in range(count):
        fake.add_job(job(f"job-{number}"))
    wait_until(lambda: sum(1 for key in list(fake.objects) if key[0] == "jobsets") == count)
    seconds = time.monotonic() - began
    time.sleep(2.0)
    return {"jobs_per_second": count / seconds, "cpu_ms_per_job": 1e3 * (operator.cpu_seconds - cpu) / count}


def hold_steady(sources: Path) -> dict[str, float]:
    """Report steps of many jobs. Returns the operator's use of a core."""
    with operated(sources) as (fake, operator):
        submit(fake, operator, STEADY_JOBS)
        jobs = [item for key, item in fake.objects.items() if key[0] == "pipelinejobs"]
        time.sleep(5.0)
        cpu, began, reports = operator.cpu_seconds, time.monotonic(), 0
        for reports in itertools.count(1):
            target = jobs[reports % len(jobs)]
            progress = {"attempt": 1, "step": reports, "epoch": 1, "loss": "2.5", "stepSeconds": 0.5}
            fake.touch(target, progress={**progress, "reportedAt": format_instant(time.time())})
            ahead = began + reports / REPORTS_PER_SECOND - time.monotonic()
            if reports >= STEADY_SECONDS * REPORTS_PER_SECOND:
                break
            time.sleep(max(ahead, 0.0))
        time.sleep(1.0)
        seconds = time.monotonic() - began
        return {
            "cores": (operator.cpu_seconds - cpu) / seconds,
            "reports_per_second": reports / seconds,
            "mib": operator.held_bytes / 2**20,
        }


def job(name: str) -> Found:
    """A job with one rank."""
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name}, "spec": copy.deepcopy(SPEC)}


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait; raises TimeoutError after `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"nothing after {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)


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
        f"Operator and a scripted apiserver on one machine: {results['machine']}, load {results['load']:.1f}.",
        f"*before* is the operator of commit {BEFORE}, with a watch of its own.",
        "",
        "| what | before | kopf | wanted |",
        "|---|---:|---:|---:|",
        f"| {BURST_JOBS} jobs at once, median of {len(bursts['kopf'])} | {before['jobs_per_second']:.1f} jobs/s "
        f"| {kopf['jobs_per_second']:.1f} jobs/s | |",
        f"| the same, median of paired quotients | | {share:.0%} | 90 % |",
        f"| the same, processor time per job | {before['cpu_ms_per_job']:.1f} ms | {kopf['cpu_ms_per_job']:.1f} ms | |",
        f"| {STEADY_JOBS} jobs, {steady['kopf']['reports_per_second']:.0f} reports a second | "
        f"{steady['before']['cores']:.3f} cores | {steady['kopf']['cores']:.3f} cores | 0.24 cores |",
        f"| the same, memory | {steady['before']['mib']:.0f} MiB | {steady['kopf']['mib']:.0f} MiB | |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
