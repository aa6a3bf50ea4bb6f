"""All ranks of a plan as threads of one process, over the in-process transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.planner.compile import program_of
from penstock.trainer.local_transport import Fabric
from penstock.trainer.optimizer_step import Optimizer
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stage import Stage
from penstock.trainer.stages import build_stages
from tests.support.pipeline_ranks import SEED, GradientKeeper, sample
from tests.support.worker_pool import CPU

T = TypeVar("T")
MakeOptimizer = Callable[[Stage], Optimizer]


@dataclass
class ThreadedRun:
    """One runtime per rank. ``stop_requests`` are the ranks that ask to stop."""

    plan: Plan
    make_optimizer: MakeOptimizer = lambda stage: GradientKeeper(stage.parameters)
    poison: bool = True
    stop_requests: set[int] = field(default_factory=set)
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.program: Program = program_of(self.plan)
        self.mesh = self.plan.mesh
        fabric = Fabric(self.program, self.mesh, self.timeout_seconds)
        self.stages = [self._stages(rank) for rank in range(self.mesh.num_ranks)]
        self.optimizers = [{number: self.make_optimizer(stage) for number, stage in own.items()} for own in self.stages]
        self.runtimes = [self._runtime(rank, fabric) for rank in range(self.mesh.num_ranks)]

    def _stages(self, rank: int) -> Mapping[int, Stage]:
        own, shard = self.program.ranks[self.mesh.pipeline_rank(rank)], self.mesh.shard(rank)
        return build_stages(self.plan, own, shard=shard, replica=self.mesh.replica(rank), device=CPU, seed=SEED)

    def _runtime(self, rank: int, fabric: Fabric) -> Runtime:
        return Runtime(
            self.plan,
            self.program,
            rank,
            stages=self.stages[rank],
            optimizers=self.optimizers[rank],
            transport=fabric.transport(rank),
            device=CPU,
            stop_requested=lambda: rank in self.stop_requests,
            poison=self.poison,
        )

    def train_step(self, step: int = 0) -> list[float]:
        """The losses that every rank has after one step of the sample."""
        plan = self.plan
        ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
        num_valid, share = int((labels >= 0).sum()), plan.global_batch // plan.dp

        def one(rank: int, runtime: Runtime) -> float:
            own = slice(self.mesh.replica(rank) * share, (self.mesh.replica(rank) + 1) * share)
            batch = Batch(token_ids=ids[own], labels=labels[own], num_valid_tokens=num_valid)
            return runtime.train_step(step, batch).loss_sum

        return self.on_every_rank(one)

    def on_every_rank(self, act: Callable[[int, Runtime], T]) -> list[T]:
        """Call ``act(rank, runtime)`` on all ranks at once; their results, or the first rank's error."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = act(rank, self.runtimes[rank])
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.mesh.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in range(self.mesh.num_ranks)]
