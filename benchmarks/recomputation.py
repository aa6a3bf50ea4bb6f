"""What running operations again takes, predicted from a profile and timed: R of a stage for several sets of operations.

    ./dev bench recomputation

The demonstration's model on one rank. Round after round all points of a profile are visited as `penstock profile` does,
and a stage of some blocks runs F of a sequence, slice by slice, then R, I and W of its slices in reverse, once for each
set of operations: so both meet the same machine, however it drifts. Medians are compared, of seconds that the thread
computes, which other processes do not add to. The prediction by FLOPs alone is that of a profile without R of the
operations that have no product.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from benchmarks.prediction import example_job
from benchmarks.support import write_results
from torch import Tensor

from penstock.core.layout import Operation, Precision, Remade, SlotKind, stage_slot_bytes
from penstock.core.model import ModelSpec
from penstock.core.profile import MemoryRecord, Profile, UnitRecord
from penstock.core.remaking import SELECTIVE, remade_of, uniform_remakes
from penstock.core.schedule import Kind
from penstock.core.sharding import WHOLE
from penstock.planner.fit import measured_cost
from penstock.planner.remake import remake_until_ns
from penstock.planner.stagecost import equal_slices, prefixes
from penstock.trainer.clock import HostTimer
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.grid import Point, profile_grid
from penstock.trainer.profiling.machine import machine_key
from penstock.trainer.profiling.parts import Workload, choose_parts
from penstock.trainer.profiling.units import Key, UnitTimer
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import NO_SHARDS, Pass, run_pass
from penstock.trainer.units.views import slot_views
from penstock.trainer.units.workspace import Workspace, workspace_bytes

NUM_BLOCKS, NUM_SLICES, ROUNDS = 3, (1, 4), 20
STAGE = 1, 1 + 2 * NUM_BLOCKS
MEMORY_BYTES = 2**32
SETS: dict[str, Sequence[Operation]] = {
    "selective (norm, activate)": SELECTIVE,
    "full": tuple(Operation),
    **{
        operation.value: (operation,)
        for operation in (Operation.NORM, Operation.PROJECT, Operation.ATTEND, Operation.ACTIVATE)
    },
    "output": (Operation.OUTPUT,),
}
CPU = torch.device("cpu")
_WHOLE_SEQUENCE = (SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS)

Views = Mapping[SlotKind, Mapping[int, Mapping[str, Tensor]]]


class Blocks:
    """A stage of blocks, and the slots of every slice of one sequence."""

    def __init__(self, model: ModelSpec, slices: Sequence[int]) -> None:
        self._place = model, *STAGE
        self._starts = prefixes(slices).tolist()
        self._stops = [start + length for start, length in zip(self._starts, slices, strict=True)]
        workspace = Workspace(workspace_bytes(model, Precision.FP32, *self._place[1:], max(slices), WHOLE), CPU)
        parameters = StageParameters(
            *self._place, sharding=WHOLE, shard=0, precision=Precision.FP32, device=CPU, seed=0
        )
        self._stage = Stage(*self._place, parameters=parameters, workspace=workspace, sequence_length=self._stops[-1])
        shared = {slot: self._slot(slot, self._stops[-1]) for slot in _WHOLE_SEQUENCE}
        self._views: list[Views] = [
            {slot: self._slot(slot, length) for slot in SlotKind if slot not in _WHOLE_SEQUENCE} | shared
            for length in slices
        ]

    def _slot(self, slot: SlotKind, tokens: int) -> dict[int, dict[str, Tensor]]:
        model, first, stop = self._place
        num_bytes = stage_slot_bytes(model, Precision.FP32, first, stop, slot, 1, tokens)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        views = slot_views(memory, model, Precision.FP32, first, stop, slot, 1, tokens)
        for tensors in views.values():
            for tensor in tensors.values():
                tensor.normal_(std=0.1)
        return views

    def recompute(self, remade: Remade) -> list[float]:
        """The seconds of R of every slice, the last first, in the middle of a step."""
        stage, seconds = self._stage, []
        places = list(zip(self._views, self._starts, self._stops, strict=True))
        for views, start, stop in places:
            _run(stage.forward(views, start, stop))
        for number, (views, start, stop) in enumerate(reversed(places)):
            begin = time.thread_time()
            _run(stage.recompute(views, start, stop, remade))
            seconds.append(time.thread_time() - begin)
            _run(stage.backward_input(views, start, stop, fresh_dkv=number == 0))
            _run(stage.backward_weight(views, start))
        return seconds


def _run(made: Pass[object]) -> None:
    run_pass(made, NO_SHARDS)


def measured() -> dict[str, Any]:
    """Every set of operations, predicted and timed."""
    torch.set_num_threads(1)
    job = example_job()
    model, length = job.spec.model, job.spec.data.sequence_length
    slicings = [equal_slices(length, count) for count in NUM_SLICES]
    sets = {
        name: remade_of(model, STAGE, uniform_remakes(model, STAGE, operations)) for name, operations in SETS.items()
    }
    load = Workload(
        model=model,
        precision=Precision.FP32,
        sequence_length=length,
        timed=profile_grid(length, (1,), 1),
        weighed=(),
    )
    (part,) = choose_parts(load, MEMORY_BYTES)
    timer = UnitTimer(part, CPU, HostTimer(time.thread_time))
    stages = [Blocks(model, slices) for slices in slicings]
    samples: dict[tuple[Point, Key], list[float]] = {}
    taken: dict[tuple[str, int], list[float]] = {}
    for number in range(1 + ROUNDS):
        for point in load.timed:
            visit = timer.visit(point)
            visit()
            for key, timing in visit() if number else ():
                samples.setdefault((point, key), []).append(timing.device)
        for name, remade in sets.items():
            for blocks, slices in zip(stages, slicings, strict=True):
                seconds = blocks.recompute(remade)
                taken.setdefault((name, len(slices)), []).extend([sum(seconds)] if number else [])
        sys.stderr.write(f"round {number} of {ROUNDS}\n")
    profile = _profile(samples)
    rows = [
        _row(model, profile, slices, name, remade, taken[name, len(slices)])
        for slices in slicings
        for name, remade in sets.items()
    ]
    return {"rows": rows, "profile_share": _share(samples)}


def _profile(samples: Mapping[tuple[Point, Key], Sequence[float]]) -> Profile:
    """The medians, of one rank."""
    units = tuple(
        UnitRecord(
            unit=unit,
            kind=kind,
            batch=point.batch,
            length=point.length,
            prefix=point.prefix,
            alone_seconds=statistics.median(seconds),
            together_seconds=statistics.median(seconds),
            spread=0.0,
            samples=len(seconds),
            held_out=point.held_out,
        )
        for (point, (unit, kind)), seconds in samples.items()
    )
    return Profile(
        key=machine_key(CPU, 1),
        model_digest="",
        precision=Precision.FP32,
        measured_at=0.0,
        num_ranks=1,
        units=units,
        links=(),
        collectives=(),
        optimizer=(),
        memory=MemoryRecord(constant_bytes=0),
        action_overhead_seconds=0.0,
    )


def _share(samples: Mapping[tuple[Point, Key], Sequence[float]]) -> float:
    """R's part of the time that timing units takes."""
    again = sum(sum(seconds) for (_, (_, kind)), seconds in samples.items() if kind is Kind.R)
    return again / sum(map(sum, samples.values()))


def _row(
    model: ModelSpec, profile: Profile, slices: tuple[int, ...], name: str, remade: Remade, taken: Sequence[float]
) -> dict[str, Any]:
    older = replace(profile, units=tuple(unit for unit in profile.units if unit.kind is not Kind.R))
    by_profile, by_flops = (
        float(remake_until_ns(measured_cost(fitted_profile), model, STAGE, slices, 1, remade)[-1].sum()) / 1e9
        for fitted_profile in (profile, older)
    )
    low, _, high = statistics.quantiles(taken, n=4)
    return {
        "operations": name,
        "slices": len(slices),
        "predicted_seconds": by_profile,
        "predicted_by_flops_seconds": by_flops,
        "measured_seconds": statistics.median(taken),
        "quartiles_seconds": [low, high],
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield from (
        "# What running operations again takes",
        "",
        f"R of {NUM_BLOCKS} blocks of the demonstration's model over one sequence, one CPU core; "
        f"{results['machine']}. Medians of {ROUNDS} rounds. Times of R "
        f"are {results['profile_share']:.1%} of those that measuring units takes.",
        "",
        "| operations | slices | measured ms | predicted ms | error | by FLOPs alone |",
        "|---|---:|---:|---:|---:|---:|",
    )
    for row in results["rows"]:
        seconds = row["measured_seconds"]
        errors = (row[f"predicted{by}_seconds"] / seconds - 1 for by in ("", "_by_flops"))
        times = f"{1e3 * seconds:.2f} | {1e3 * row['predicted_seconds']:.2f}"
        yield f"| {row['operations']} | {row['slices']} | {times} | {' | '.join(f'{error:+.1%}' for error in errors)} |"


def main() -> int:
    """Measure, and write the table."""
    write_results("recomputation", json.dumps(measured()), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
