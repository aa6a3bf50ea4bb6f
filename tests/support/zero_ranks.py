"""What ranks of a `tests.support.worker_pool` do to train with a divided state of the optimizer, or a whole one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import Tensor

from penstock.core.job import OptimizerSpec, TrainingSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.trainer.comm import ProcessGroupTransport
from penstock.trainer.memory import held_bytes
from penstock.trainer.optimizer import AdamW
from penstock.trainer.optimizer_step import Totals
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stage import Stage
from penstock.trainer.stages import build_stages
from tests.support.pipeline_ranks import SEED, sample
from tests.support.worker_pool import CPU, PoolRank

CLIP = 0.05


@dataclass(frozen=True)
class Trained:
    """Of every step; losses of evaluations after the first and the last one; the weights that products use, by stage,
    as a digest.
    """

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[int, str]
    state_bytes: int
    clip: float = CLIP


def train_steps(me: PoolRank, plan: Plan, program: Program, num_steps: int) -> Trained:
    """Steps with clipping and weight decay on the same batch."""
    totals, evaluated, stages, optimizers = _train(me, plan, program, num_steps)
    return Trained(
        losses=[each.loss_sum for each in totals],
        norms=[each.gradient_norm for each in totals],
        evaluated=evaluated,
        weights={number: _digest(stage.parameters.compute) for number, stage in stages.items()},
        state_bytes=sum(map(_state_bytes, optimizers.values())),
    )


def _train(
    me: PoolRank, plan: Plan, program: Program, num_steps: int
) -> tuple[list[Totals], list[float], dict[int, Stage], dict[int, AdamW]]:
    mesh = plan.mesh
    stages = build_stages(
        plan,
        program.ranks[mesh.pipeline_rank(me.rank)],
        shard=mesh.shard(me.rank),
        replica=mesh.replica(me.rank),
        device=CPU,
        seed=SEED,
    )
    training = TrainingSpec(
        steps=num_steps,
        global_batch=plan.global_batch,
        clip=CLIP,
        warmup_steps=0,
        optimizer=OptimizerSpec(learning_rate=1e-2, moment_type=plan.moment_type),
    )
    optimizers = {number: AdamW(stage.parameters, training) for number, stage in stages.items()}
    runtime = Runtime(
        plan,
        program,
        me.rank,
        stages=stages,
        optimizers=optimizers,
        transport=ProcessGroupTransport(me.groups, program, mesh, me.rank),
        device=CPU,
        poison=True,
    )
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    share = plan.num_sequences
    own = slice(mesh.replica(me.rank) * share, (mesh.replica(me.rank) + 1) * share)
    batch = Batch(token_ids=ids[own], labels=labels[own], num_valid_tokens=int((labels >= 0).sum()))
    totals, evaluated = [], []
    for step in range(num_steps):
        totals.append(runtime.train_step(step, batch))
        if step in (0, num_steps - 1):
            evaluated.append(runtime.evaluate(step, ids[own], labels[own]))
    return totals, evaluated, stages, optimizers


def peak_of_two_steps(me: PoolRank, plan: Plan, program: Program) -> int:
    """The most bytes that it takes to build the rank and train two steps, beyond what the process held before."""
    before = held_bytes(CPU)
    totals, *_ = _train(me, plan, program, 2)
    return totals[-1].peak_bytes[me.rank] - before


def _state_bytes(optimizer: AdamW) -> int:
    """Of moments, and of masters that are not what products use."""
    parameters = optimizer.parameters
    kinds = [*optimizer.moments.values(), *([parameters.masters] if parameters.has_copy else [])]
    return sum(flat.nbytes for flats in kinds for flat in flats)


def _digest(tensors: dict[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype}".encode() + tensor.double().numpy().tobytes())
    return content.hexdigest()
