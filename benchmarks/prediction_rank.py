"""One rank of `benchmarks.prediction`: a reference kernel, steps of a plan as in training, the kernel again."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.trainer.loop import Stopwatch
from penstock.trainer.rundir import RunDir
from penstock.trainer.session import Session
from penstock.trainer.together import gather
from penstock.trainer.worker import Worker, run_worker

WARM_UP_STEPS = 2
KERNEL_SIZE, KERNEL_PRODUCTS, KERNEL_REPEATS = 512, 40, 16


def visit(run: RunDir, steps: int, worker: Worker) -> None:
    """Writes ``visit.json``: seconds of the kernel before and after, of every step, and every rank's peak bytes."""
    before = reference_seconds()
    seconds, peaks = _steps(run, steps, worker) if steps else ([], ())
    after = reference_seconds()
    if worker.rank == 0:
        found = {"reference_seconds": [before, after], "step_seconds": seconds, "peak_bytes": peaks}
        (run.root / "visit.json").write_text(json.dumps(found))


def _steps(run: RunDir, steps: int, worker: Worker) -> tuple[list[float], tuple[int, ...]]:
    stopwatch = Stopwatch(Session(run, worker))
    taken = [stopwatch.step(step) for step in range(WARM_UP_STEPS + steps)]
    return [seconds for _, seconds, _ in taken[WARM_UP_STEPS:]], taken[-1][0].peak_bytes


def reference_seconds() -> float:
    """Matrix products on all ranks at once: the slowest rank's lower quartile, which a moment's disturbance leaves."""
    left, right = torch.ones(KERNEL_SIZE, KERNEL_SIZE), torch.ones(KERNEL_SIZE, KERNEL_SIZE)
    taken = []
    for _ in range(KERNEL_REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(KERNEL_PRODUCTS):
            torch.mm(left, right)
        taken.append(time.perf_counter() - begin)
    return max(gather(statistics.quantiles(taken)[0]))


if __name__ == "__main__":
    place = RunDir(Path(sys.argv[1]))
    with torch.no_grad():
        sys.exit(run_worker(lambda me: visit(place, int(sys.argv[2]), me), device="cpu", status_folder=place.status))
