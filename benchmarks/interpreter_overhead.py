"""Cost per action of interpreting a Program, without transport calls and the work of stages.

It runs a real Program with the real executor, status file and recorder. Stages, messages and reductions do nothing. The
whole time is attributed to the compute actions, although they are only a part of the instructions.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.support import write_results
from torch import Tensor

from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Channel, Instruction, Program
from penstock.core.run.rank_status import StatusFile
from penstock.core.schedule import Group, ScheduleSpec
from penstock.planner.compile import program_of
from penstock.trainer.executor import StageExecutor
from penstock.trainer.interpreter import SILENT, Interpreter, Operation, Recorder, nothing
from penstock.trainer.recorder import HostRecorder
from penstock.trainer.units.collectives import Pass

LIMIT_US = 50.0
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
NUM_STEPS = 200
CPU = torch.device("cpu")


class IdleStage:
    """A stage without work. The executor reads only ``spec``, ``first`` and ``stop``."""

    def __init__(self, spec: ModelSpec, first: int, stop: int) -> None:
        self.spec, self.first, self.stop = spec, first, stop
        self._loss = torch.zeros((), dtype=torch.float64)

    def forward(self, *_: object, **__: object) -> Pass[Tensor]:
        yield from ()
        return self._loss

    evaluate = backward_input = backward_weight = recompute = forward


class IdleTransport:
    """A transport whose messages arrive immediately."""

    def post_recv(self, channel: Channel, tensor: Tensor) -> IdleTransport:
        return self

    send = post_recv

    def wait(self) -> None:
        pass

    def all_reduce(self, group: Group, tensor: Tensor) -> IdleTransport:
        return self


class IdleClosing(StageExecutor):
    """An executor whose reductions and optimizer step do nothing, either."""

    def reduction(self, instruction: Instruction) -> Callable[[], IdleTransport]:
        return IdleTransport

    def step(self, instruction: Instruction) -> Operation:
        return nothing


def plan_of(schedule: str) -> Plan:
    """Eight layers on four ranks, eight micro-batches of eight slices: about 200 compute actions per rank and step."""
    model = ModelSpec(family=Family.LLAMA, layers=8, hidden=64, heads=4, vocab=128)
    return Plan(
        model=model,
        precision=Precision.FP32,
        pp=4,
        microbatch=1,
        num_microbatches=8,
        slices=(16,) * 8,
        stages=((0, 5), (5, 9), (9, 13), (13, 18)),
        schedule=ScheduleSpec(generator=schedule),
    )


def interpreter_of(plan: Plan, program: Program, rank: int, folder: Path) -> Interpreter:
    """The rank's Program, bound to idle stages."""
    own, stage = program.ranks[rank], IdleStage(plan.model, *plan.stages[rank])
    executor = IdleClosing(plan, own, {rank: stage}, None, device=CPU)  # type: ignore[dict-item, arg-type]
    status = StatusFile(folder / f"rank-{rank}", os.getpid())
    return Interpreter(
        enumerate(own.instructions), rank=rank, executor=executor, transport=IdleTransport(), cursor=status.cursor
    )


def microseconds(interpreter: Interpreter, recorder: Recorder) -> float:
    """Microseconds of the median step."""
    return statistics.median(_steps(interpreter, recorder)) / 1e3


def _steps(interpreter: Interpreter, recorder: Recorder) -> Iterable[int]:
    for step in range(NUM_STEPS):
        begin = time.perf_counter_ns()
        interpreter.run(step, recorder)
        yield time.perf_counter_ns() - begin


def measure(schedule: str) -> list[dict[str, Any]]:
    """One row for the first and the last rank."""
    plan = plan_of(schedule)
    program = program_of(plan)
    with tempfile.TemporaryDirectory() as folder:
        return [_row(schedule, plan, program, rank, Path(folder)) for rank in (0, plan.pp - 1)]


def _row(schedule: str, plan: Plan, program: Program, rank: int, folder: Path) -> dict[str, Any]:
    interpreter = interpreter_of(plan, program, rank, folder)
    instructions = program.ranks[rank].instructions
    num_actions = sum(instruction.action.is_compute for instruction in instructions)
    return {
        "schedule": schedule,
        "rank": rank,
        "instructions": len(instructions),
        "actions": num_actions,
        "us_per_action": microseconds(interpreter, SILENT) / num_actions,
        "us_per_action_recorded": microseconds(interpreter, HostRecorder(len(instructions))) / num_actions,
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Interpreter overhead",
        "",
        f"Microseconds per compute action on {results['machine']}; the limit is {results['limit_us']:g}.",
        "",
        "| schedule | rank | compute actions | instructions | us per action | recorded |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['schedule']} | {row['rank']} | {row['actions']} | {row['instructions']} "
        f"| {row['us_per_action']:.2f} | {row['us_per_action_recorded']:.2f} |"
        for row in results["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and write `results/interpreter_overhead.*`. Returns 1 if the overhead exceeds the limit."""
    torch.set_num_threads(1)
    rows = [row for schedule in SCHEDULES for row in measure(schedule)]
    write_results("interpreter_overhead", json.dumps({"limit_us": LIMIT_US, "rows": rows}), table)
    return int(max(row["us_per_action_recorded"] for row in rows) > LIMIT_US)
