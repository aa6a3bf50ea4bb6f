"""One rank of `benchmarks.prediction`: plans visited in turn, or one plan's memory in a process of its own."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.quiet import Reference

from penstock.trainer.loop import Stopwatch
from penstock.trainer.rundir import RunDir
from penstock.trainer.session import Session
from penstock.trainer.worker import Worker, run_worker

STEPS_PER_VISIT, STEPS_PER_PLAN = 10, 20
MOST_ROUNDS = 16


def reference(run: RunDir, worker: Worker) -> None:
    """Writes the seconds that the reference kernel takes when nothing else wants the processor."""
    _write(run, worker, {"seconds": Reference().seconds})


def visits(run: RunDir, worker: Worker) -> None:
    """All plans in turn, until each has steps enough during which the machine was undisturbed."""
    asked = json.loads((run.root / "visits.json").read_text())
    plans: dict[str, object] = asked["plans"]
    found: dict[str, list[float]] = {name: [] for name in plans}
    rejected, kernel = 0, Reference()
    for number in range(MOST_ROUNDS):
        for name in [name for name in plans if len(found[name]) < STEPS_PER_PLAN]:
            steps = visit(run, plans[name], worker, kernel)
            kept = [seconds * asked["seconds"] / base for seconds, base in steps if base is not None]
            found[name] += kept
            rejected += STEPS_PER_VISIT - len(kept)
            if worker.rank == 0:
                seconds = statistics.median(kept or [math.nan])
                drift = kernel.seconds / asked["seconds"] - 1
                print(
                    f"round {number + 1}, {name}: {len(kept)} steps kept, {seconds:.3f} s, drift {drift:+.1%}",
                    flush=True,
                )
    _write(run, worker, {"steps": found, "rejected": rejected})


def visit(run: RunDir, plan: object, worker: Worker, kernel: Reference) -> Iterator[tuple[float, float | None]]:
    """Of each step after the first its seconds, and those of the undisturbed reference kernel at the time; none where
    the kernel was slower or faster than that before or after the step.
    """
    stopwatch = _stopwatch(run, plan, worker)
    stopwatch.step(0)
    for step in range(1, 1 + STEPS_PER_VISIT):
        before = kernel.settled()
        _, seconds, _ = stopwatch.step(step)
        yield seconds, kernel.seconds if before and kernel.is_undisturbed() else None


def memory(run: RunDir, worker: Worker) -> None:
    """Writes every rank's peak bytes under the plan in the run directory."""
    stopwatch = _stopwatch(run, None, worker)
    totals = [stopwatch.step(step)[0] for step in range(3)]
    _write(run, worker, {"peak_bytes": totals[-1].peak_bytes})


def _stopwatch(run: RunDir, plan: object, worker: Worker) -> Stopwatch:
    if plan is not None and worker.rank == 0:
        run.plan.write_text(json.dumps(plan))
    dist.barrier()
    return Stopwatch(Session(run, worker))


def _write(run: RunDir, worker: Worker, found: dict[str, object]) -> None:
    if worker.rank == 0:
        (run.root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    place = RunDir(Path(sys.argv[1]))
    task = {"reference": reference, "visits": visits, "memory": memory}[sys.argv[2]]
    with torch.no_grad():
        sys.exit(run_worker(lambda me: task(place, me), device="cpu", status_folder=place.status))
