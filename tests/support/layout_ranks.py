"""What ranks of a `tests.support.worker_pool` do to train some steps of a job that may go on in another layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.core.job import OptimizerSpec, TrainingSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint_shards import held_shard, rank_tensors
from penstock.trainer.comm import ProcessGroupTransport, everyone
from penstock.trainer.optimizer import AdamW
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from tests.support.pipeline_ranks import SEED
from tests.support.worker_pool import CPU, PoolRank

STEPS = 50


def training_of(plan: Plan) -> TrainingSpec:
    """How the plan is trained."""
    optimizer = OptimizerSpec(learning_rate=1e-2, moment_type=plan.moment_type)
    return TrainingSpec(steps=STEPS, global_batch=4, clip=0.5, optimizer=optimizer)


def batch_of(plan: Plan, step: int, *, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Token ids and labels [N, S] of all replicas: patterns with noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    shape, vocab = (plan.global_batch, plan.sequence_length + 1), plan.model.vocab
    first = torch.randint(0, vocab, (shape[0], 1), generator=generator)
    noise = torch.randint(0, 3, shape, generator=generator)
    ids = (first + 7 * torch.arange(shape[1]) + noise) % vocab
    ids = ids.flip(0) if is_reversed else ids
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train_some(
    me: PoolRank, plan: Plan, program: Program, root: Path, steps: range, is_reversed: bool = False
) -> list[float]:
    """The losses of these steps, from the newest checkpoint below ``root`` on if there is one; then save another."""
    mesh = plan.mesh
    own = program.ranks[mesh.pipeline_rank(me.rank)]
    stages = build_stages(plan, own, shard=mesh.shard(me.rank), replica=mesh.replica(me.rank), device=CPU, seed=SEED)
    optimizers = {number: AdamW(stage.parameters, training_of(plan)) for number, stage in stages.items()}
    transport = ProcessGroupTransport(me.groups, program, mesh, me.rank)
    runtime = Runtime(
        plan, program, me.rank, stages=stages, optimizers=optimizers, transport=transport, device=CPU, poison=True
    )
    parameters = {number: stage.parameters for number, stage in stages.items()}
    tensors = rank_tensors(parameters, {number: optimizer.moments for number, optimizer in optimizers.items()})
    shard, group = held_shard(parameters, plan.tp, mesh.shard(me.rank)), me.groups[everyone(mesh)]
    if steps.start:
        (newest, *_) = checkpoint.find_checkpoints(root)
        checkpoint.load(newest.folder, tensors, plan.model, shard=shard, group=group)
        for optimizer in optimizers.values():
            optimizer.num_steps = steps.start
        runtime.take_over_weights()
    losses = [_loss(runtime, plan, mesh.replica(me.rank), step, is_reversed) for step in steps]
    checkpoint.save(root, 1, steps.stop, tensors, plan.model, plan.precision, keep=1, shard=shard, group=group)
    return losses


def _loss(runtime: Runtime, plan: Plan, replica: int, step: int, is_reversed: bool) -> float:
    ids, labels = batch_of(plan, step, is_reversed=is_reversed)
    share = plan.num_sequences
    rows = slice(replica * share, (replica + 1) * share)
    totals = runtime.train_step(step, Batch(token_ids=ids[rows], labels=labels[rows], num_valid_tokens=labels.numel()))
    return totals.loss_sum / labels.numel()
