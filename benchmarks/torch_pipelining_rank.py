"""One rank of `benchmarks.torch_pipelining`."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.quiet import typical_profile
from benchmarks.torch_model import Part, token_loss
from benchmarks.torch_pipelining import OWN, RANKS, UNSLICED
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
from penstock.core.mesh import Mesh
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.program import Program
from penstock.core.schedule import Kind, parse_action
from penstock.planner.compile import program_of, schedule_of
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.measured import problem_from_profile
from penstock.planner.order import KINDS
from penstock.planner.replay import candidate_of
from penstock.planner.simulate.costs import MILLION, Costs
from penstock.planner.simulate.simulation import simulate
from penstock.trainer.collectives import gather
from penstock.trainer.comm import Transport, open_transport
from penstock.trainer.parameters import initial_value
from penstock.trainer.profiling.profile import measure
from penstock.trainer.recorder import HostRecorder
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stage import Stage
from penstock.trainer.stages import build_stages
from penstock.trainer.worker import Worker, run_worker

SPEC = ModelSpec(family=Family.GPT2, layers=8, hidden=512, heads=8, vocab=4096, positions=1024)
LENGTH = 1024
SEQUENCES = (1, 2, 4)
ROUNDS = 11
ROUNDS_PER_ALONE = 3
"""Rounds between measurements of actions while the other rank is idle."""

PROFILES = 3
CPU = torch.device("cpu")

Step = Callable[[], float]
"""Forward and backward of the whole batch. Returns the loss on the last rank, an arbitrary number elsewhere."""


@dataclass(frozen=True)
class Kept:
    """Optimizer that only clears gradients: neither side updates weights."""

    gradient: Tensor

    def step(self, step: int, squared_norm: Tensor) -> None:
        self.gradient.zero_()


def job(sequences: int, pinned: ParallelismSpec) -> JobSpec:
    """Job that both sides run."""
    return JobSpec(
        model=SPEC,
        data=DataSpec(source="python-stdlib", sequence_length=LENGTH),
        training=TrainingSpec(global_batch=sequences, steps=1),
        resources=ResourcesSpec(ranks=2, memory_per_rank=8 * 2**30),
        parallelism=pinned,
    )


class Penstock:
    """One rank of a running plan, with the times of its actions in steps and while the other rank is idle."""

    def __init__(self, plan: Plan, ids: Tensor, worker: Worker) -> None:
        self._plan, self._rank, program = plan, worker.rank, program_of(plan)
        transport = open_transport(program, Mesh(dp=plan.dp, pp=plan.pp), worker.rank, worker.groups)
        self._instructions = program.ranks[worker.rank].instructions
        self._stages = build_stages(plan, program.ranks[worker.rank], device=CPU, seed=0)
        self._runtime = runtime_of(plan, program, worker.rank, self._stages, transport, CPU)
        self._batch = batch_of(ids)
        self._compute = [
            number for number, instruction in enumerate(self._instructions) if instruction.action.is_compute
        ]
        self._closing = [n for n, instruction in enumerate(self._instructions) if instruction.action.kind in _CLOSING]
        self._recorder = HostRecorder(len(self._instructions))
        self._alone_recorder = HostRecorder(len(self._compute))
        self._without_messages = self._runtime.without_messages()
        self._together_ns: list[Tensor] = []
        self._alone_ns: list[Tensor] = []
        self._closing_ns: list[int] = []

    def step(self) -> float:
        """Run forward and backward of the whole batch. Returns the mean loss."""
        loss = self._runtime.train_step(0, self._batch, self._recorder).loss_sum
        times_ns = self._recorder.times_ns().diff()
        self._together_ns.append(times_ns[self._compute])
        self._closing_ns.append(int(times_ns[self._closing].sum()))
        return loss / self._batch.num_valid_tokens

    def compute_alone(self) -> None:
        """Run the compute actions of one rank after the other. Collective."""
        for rank in range(RANKS):
            dist.barrier()
            if rank == self._rank:
                self._without_messages.run(0, self._alone_recorder)
                self._alone_ns.append(self._alone_recorder.times_ns().diff())
                for stage in self._stages.values():
                    stage.parameters.gradient_flat.zero_()

    def measured(self) -> dict[str, dict[str, float]]:
        """Median seconds of every action of all ranks, in steps after the first and alone. Collective."""
        kept = {"together": self._together_ns[1:], "alone": self._alone_ns}
        return {how: self._of_all_ranks(_medians(times)) for how, times in kept.items() if times}

    def measured_steps(self) -> list[dict[str, float]]:
        """Seconds of every action of all ranks, for every step but the first. Collective."""
        return [self._of_all_ranks([1e-9 * time_ns for time_ns in times.tolist()]) for times in self._together_ns[1:]]

    def _of_all_ranks(self, seconds: Sequence[float]) -> dict[str, float]:
        """Seconds of all ranks by action. ``seconds`` are those of this rank's compute actions. Collective."""
        names = (str(self._instructions[number].action) for number in self._compute)
        own = dict(zip(names, seconds, strict=True))
        return {name: taken for rank in gather(own) for name, taken in rank.items()}

    def closing_seconds(self) -> float:
        """Median seconds in which the slower rank computes the norm and clears gradients. Collective."""
        return 1e-9 * max(gather(statistics.median(self._closing_ns[1:])))


_CLOSING = frozenset({Kind.START_REDUCE, Kind.STEP})


def _medians(times_ns: list[Tensor]) -> list[float]:
    return [1e-9 * statistics.median(action_times) for action_times in torch.stack(times_ns).T.tolist()]


def compare(result: Path, worker: Worker) -> None:
    """Run all cases, each after a new profile of the machine. The first rank writes the result."""
    torch.set_grad_enabled(False)
    cases = [_case(count, _measured(count, worker), worker) for count in SEQUENCES]
    if worker.rank == 0:
        model = f"gpt2, {SPEC.layers} layers of width {SPEC.hidden}, {LENGTH} tokens, vocabulary {SPEC.vocab}, fp32"
        result.write_text(json.dumps({"model": model, "rounds": ROUNDS, "cases": cases}))


def _measured(sequences: int, worker: Worker) -> Profile:
    """Measure a profile and send it from the first rank to all."""
    wanted = job(sequences, ParallelismSpec())
    taken = [measure(wanted, worker, time.time()) for _ in range(PROFILES)]
    box = [typical_profile([profile for profile in taken if profile is not None]) if worker.rank == 0 else None]
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
    own, unsliced = (Penstock(plan, ids, worker) for plan in (decision.plan, baseline.plan))
    parts = _parts(own, unsliced, decision.plan, profile)
    contenders = {
        OWN: own.step,
        UNSLICED: unsliced.step,
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
        "parts": parts,
        "contenders": measured,
    }


def _parts(own: Penstock, unsliced: Penstock, plan: Plan, profile: Profile) -> dict[str, object]:
    """Times of the plan's actions and of whole sequences, within steps and with one rank at a time."""
    own_seconds = list[float]()
    for round_number in range(ROUNDS + 1):
        own_seconds.append(_timed(own.step)[0])
        if round_number % ROUNDS_PER_ALONE == 0:
            own.compute_alone()
            unsliced.compute_alone()
    actions, whole = own.measured(), unsliced.measured()["alone"]
    return {
        "step_seconds": own_seconds[1:],
        "simulated_seconds": simulated_seconds(plan, profile),
        "critical_seconds": [critical_seconds(plan, profile, taken) for taken in own.measured_steps()],
        "closing_seconds": own.closing_seconds(),
        "compute_seconds": {
            "whole, alone": sum(whole.values()) / RANKS,
            "slices, alone": sum(actions["alone"].values()) / RANKS,
            "slices": sum(actions["together"].values()) / RANKS,
        },
    }


def _timed(step: Step) -> tuple[float, float]:
    """Seconds and loss of a step."""
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


def simulated_seconds(plan: Plan, profile: Profile) -> float:
    """Predicted seconds of a step without optimizer, which is compared, by the profile."""
    costs = dataclasses.replace(_costs(plan, profile), optimizer_ns=())
    return 1e-9 * simulate(program_of(plan), costs).makespan_ns


def critical_seconds(plan: Plan, profile: Profile, action_seconds: Mapping[str, float]) -> float:
    """Critical path of a step whose actions took ``action_seconds``. Apart from them only messages take time."""
    table: dict[tuple[int, int, int], list[float]] = {}
    for name, seconds in action_seconds.items():
        action = parse_action(name)
        assert action.slice is not None, name
        table.setdefault((KINDS.index(action.kind), action.stage, action.slice), []).append(seconds)
    costs = _costs(plan, profile)
    compute_ns = np.zeros_like(costs.compute_ns)
    for place, times in table.items():
        compute_ns[place] = round(1e9 * statistics.mean(times))
    taken = dataclasses.replace(
        costs, compute_ns=compute_ns, slowdown_ppm=np.full_like(compute_ns, MILLION), reduce_ns={}, optimizer_ns=()
    )
    return 1e-9 * simulate(program_of(plan), taken).makespan_ns


def _costs(plan: Plan, profile: Profile) -> Costs:
    judge = Simulated(problem_from_profile(job(plan.global_batch, ParallelismSpec(pp=RANKS)), profile))
    return judge.costs(candidate_of(plan), schedule_of(plan).stage_ranks)


def runtime_of(
    plan: Plan,
    program: Program,
    rank: int,
    stages: Mapping[int, Stage],
    transport: Transport,
    device: torch.device,
) -> Runtime:
    """Runtime of a rank whose steps do not change the weights."""
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
"""Contenders of torch by name: the schedule, the layers of every stage, and the rank of every stage."""


def _torch_contenders(sequences: int, ids: Tensor, weights: dict[str, Tensor], worker: Worker) -> dict[str, Step]:
    """Every schedule of torch that accepts this number of micro-batches."""
    steps: dict[str, Step] = {}
    for name, (kind, ranges, owners) in TORCH.items():
        stages = _stages(worker.rank, ranges, owners, weights)
        try:
            schedule = kind(stages[0] if ranges is HALVES else stages, sequences, loss_fn=token_loss)
        except ValueError:
            continue  # the schedule refuses so few micro-batches
        steps[name] = _torch_step(schedule, stages, ids, worker.rank, last=owners[-1])
    return steps


def _stages(
    rank: int, ranges: Sequence[tuple[int, int]], owners: Sequence[int], weights: dict[str, Tensor]
) -> list[PipelineStage]:
    stages = []
    for number, (first, stop) in enumerate(ranges):
        if owners[number] == rank:
            part = Part(SPEC, first, stop)
            part.load(weights)
            part.requires_grad_(True)
            stages.append(PipelineStage(part, number, len(ranges), CPU))
    return stages


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
    """Broadcast the loss from rank ``last``, since rank 1 reports it."""
    box = torch.tensor([loss], dtype=torch.float64)
    dist.broadcast(box, src=last)
    return float(box)


if __name__ == "__main__":
    target, status = Path(sys.argv[1]), Path(sys.argv[2])
    sys.exit(run_worker(lambda worker: compare(target, worker), device="cpu", status_folder=status))
