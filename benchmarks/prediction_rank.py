"""One rank of `benchmarks.prediction`: plans visited in turn, or one plan's memory in a process of its own."""

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

WARM_UP_STEPS, STEPS_PER_VISIT, STEPS_PER_PLAN = 1, 4, 20
MOST_ROUNDS = 20
MOST_DRIFT = 0.03
KERNEL_SIZE, KERNEL_PRODUCTS, KERNEL_REPEATS = 512, 40, 8


def reference(run: RunDir, worker: Worker) -> None:
    """Writes the reference kernel's seconds."""
    _write(run, worker, {"seconds": reference_seconds()})


def visits(run: RunDir, worker: Worker) -> None:
    """All plans in turn, until each has steps enough that were taken while the machine kept its speed."""
    plans: dict[str, object] = json.loads((run.root / "visits.json").read_text())
    found: dict[str, list[dict[str, object]]] = {name: [] for name in plans}
    rejected = 0
    for number in range(MOST_ROUNDS):
        for name in [name for name in plans if len(found[name]) * STEPS_PER_VISIT < STEPS_PER_PLAN]:
            before = reference_seconds()
            seconds = visit(run, plans[name], WARM_UP_STEPS, STEPS_PER_VISIT, worker)[0]
            after = reference_seconds()
            drift = abs(after / before - 1)
            if drift <= MOST_DRIFT:
                found[name].append({"step_seconds": seconds, "reference_seconds": (before + after) / 2})
            else:
                rejected += 1
            if worker.rank == 0:
                print(f"round {number + 1}, {name}: {statistics.median(seconds):.3f} s, drift {drift:.1%}", flush=True)
    _write(run, worker, {"visits": found, "rejected": rejected})


def memory(run: RunDir, worker: Worker) -> None:
    """Writes every rank's peak bytes under the plan in the run directory."""
    _write(run, worker, {"peak_bytes": visit(run, None, WARM_UP_STEPS + 1, 1, worker)[1]})


def visit(run: RunDir, plan: object, warm_up: int, steps: int, worker: Worker) -> tuple[list[float], tuple[int, ...]]:
    """Seconds of every step after the first few, and every rank's peak bytes."""
    if plan is not None and worker.rank == 0:
        run.plan.write_text(json.dumps(plan))
    dist.barrier()
    stopwatch = Stopwatch(Session(run, worker))
    taken = [stopwatch.step(step) for step in range(warm_up + steps)]
    return [seconds for _, seconds, _ in taken[warm_up:]], taken[-1][0].peak_bytes


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


def _write(run: RunDir, worker: Worker, found: dict[str, object]) -> None:
    if worker.rank == 0:
        (run.root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    place = RunDir(Path(sys.argv[1]))
    task = {"reference": reference, "visits": visits, "memory": memory}[sys.argv[2]]
    with torch.no_grad():
        sys.exit(run_worker(lambda me: task(place, me), device="cpu", status_folder=place.status))
