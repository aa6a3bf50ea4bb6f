"""One rank of `benchmarks.torch_pipelining`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.quiet import typical_profile
from benchmarks.torch_model import Part, token_loss
from benchmarks.torch_pipelining import OWN, UNSLICED
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from penstock.core.job import (
    DataSpec,
    JobSpec,
    ParallelismSpec,
    ResourcesSpec,
    TrainingSpec,
)
from penstock.core.layout import parameters
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.program import Program
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.realise import program_of
from penstock.trainer.comm import Mesh, Transport, open_transport
from penstock.trainer.parameters import initial_value
from penstock.trainer.profiling.profile import measure
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from penstock.trainer.worker import Worker, run_worker

SPEC = ModelSpec(family=Family.GPT2, layers=8, hidden=512, heads=8, vocab=4096, positions=1024)
LENGTH = 1024
SEQUENCES = (1, 2, 4)
ROUNDS = 15
PROFILES = 3
CPU = torch.device("cpu")

Step = Callable[[], float]
"""Forward and backward of the whole batch; the loss on the last rank, anything elsewhere."""


@dataclass(frozen=True)
class Kept:
    """Clears gradients and keeps the weights: neither side steps an optimizer."""

    gradient: Tensor

    def step(self, step: int, squared_norm: Tensor) -> None:
        """See `penstock.trainer.closing.Optimizer`."""
        self.gradient.zero_()


def job(sequences: int, pinned: ParallelismSpec) -> JobSpec:
    """The job that both sides run."""
    return JobSpec(
        model=SPEC,
        data=DataSpec(source="python-stdlib", sequence_length=LENGTH),
        training=TrainingSpec(global_batch=sequences, steps=1),
        resources=ResourcesSpec(ranks=2, memory_per_rank=8 * 2**30),
        parallelism=pinned,
    )


def compare(result: Path, worker: Worker) -> None:
    """All cases, the machine measured anew before each; the first rank writes the result."""
    torch.set_grad_enabled(False)
    cases = [_case(count, _measured(count, worker), worker) for count in SEQUENCES]
    if worker.rank == 0:
        model = f"gpt2, {SPEC.layers} layers of width {SPEC.hidden}, {LENGTH} tokens, vocabulary {SPEC.vocab}, fp32"
        result.write_text(json.dumps({"model": model, "rounds": ROUNDS, "cases": cases}))


def _measured(sequences: int, worker: Worker) -> Profile:
    """What the first rank wrote down, on all ranks."""
    wanted = job(sequences, ParallelismSpec())
    taken = [measure(wanted, worker, time.time()) for _ in range(PROFILES)]
    box = [typical_profile([each for each in taken if each is not None]) if worker.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _case(sequences: int, profile: Profile, worker: Worker) -> dict[str, object]:
    generator = torch.Generator().manual_seed(sequences)
    ids = torch.randint(SPEC.vocab, (sequences, LENGTH + 1), generator=generator)
    weights = {p.name: initial_value(SPEC, p, 0) for unit in SPEC.units for p in parameters(SPEC, unit)}
    decision = decide(problem_from_profile(job(sequences, ParallelismSpec(pp=2)), profile))
    plain = ParallelismSpec(pp=2, slices=1, schedule="1f1b", stages=(4.0, 4.0), micro_batch=1)
    baseline = decide(problem_from_profile(job(sequences, plain), profile))
    assert decision.plan.prediction is not None
    assert baseline.plan.prediction is not None
    contenders = {
        OWN: _penstock(decision.plan, ids, worker),
        UNSLICED: _penstock(baseline.plan, ids, worker),
        **_torch_contenders(sequences, ids, weights, worker),
    }
    measured: dict[str, dict[str, Any]] = {name: {"seconds": [], "loss": 0.0} for name in contenders}
    for round_number in range(ROUNDS + 1):
        for name, step in contenders.items():
            seconds, loss = _timed(step)
            if round_number:
                measured[name]["seconds"].append(seconds)
            measured[name]["loss"] = loss
    return {
        "sequences": sequences,
        "plan": decision.plan.reasons[0],
        "predicted_seconds": decision.plan.prediction.step_seconds,
        "predicted_unsliced_seconds": baseline.plan.prediction.step_seconds,
        "contenders": measured,
    }


def _timed(step: Step) -> tuple[float, float]:
    """A step's seconds and loss."""
    dist.barrier()
    begin = time.perf_counter()
    loss = step()
    dist.barrier()
    seconds = time.perf_counter() - begin
    return seconds, _from_last_rank(loss)


def _from_last_rank(loss: float) -> float:
    box = torch.tensor([loss], dtype=torch.float64)
    dist.broadcast(box, src=1)
    return float(box)


def _penstock(plan: Plan, ids: Tensor, worker: Worker) -> Step:
    program = program_of(plan)
    transport = open_transport(program, Mesh(dp=plan.dp, pp=plan.pp), worker.rank, worker.groups)
    runtime, batch = runtime_of(plan, program, worker.rank, transport, CPU), batch_of(ids)
    return lambda: runtime.train_step(0, batch).loss_sum / batch.num_valid_tokens


def runtime_of(plan: Plan, program: Program, rank: int, transport: Transport, device: torch.device) -> Runtime:
    """A rank's runtime, whose steps leave the weights as they are."""
    stages = build_stages(plan, program.ranks[rank], device=device, seed=0)
    optimizers = {number: Kept(stage.parameters.gradient_flat) for number, stage in stages.items()}
    return Runtime(plan, program, rank, stages=stages, optimizers=optimizers, transport=transport, device=device)


def batch_of(ids: Tensor) -> Batch:
    """The batch of token ids [N, S + 1]: every token but the first is the label of the one before."""
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return Batch(token_ids=ids, labels=labels, num_valid_tokens=labels.numel())


HALVES, QUARTERS = ((0, 4), (4, 8)), ((0, 2), (2, 4), (4, 6), (6, 8))
TORCH: dict[str, tuple[Any, tuple[tuple[int, int], ...], tuple[int, ...]]] = {
    "torch GPipe": (ScheduleGPipe, HALVES, (0, 1)),
    "torch 1F1B": (Schedule1F1B, HALVES, (0, 1)),
    "torch interleaved 1F1B": (ScheduleInterleaved1F1B, QUARTERS, (0, 1, 0, 1)),
    "torch interleaved zero-bubble": (ScheduleInterleavedZeroBubble, QUARTERS, (0, 1, 0, 1)),
    "torch ZBV": (ScheduleZBVZeroBubble, QUARTERS, (0, 1, 1, 0)),
}
"""By name: the schedule, the layers of every stage, and its rank."""


def _torch_contenders(sequences: int, ids: Tensor, weights: dict[str, Tensor], worker: Worker) -> dict[str, Step]:
    """Every schedule that torch has and that takes this many micro-batches."""
    steps: dict[str, Step] = {}
    for name, (kind, ranges, owners) in TORCH.items():
        stages = _stages(worker.rank, ranges, owners, weights)
        try:
            schedule = kind(stages[0] if ranges is HALVES else stages, sequences, loss_fn=token_loss)
        except ValueError:
            continue  # it refuses so few micro-batches
        steps[name] = _torch_step(schedule, stages, ids, worker.rank, last=owners[-1])
    return steps


def _stages(
    rank: int, ranges: Sequence[tuple[int, int]], owners: Sequence[int], weights: dict[str, Tensor]
) -> list[PipelineStage]:
    found = []
    for number, (first, stop) in enumerate(ranges):
        if owners[number] == rank:
            part = Part(SPEC, first, stop)
            part.load(weights)
            part.requires_grad_(True)
            found.append(PipelineStage(part, number, len(ranges), CPU))
    return found


def _torch_step(schedule: Any, stages: list[PipelineStage], ids: Tensor, rank: int, last: int) -> Step:
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    modules = [stage.submod for stage in stages]
    has_first = any(stage.is_first for stage in stages)

    def step() -> float:
        losses: list[Tensor] = []
        with torch.enable_grad():
            arguments = (inputs,) if has_first else ()
            if rank == last:
                schedule.step(*arguments, target=labels, losses=losses)
            else:
                schedule.step(*arguments)
        for module in modules:
            module.zero_grad(set_to_none=False)
        loss = float(torch.stack(losses).mean()) if losses else 0.0
        return _to_rank_one(loss, last)

    return step


def _to_rank_one(loss: float, last: int) -> float:
    """The loss where the reporter looks for it."""
    box = torch.tensor([loss], dtype=torch.float64)
    dist.broadcast(box, src=last)
    return float(box)


if __name__ == "__main__":
    target, status = Path(sys.argv[1]), Path(sys.argv[2])
    sys.exit(run_worker(lambda worker: compare(target, worker), device="cpu", status_folder=status))
