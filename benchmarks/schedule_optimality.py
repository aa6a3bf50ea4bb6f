"""Gap between the orders of `zb` and `zbv` and the optimum of an exact solver (OR-Tools CP-SAT).

Each instance of `tests.support.optimality` is a constraint problem: passes are intervals, of which a rank runs one at a
time; transfers are delays; the memory of a slice from F to I and from F to W is a cumulative demand below the cap.
Micro-batches keep their order within each pass of a stage, since they are equal. The solver starts from our order, so
its result is never worse, and it proves its bound if time suffices. Transfers do not wait for each other here, unlike
in the simulator. That can only make our steps look longer by comparison.

Run as ``python -m benchmarks.schedule_optimality [INSTANCES [SECONDS [FIRST]]]``; writes
``benchmarks/results/schedule_optimality.{md,json}``. Instances from `NUM_INSTANCES` on are in no test.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from benchmarks.support import write_results
from ortools.sat.python import cp_model

from penstock.planner.order import Order
from penstock.planner.schedules.greedy_order import makespan_ns
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import CODES, F, I, W, cost_table
from penstock.planner.simulate import kernel
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import compute_table, uncontended
from tests.support.optimality import NUM_INSTANCES, family_of, instance

SECONDS = 60.0
MOST_MEAN_GAP, MOST_GAP = 0.02, 0.05

Starts = dict[tuple[int, int, int, int], Any]
"""Variable of every start time, by pass, stage, micro-batch and slice."""


def solve(inputs: ScheduleInputs, order: Order, seconds: float, workers: int) -> tuple[int, int, str]:
    """Solve from ``order`` on. Returns the shortest step found, its lower bound, and the solver's status."""
    model = cp_model.CpModel()
    horizon = makespan_ns(inputs, order)
    owners = family_of(inputs).place(inputs.num_ranks, inputs.stages_per_rank)
    times = [cost_table(inputs, name) for name in ("forward_ns", "input_ns", "weight_ns")]
    cells = itertools.product(
        range(3), range(inputs.num_stages), range(inputs.num_microbatches), range(inputs.num_slices)
    )
    starts: Starts = {cell: model.new_int_var(0, horizon, "") for cell in cells}
    step = model.new_int_var(0, horizon, "")
    intervals: dict[int, list[Any]] = {rank: [] for rank in range(inputs.num_ranks)}
    for (kind, stage, _, part), start in starts.items():
        length = int(times[kind][stage, part])
        intervals[owners[stage]].append(model.new_fixed_size_interval_var(start, length, ""))
        model.add(step >= start + length)
    for rank in intervals.values():
        model.add_no_overlap(rank)
    _add_dependencies(model, inputs, owners, times, starts)
    _add_memory(model, inputs, owners, starts, horizon)
    for cell, time in _simulated_starts(inputs, order, times).items():
        model.add_hint(starts[cell], time)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    is_solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    best = int(solver.objective_value) if is_solved else horizon
    return best, int(solver.best_objective_bound), solver.status_name(status)


def _add_dependencies(
    model: cp_model.CpModel, inputs: ScheduleInputs, owners: tuple[int, ...], times: list[Any], starts: Starts
) -> None:
    down, up = (cost_table(inputs, name) for name in ("send_forward_ns", "send_backward_ns"))
    last_stage, last_slice = inputs.num_stages - 1, inputs.num_slices - 1
    for (kind, stage, microbatch, part), start in starts.items():
        end = start + int(times[kind][stage, part])
        following = [(kind, stage, microbatch + 1, part)]
        if kind == W:
            neighbour, delay = stage, 0
        elif kind == F:
            neighbour, delay = stage + 1, int(down[stage, part])
            following.append((F, stage, microbatch, part + 1))
            if (stage, part) == (last_stage, last_slice):
                following.append((I, stage, microbatch, part))
        else:
            neighbour, delay = stage - 1, int(up[stage, part])
            following += [(I, stage, microbatch, part - 1), (W, stage, microbatch, part)]
        if kind != W and 0 <= neighbour <= last_stage:
            crosses = owners[stage] != owners[neighbour]
            model.add(starts[kind, neighbour, microbatch, part] >= end + delay * crosses)
        for cell in following:
            if cell in starts:
                model.add(starts[cell] >= end)


def _add_memory(
    model: cp_model.CpModel, inputs: ScheduleInputs, owners: tuple[int, ...], starts: Starts, horizon: int
) -> None:
    """Constrain memory: buffers that I frees are held from F to I, buffers that W frees from F to W."""
    released = {I: -cost_table(inputs, "input_stash"), W: -cost_table(inputs, "weight_stash")}
    held: dict[int, list[tuple[Any, int]]] = {rank: [] for rank in range(inputs.num_ranks)}
    for (kind, stage, microbatch, part), end in starts.items():
        if kind in released:
            length = model.new_int_var(0, horizon, "")
            interval = model.new_interval_var(starts[F, stage, microbatch, part], length, end, "")
            held[owners[stage]].append((interval, int(released[kind][stage, part])))
    for rank, pairs in held.items():
        intervals, demands = zip(*pairs, strict=True)
        model.add_cumulative(intervals, demands, inputs.caps[rank])


def _simulated_starts(inputs: ScheduleInputs, order: Order, times: list[Any]) -> dict[tuple[int, int, int, int], int]:
    transfers = np.stack([cost_table(inputs, name) for name in ("send_forward_ns", "send_backward_ns")])
    costs = uncontended(compute_table(*times), transfers, num_ranks=inputs.num_ranks)
    traced = simulate_arrays(order, costs, receive_ahead=inputs.receive_ahead, traced=True)
    begun = traced.trace[:, kernel.START - kernel.REACHED].tolist()
    kinds = [CODES.tolist().index(kind) for kind in order.kinds.tolist()]
    places = (order.stages.tolist(), order.microbatches.tolist(), order.slices.tolist())
    return dict(zip(zip(kinds, *places, strict=True), begun, strict=True))


def measurements(numbers: Iterable[int], seconds: float, workers: int = 2) -> Iterator[dict[str, Any]]:
    """One row per instance."""
    for number in numbers:
        inputs = instance(number)
        order = family_of(inputs).best_order(inputs)
        ours = makespan_ns(inputs, order)
        best, bound, status = solve(inputs, order, seconds, workers)
        row = {"instance": number, "ours_ns": ours, "best_ns": best, "bound_ns": bound, "status": status}
        print(row, f"gap {ours / best - 1:.4f}", flush=True)
        yield row


def markdown(results: dict[str, Any]) -> str:
    """The gaps as Markdown."""
    rows = results["rows"]
    gaps = [row["ours_ns"] / row["best_ns"] - 1 for row in rows]
    proved = sum(row["status"] == "OPTIMAL" for row in rows)
    return (
        f"# Orders against an exact solver\n\n{results['machine']}. {len(rows)} instances of 3 or 4 ranks, 4 to 6 "
        f"micro-batches and 1 to 3 slices, {results['seconds']:.0f} s of CP-SAT each from our order on, "
        f"{proved} proved optimal.\n\n| | gap to the solver's best |\n|---|---|\n"
        f"| mean (at most {MOST_MEAN_GAP:.0%}) | {sum(gaps) / len(gaps):.2%} |\n"
        f"| worst (at most {MOST_GAP:.0%}) | {max(gaps):.2%} |\n"
    )


def main() -> int:
    """Exit 1 if a gap is too large."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_INSTANCES
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    rows = list(measurements(range(first, first + count), seconds))
    write_results("schedule_optimality", json.dumps({"seconds": seconds, "rows": rows}), markdown)
    gaps = [row["ours_ns"] / row["best_ns"] - 1 for row in rows]
    return int(sum(gaps) / len(gaps) > MOST_MEAN_GAP or max(gaps) > MOST_GAP)


if __name__ == "__main__":
    sys.exit(main())
