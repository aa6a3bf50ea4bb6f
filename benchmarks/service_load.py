"""The service under load: 1,000 jobs that report every 5 s while 500 live streams are open, on SQLite and PostgreSQL.

Run as ``python -m benchmarks.service_load [--seconds 120] [--on sqlite|postgresql]``. A complete run writes
``benchmarks/results/service_load.{md,json}``, a partial one only prints. Both databases sync each commit to disk.
PostgreSQL has two services.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from tests.support import postgres
from tests.support.away import Shared, away
from tests.support.load import STEPS, Load, Target, kept, prepare
from tests.support.load_listening import Heard, listen, paths
from tests.support.load_sending import Sent, send
from tests.support.load_service import LoneService, lone_services

NUM_JOB_STREAMS, NUM_LIST_STREAMS = 450, 50
AFTERWARDS_SECONDS = 3.0
SECONDS = 120.0
KINDS = ("sqlite", "postgresql")


@contextmanager
def database(kind: str) -> Iterator[str]:
    """URL of a new database that syncs its commits; empty for SQLite, which the service creates."""
    if kind == "sqlite":
        yield ""
        return
    with postgres.server(durable=True) as server, postgres.database(server) as url:
        yield url


def measure(kind: str, load: Load) -> dict[str, Any]:
    """Measure one load on one kind of database."""
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as folder, database(kind) as url:
        target = prepare(load, Path(folder), url)
        with lone_services(target, 1 if kind == "sqlite" else 2) as services:
            figures = put_under(load, target, services)
        counted = kept(load, target)
    return {"database": kind, "services": len(services), "wrong": counted.missing(load), **figures}


def put_under(load: Load, target: Target, services: Sequence[LoneService]) -> dict[str, Any]:
    """Send and listen from separate processes, and observe the services meanwhile."""
    ports = [service.port for service in services]
    wanted = paths(load.num_jobs, NUM_JOB_STREAMS, NUM_LIST_STREAMS)
    shared = Shared()
    with away(listen, shared, wanted, ports, target.viewer, True) as hearing:
        assert shared.reached("listening", 1, hearing), hearing.result()
        with away(send, shared, load, ports, target.ingest) as sending:
            assert shared.reached("sending", 1, sending), sending.result()
            begun = [service.processor_seconds() for service in services]
            busy = busy_seconds()
            time.sleep(load.seconds)
            took = [service.processor_seconds() - before for service, before in zip(services, begun, strict=True)]
            busy = busy_seconds() - busy
            sent = sending.result()
        shared["end"] = time.monotonic() + AFTERWARDS_SECONDS
        heard = hearing.result()
        peak = max(service.memory_bytes("VmHWM") for service in services)
    latencies = [1000 * (request.ended - request.began) for request in sent.sent]
    late = [1000 * request.late for request in sent.sent]
    return {
        "requests": len(sent.sent),
        "requests_per_second": len(sent.sent) / load.seconds,
        "ingest_milliseconds": summary(latencies),
        "sent_late_milliseconds": summary(late),
        "job_delivery_seconds": summary(
            deliveries(sent.sent, (report for report in heard.heard if not report.of_list))
        ),
        "list_delivery_seconds": summary(deliveries(sent.sent, (report for report in heard.heard if report.of_list))),
        "list_sends_per_second": fastest(report for report in heard.heard if report.of_list),
        "streams_ended": heard.num_ended,
        "slow_reader_dropped": heard.slow_dropped,
        "peak_bytes": peak,
        "service_cores": [core_seconds / load.seconds for core_seconds in took],
        "generator_cores": (sent.processor_seconds + heard.processor_seconds) / load.seconds,
        "machine_cores": busy / load.seconds,
    }


def busy_seconds() -> float:
    """Processor seconds of all processes of the machine so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(values)
    if not ordered:
        return {"num": 0, "p50": float("nan"), "p99": float("nan"), "max": float("nan")}
    return {
        "num": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
    }


def deliveries(sent: Sequence[Sent], streams: Iterable[Heard]) -> Iterator[float]:
    """Seconds from each report's acknowledgement to its arrival, on each stream that shows its job."""
    acknowledged: dict[int, list[Sent]] = {}
    for request in sent:
        acknowledged.setdefault(request.job, []).append(request)
    for heard in streams:
        of_job: dict[int, tuple[list[int], list[float]]] = {}
        for job, step, at in zip(heard.jobs, heard.steps, heard.at, strict=True):
            steps, times = of_job.setdefault(job, ([], []))
            steps.append(step)
            times.append(at)
        for job, (steps, times) in of_job.items():
            for request in acknowledged.get(job, ()):
                place = bisect_left(steps, (request.report + 1) * STEPS)
                yield max(times[place] - request.ended, 0.0) if place < len(times) else float("inf")


def fastest(streams: Iterable[Heard]) -> float:
    """Largest number of updates of one job on a list within a second."""
    most = 0
    for heard in streams:
        times: dict[int, list[float]] = {}
        for job, at in zip(heard.jobs, heard.at, strict=True):
            times.setdefault(job, []).append(at)
        most = max([most, *(bisect_left(some, some[i] + 0.9) - i for some in times.values() for i in range(len(some)))])
    return most


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = results["rows"]
    return "\n".join(
        [
            "# The service under load",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. {results['jobs']} jobs that report every "
            f"{results['period_seconds']:.0f} s, for {results['seconds']:.0f} s: {results['jobs'] / 5:.0f} compressed "
            f"requests a second of 30 points and 5 log lines; {NUM_JOB_STREAMS} streams of jobs and {NUM_LIST_STREAMS} "
            "of lists; one more reads nothing. Service, database, generator and whatever else ran shared the cores.",
            "",
            "| | " + " | ".join(f"{row['database']}, {row['services']} x" for row in rows) + " | target |",
            "|---|" + "---:|" * len(rows) + "---|",
            *(f"| {name} | " + " | ".join(map(show, rows)) + f" | {target} |" for name, show, target in FIGURES),
            "",
        ]
    )


def _three(key: str, digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda row: " / ".join(f"{row[key][which]:.{digits}f}" for which in ("p50", "p99", "max"))


FIGURES: tuple[tuple[str, Callable[[dict[str, Any]], str], str], ...] = (
    ("ingest ms: p50 / p99 / max", _three("ingest_milliseconds", 1), "p99 under 20, PostgreSQL 40"),
    ("sent late by the generator, ms", _three("sent_late_milliseconds", 1), ""),
    ("requests acknowledged", lambda row: str(row["requests"]), "all"),
    ("lost or doubled", lambda row: "; ".join(row["wrong"]) or "nothing", "nothing"),
    ("from acknowledgement to a job's stream, s", _three("job_delivery_seconds", 2), "p99 under 1"),
    ("to a list's stream, which waits for its second, s", _three("list_delivery_seconds", 2), ""),
    ("rows of a job within 0.9 s on a list, at most", lambda row: str(row["list_sends_per_second"]), "1"),
    ("streams that ended", lambda row: str(row["streams_ended"]), "0"),
    ("slow reader dropped", lambda row: "yes" if row["slow_reader_dropped"] else "no", "yes"),
    ("peak RSS of a service, MB", lambda row: f"{row['peak_bytes'] / 1e6:.0f}", "under 300"),
    ("cores: services", lambda row: " + ".join(f"{cores:.2f}" for cores in row["service_cores"]), ""),
    ("cores: generator", lambda row: f"{row['generator_cores']:.2f}", ""),
    ("cores: whole machine, others included", lambda row: f"{row['machine_cores']:.2f}", ""),
)


def main() -> int:
    """Measure. A complete run writes both files, a partial one only prints."""
    parser = argparse.ArgumentParser(prog="service_load")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--on", choices=KINDS)
    options = parser.parse_args(sys.argv[1:])
    load = Load(num_reports=max(round(options.seconds / 5), 1))
    about = {"load_before": os.getloadavg()[0], "jobs": load.num_jobs, "period_seconds": load.period_seconds}
    rows = [measure(kind, load) for kind in ([options.on] if options.on else KINDS)]
    text = json.dumps({**about, "seconds": load.seconds, "rows": rows})
    if options.on or options.seconds != SECONDS:
        print(text)
    else:
        write_results("service_load", text, markdown)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
