"""One rank of `benchmarks.prediction`: plans visited in turn, or one plan's memory in a process of its own."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.trainer.loop import Stopwatch
from penstock.trainer.rundir import RunDir
from penstock.trainer.session import Session
from penstock.trainer.together import gather
from penstock.trainer.worker import Worker, run_worker

STEPS_PER_VISIT, STEPS_PER_PLAN = 5, 20
MOST_ROUNDS = 16
MOST_DRIFT = 0.03
KERNEL_SIZE, KERNEL_PRODUCTS, KERNEL_REPEATS = 512, 10, 9
REFERENCES = 5


def reference(run: RunDir, worker: Worker) -> None:
    """Writes the reference kernel's seconds."""
    _write(run, worker, {"seconds": statistics.median(reference_seconds() for _ in range(REFERENCES))})


def visits(run: RunDir, worker: Worker) -> None:
    """All plans in turn, until each has steps enough during which the machine kept its speed."""
    plans: dict[str, object] = json.loads((run.root / "visits.json").read_text())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    rejected = 0
    for number in range(MOST_ROUNDS):
        for name in [name for name in plans if len(found[name]) < STEPS_PER_PLAN]:
            kept = [pair for pair in visit(run, plans[name], worker) if pair is not None]
            found[name] += kept
            rejected += STEPS_PER_VISIT - len(kept)
            if worker.rank == 0:
                seconds = statistics.median([pair[0] for pair in kept] or [math.nan])
                print(f"round {number + 1}, {name}: {len(kept)} steps kept, {seconds:.3f} s", flush=True)
    _write(run, worker, {"steps": found, "rejected": rejected})


def visit(run: RunDir, plan: object, worker: Worker) -> Iterator[tuple[float, float] | None]:
    """Of each step after the first its seconds and the reference kernel's around it, or none where that changed."""
    stopwatch = _stopwatch(run, plan, worker)
    stopwatch.step(0)
    before = reference_seconds()
    for step in range(1, 1 + STEPS_PER_VISIT):
        _, seconds, _ = stopwatch.step(step)
        after = reference_seconds()
        yield (seconds, (before + after) / 2) if abs(after / before - 1) <= MOST_DRIFT else None
        before = after


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


def reference_seconds() -> float:
    """Matrix products on all ranks at once: the slowest rank's median."""
    left, right = torch.ones(KERNEL_SIZE, KERNEL_SIZE), torch.ones(KERNEL_SIZE, KERNEL_SIZE)
    taken = []
    dist.barrier()
    for _ in range(KERNEL_REPEATS):
        begin = time.perf_counter()
        for _ in range(KERNEL_PRODUCTS):
            torch.mm(left, right)
        taken.append(time.perf_counter() - begin)
    return max(gather(statistics.median(taken)))


def _write(run: RunDir, worker: Worker, found: dict[str, object]) -> None:
    if worker.rank == 0:
        (run.root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    place = RunDir(Path(sys.argv[1]))
    task = {"reference": reference, "visits": visits, "memory": memory}[sys.argv[2]]
    with torch.no_grad():
        sys.exit(run_worker(lambda me: task(place, me), device="cpu", status_folder=place.status))
