"""One rank of `benchmarks.prediction`: runs the plans in turn, or measures the memory of one plan in a new process."""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.quiet import is_drift, reference_seconds

from penstock.core.run.folder import RunDir
from penstock.trainer.loop import Stopwatch
from penstock.trainer.session import Session
from penstock.trainer.worker import Worker, run_worker

STEPS_PER_VISIT = 10


def visits(run: RunDir, worker: Worker) -> None:
    """Run a block of steps of each plan. Steps during which the machine drifted are rejected."""
    plans: dict[str, object] = json.loads((run.root / "visits.json").read_text())
    steps_of: dict[str, list[float]] = {}
    for name, plan in plans.items():
        steps, kernels = visit(run, plan, worker)
        around = zip(steps, pairwise(kernels), strict=True)
        steps_of[name] = [seconds for seconds, (before, after) in around if not is_drift(before, after)]
        if worker.rank == 0:
            kernel = f"kernel {1000 * min(kernels):.2f} to {1000 * max(kernels):.2f} ms"
            kept = f"{len(steps_of[name])} of {len(steps)} kept"
            print(f"{name}: {statistics.median(steps):.3f} s, {kernel}, {kept}", flush=True)
    _write(run, worker, {"steps": steps_of})


def visit(run: RunDir, plan: object, worker: Worker) -> tuple[list[float], list[float]]:
    """Seconds of the steps of a block, after a warm-up step, and of the reference kernel before and after each."""
    stopwatch = _stopwatch(run, plan, worker)
    stopwatch.step(0)
    steps, kernels = list[float](), [reference_seconds()]
    for step in range(1, 1 + STEPS_PER_VISIT):
        steps.append(stopwatch.step(step)[1])
        kernels.append(reference_seconds())
    return steps, kernels


def memory(run: RunDir, worker: Worker) -> None:
    """Write every rank's peak bytes under the plan of the run directory."""
    stopwatch = _stopwatch(run, None, worker)
    totals = [stopwatch.step(step)[0] for step in range(3)]
    _write(run, worker, {"peak_bytes": totals[-1].peak_bytes})


def _stopwatch(run: RunDir, plan: object, worker: Worker) -> Stopwatch:
    if plan is not None and worker.rank == 0:
        run.plan.write_text(json.dumps(plan))
    dist.barrier()
    return Stopwatch(Session(run, worker))


def _write(run: RunDir, worker: Worker, result: dict[str, object]) -> None:
    if worker.rank == 0:
        (run.root / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    place = RunDir(Path(sys.argv[1]))
    task = {"visits": visits, "memory": memory}[sys.argv[2]]
    with torch.no_grad():
        device = place.read_job().spec.resources.device.value
        sys.exit(run_worker(lambda me: task(place, me), device=device, status_folder=place.status))
