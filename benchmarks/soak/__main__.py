"""``./dev soak``: kills, fuzzing, a long queue and plans, each with its result in ``benchmarks/results``.

    ./dev soak [kills|fuzz|queue|plans|small-plans|mixed|every-plan]... [--seed N] [--first N] [--count N] [--minutes M]
               [--results FOLDER]

Without a name all seven parts run. ``--count`` is the number of kills, of queued jobs, or of planning problems.
Problems start at number ``--first``, so that a long run can be divided. ``--minutes`` limits fuzzing and kills. The
default seed is the date. A result names what was run. The exit code is 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak.every_plan import compare_with_all
from benchmarks.soak.fuzz import fuzz
from benchmarks.soak.kills import survive, undisturbed_losses
from benchmarks.soak.mixed import compare_mixed
from benchmarks.soak.plans import compare
from benchmarks.soak.queue import queue
from benchmarks.support import RESULTS, machine

from tests.support.random_plans import SMALL
from tests.support.serving import served

KILLS, FUZZ_MINUTES, QUEUED = 200, 10.0, 10_000
QUEUE_MINUTES = 2.0
PROBLEMS, PINS = 40, 200
SMALL_PROBLEMS, PINS_OF_SMALL = 2_000, 20
MIXED_PROBLEMS, COMPARED_WITH_ALL = 500, 20
Loads = list[float]


class Reporter:
    """Prints lines of progress with time and load, and keeps the loads."""

    def __init__(self, part: str) -> None:
        self._part, self._began = part, time.monotonic()
        self.loads: Loads = [os.getloadavg()[0]]

    def __call__(self, line: str) -> None:
        self.loads.append(os.getloadavg()[0])
        print(f"[soak] {self._part} {time.monotonic() - self._began:6.0f} s: {line}", flush=True)


def kills(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Kill random processes of whole jobs."""
    seconds = 60 * options.minutes if options.minutes else math.inf
    with served(folder, log=folder / "service.log") as service:
        undisturbed = undisturbed_losses(service)
        return survive(service, undisturbed, options.count or KILLS, options.seed, report, seconds).to_json()


def fuzzing(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Send or load malformed requests, ConfigMaps and files."""
    return fuzz(folder, options.seed, 60 * (options.minutes or FUZZ_MINUTES), report)


def queueing(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Queue many jobs on the service and on the operator."""
    return queue(folder, options.count or QUEUED, 60 * (options.minutes or QUEUE_MINUTES), report)


def planning(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Compare free plans of large jobs with pinned ones."""
    return compare(options.seed, first=options.first, count=options.count or PROBLEMS, pins=PINS, report=report)


def planning_small(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Compare free plans for at most 16 devices with pinned ones."""
    count = options.count or SMALL_PROBLEMS
    return compare(options.seed, first=options.first, count=count, pins=PINS_OF_SMALL, report=report, sizes=SMALL)


def planning_mixed(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Compare plans for devices of several kinds with those for one kind and for equal devices."""
    return compare_mixed(options.seed, first=options.first, count=options.count or MIXED_PROBLEMS, report=report)


def planning_every(options: argparse.Namespace, folder: Path, report: Reporter) -> dict[str, Any]:
    """Compare plans for few devices of two kinds with brute force."""
    count = options.count or COMPARED_WITH_ALL
    return compare_with_all(options.seed, first=options.first, count=count, report=report)


PARTS: dict[str, Callable[[argparse.Namespace, Path, Reporter], dict[str, Any]]] = {
    "kills": kills,
    "fuzz": fuzzing,
    "queue": queueing,
    "plans": planning,
    "small-plans": planning_small,
    "mixed": planning_mixed,
    "every-plan": planning_every,
}


def run(part: str, options: argparse.Namespace) -> list[str]:
    """Run one part and write its result. Returns a sentence for each violation."""
    report, began = Reporter(part), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        (Path(folder) / part).mkdir()
        figures = PARTS[part](options, Path(folder) / part, report)
    loads = [*report.loads, os.getloadavg()[0]]
    result = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "load": {"first": loads[0], "most": max(loads), "last": loads[-1]},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": options.seed,
        **figures,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"soak_{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    violations: list[str] = figures["violations"]
    for violation in violations:
        report(f"does not hold: {violation}")
    report(f"{len(violations)} violations; the result is in {options.results / f'soak_{part}.json'}")
    return violations


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="kills|fuzz|queue|plans|small-plans|mixed|every-plan")
    today = int(dt.datetime.now(dt.UTC).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help=f"today's date ({today})")
    parser.add_argument("--first", type=int, default=0, help="the number of the first planning problem (0)")
    parser.add_argument(
        "--count",
        type=int,
        help=f"kills ({KILLS}), queued jobs ({QUEUED:,}), problems ({PROBLEMS}; small {SMALL_PROBLEMS:,}; "
        f"mixed {MIXED_PROBLEMS}, every-plan {COMPARED_WITH_ALL})",
    )
    parser.add_argument("--minutes", type=float, help=f"of fuzzing ({FUZZ_MINUTES:.0f}), or the most for kills")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: one of {', '.join(PARTS)}")
    violations = [violation for part in options.parts or PARTS for violation in run(part, options)]
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
