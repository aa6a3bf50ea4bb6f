"""The end of a step over shards: what they share is summed, and everything counts once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.schedule import Action, Group, Kind, Part
from penstock.core.sharding import Sharding
from penstock.planner.compile import program_of
from penstock.planner.memory import StageMemory
from penstock.trainer.local_transport import Fabric
from penstock.trainer.optimizer_step import OptimizerStep
from penstock.trainer.parameters import StageParameters
from penstock.trainer.squared_norm import Stretch
from tests.support.small_plans import small_model, small_plan
from tests.support.worker_pool import CPU

NUM_SHARDS = 4
KV_COPIES = 2


@dataclass
class FakeParameters:
    """What a shard holds of a matrix [8, 3] that is divided by rows, of a norm that all share, and of a key/value
    head's rows, in the middle of a larger tensor, that two hold.
    """

    shard: int
    gradient_flat: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gradient_flat = torch.full((6 + 4 + 12,), 10.0**self.shard, dtype=torch.float64)
        divided, norm, kv = torch.split(self.gradient_flat, [6, 4, 12])
        self.gradients = {"divided": divided.view(2, 3), "norm": norm, "kv": kv.view(4, 3)}

    def bucket(self, part: Part | None) -> list[Tensor]:
        assert part is None
        return [self.gradient_flat]

    def shared_gradients(self, part: Part | None = None) -> tuple[Tensor, ...]:
        return (self.gradients["norm"],)

    def copied_gradients(self, part: Part | None = None) -> tuple[Tensor, ...]:
        kv = self.gradients["kv"]
        return (kv[1:2], kv[2:4])

    def counted_stretches(self) -> list[Stretch]:
        """The first of those that hold the same counts it; the rows of ``kv`` before the copies are its own."""
        counted = [(0, 6), (10, 13)]
        counted += [(6, 10)] if self.shard == 0 else []
        counted += [(13, 22)] if self.shard % KV_COPIES == 0 else []
        return [Stretch(self.gradient_flat, 0, *bounds) for bounds in counted]


class Alone(FakeParameters):
    """It has no other shards."""

    def shared_gradients(self, part: Part | None = None) -> tuple[Tensor, ...]:
        return ()

    copied_gradients = shared_gradients


class NoOptimizer:
    def step(self, step: int, squared_norm: Tensor) -> None:
        pass


def sharded_plan(dp: int = 1) -> Plan:
    plan = small_plan(pp=1, dp=dp)
    return replace(plan, tp=NUM_SHARDS, model=replace(plan.model, kv_heads=NUM_SHARDS // KV_COPIES))


def closed(plan: Plan, groups: tuple[Group, ...]) -> tuple[list[FakeParameters], list[OptimizerStep]]:
    """Every rank after its reductions, with a loss of 5 on each."""
    mesh = plan.mesh
    fabric = Fabric(program_of(plan), mesh, 10.0)
    parameters = [FakeParameters(mesh.shard(rank)) for rank in range(mesh.num_ranks)]
    optimizer_steps = [
        OptimizerStep(
            plan,
            mesh,
            rank,
            stage_ranks=(0,),
            parameters={0: parameters[rank]},  # type: ignore[dict-item]
            optimizers={0: NoOptimizer()},
            transport=fabric.transport(rank),
            stop_requested=lambda rank=rank: rank == 3,  # type: ignore[misc]
            device=CPU,
        )
        for rank in range(mesh.num_ranks)
    ]

    def run(optimizer_step: OptimizerStep) -> None:
        for group in groups:
            action = Action(Kind.START_REDUCE, 0, group=group)
            optimizer_step.reduction(action, torch.full((1, 1), 5.0, dtype=torch.float64))().wait()
        optimizer_step.step()

    threads = [threading.Thread(target=run, args=(optimizer_step,)) for optimizer_step in optimizer_steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parameters, optimizer_steps


def test_shards_sum_only_gradients_of_shared_parameters() -> None:
    parameters, _ = closed(sharded_plan(), (Group.TP, Group.NORM))
    for shard, own in enumerate(parameters):
        assert own.gradients["norm"].tolist() == [1111.0] * 4
        assert set(own.gradients["divided"].flatten().tolist()) == {10.0**shard}
        kv = own.gradients["kv"]
        assert kv[0].tolist() == [10.0**shard] * 3
        assert set(kv[1:].flatten().tolist()) == {11.0 if shard < KV_COPIES else 1100.0}


@pytest.mark.parametrize("dp", [1, 2])
def test_every_element_and_every_loss_counts_once(dp: int) -> None:
    groups = (Group.TP, Group.DP, Group.NORM) if dp > 1 else (Group.TP, Group.NORM)
    _, optimizer_steps = closed(sharded_plan(dp), groups)
    shards = [10.0**shard for shard in range(NUM_SHARDS)]
    squares = sum((6 + 3) * (dp * value) ** 2 for value in shards) + 4 * (dp * 1111.0) ** 2
    squares += 9 * (dp * 11.0) ** 2 + 9 * (dp * 1100.0) ** 2
    for optimizer_step in optimizer_steps:
        totals = optimizer_step.totals
        assert totals.gradient_norm == pytest.approx(squares**0.5, rel=1e-12)
        assert totals.loss_sum == 5.0 * dp
        assert totals.stop
        assert len(totals.peak_bytes) == dp * NUM_SHARDS
        assert min(totals.peak_bytes) > 0


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", Family)
def test_the_planner_counts_what_gradients_are_packed_into(family: Family, sequence_parallel: bool) -> None:
    model = small_model(family, layers=2)
    if family is Family.LLAMA:
        model = replace(model, kv_heads=1)
    sharding, units = Sharding(2, sequence_parallel), (0, model.num_units)
    own = StageParameters(model, *units, sharding=sharding, shard=1, precision=Precision.FP32, device=CPU, seed=0)
    memory = StageMemory(model=model, precision=Precision.FP32, stages=(units,), batch=1, sharding=sharding)
    packed = [sum(view.nbytes for view in views) for views in (own.shared_gradients(), own.copied_gradients())]
    assert memory.packed_gradient_bytes.tolist() == [max(packed)]


def test_a_stage_without_shared_parameters_communicates_with_no_rank() -> None:
    """With no other shard in sight, its reduction over tp is over at once."""
    plan = small_plan(pp=1)
    fabric = Fabric(program_of(plan), plan.mesh, 0.05)
    own = Alone(0)
    optimizer_step = OptimizerStep(
        plan,
        plan.mesh,
        0,
        stage_ranks=(0,),
        parameters={0: own},  # type: ignore[dict-item]
        optimizers={0: NoOptimizer()},
        transport=fabric.transport(0),
        stop_requested=lambda: False,
        device=CPU,
    )
    optimizer_step.reduction(Action(Kind.START_REDUCE, 0, group=Group.TP), torch.zeros(1))().wait()
    assert set(own.gradient_flat.tolist()) == {1.0}
