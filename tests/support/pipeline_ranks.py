"""What ranks of a `tests.support.worker_pool` do with a plan, and what is expected of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.trainer.comm import ProcessGroupTransport, Transport
from penstock.trainer.parameters import StageParameters
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from tests.support.reference_model import reference_gradients
from tests.support.worker_pool import CPU, PoolRank

SEED = 0


class GradientKeeper:
    """An optimizer that changes nothing: it keeps the gradients of the step and clears them. Those that another replica
    has the sums of are not a number.
    """

    def __init__(self, parameters: StageParameters) -> None:
        self._parameters = parameters
        self.kept: dict[str, Tensor] = {}

    def step(self, step: int, squared_norm: Tensor) -> None:
        parameters = self._parameters
        kept = torch.full_like(parameters.gradient_flat, torch.nan)
        for own, gradients in zip(parameters.own, parameters.own_gradients, strict=True):
            kept[own] = gradients
        self.kept = parameters.by_name(kept)
        parameters.gradient_flat.zero_()


@dataclass(frozen=True)
class RankResult:
    """One rank's view of a step: gradients by stage and global name as they were when the optimizer stepped."""

    loss: float
    evaluated_loss: float
    gradient_norm: float
    gradients: dict[int, dict[str, npt.NDArray[np.float64]]]


def sample(vocab: int, num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [N, S]; a few labels are missing."""
    generator = torch.Generator().manual_seed(num_sequences * 1000 + length)
    ids = torch.randint(0, vocab, (num_sequences, length), generator=generator)
    labels = torch.randint(0, vocab, (num_sequences, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -1
    return ids, labels


def train_rank(me: PoolRank, plan: Plan, program: Program) -> RankResult:
    """One training step and one evaluation in the pool."""
    mesh = plan.mesh
    return train(plan, program, me.rank, ProcessGroupTransport(me.groups, program, mesh, me.rank))


def train(plan: Plan, program: Program, rank: int, transport: Transport) -> RankResult:
    """One training step and one evaluation of the same sequences; slots are poisoned when freed."""
    mesh = plan.mesh
    of_rank, shard = program.ranks[mesh.pipeline_rank(rank)], mesh.shard(rank)
    stages = build_stages(plan, of_rank, shard=shard, replica=mesh.replica(rank), device=CPU, seed=SEED)
    keepers = {number: GradientKeeper(stage.parameters) for number, stage in stages.items()}
    runtime = Runtime(
        plan, program, rank, stages=stages, optimizers=keepers, transport=transport, device=CPU, poison=True
    )
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    num_valid = int((labels >= 0).sum())
    share = plan.global_batch // plan.dp
    own = slice(mesh.replica(rank) * share, (mesh.replica(rank) + 1) * share)
    totals = runtime.train_step(0, Batch(token_ids=ids[own], labels=labels[own], num_valid_tokens=num_valid))
    return RankResult(
        loss=totals.loss_sum,
        evaluated_loss=runtime.evaluate(0, ids[own], labels[own]),
        gradient_norm=totals.gradient_norm,
        gradients={
            number: {name: gradient.double().numpy() for name, gradient in keeper.kept.items()}
            for number, keeper in keepers.items()
        },
    )


def put_together(plan: Plan, results: Sequence[RankResult]) -> list[RankResult]:
    """The results with what replicas divide put together, so that every replica has all sums."""
    num_ranks = plan.pp * plan.tp
    whole = []
    for rank, result in enumerate(results):
        peers = results[rank % num_ranks :: num_ranks]
        gradients = {
            stage: {name: _put_together([peer.gradients[stage][name] for peer in peers]) for name in named}
            for stage, named in result.gradients.items()
        }
        whole.append(replace(result, gradients=gradients))
    return whole


def _put_together(parts: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Each element from the one replica that has it."""
    assert (np.sum([~np.isnan(part) for part in parts], axis=0) == 1).all()
    total: npt.NDArray[np.float64] = np.nansum(parts, axis=0)
    return total


@dataclass(frozen=True)
class Expected:
    """What the unsliced one-process model in fp64 says of a step."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        """Of all gradients."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


@functools.cache
def expected(model: ModelSpec, num_sequences: int, length: int) -> Expected:
    """The yardstick, computed once."""
    parameters = StageParameters(model, 0, model.num_units, precision=Precision.FP64, device=CPU, seed=SEED)
    ids, labels = sample(model.vocab, num_sequences, length)
    loss, gradients = reference_gradients(model, parameters.master, ids, labels, 1 / int((labels >= 0).sum()))
    return Expected(float(loss), gradients)
