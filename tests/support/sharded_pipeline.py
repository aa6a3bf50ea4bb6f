"""A `tests.support.stage_pipeline.HandPipeline` for every shard, as threads, and their tensors joined to whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from torch import Tensor

from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Remakes
from penstock.core.schedule import Kind
from penstock.core.sharding import Sharding
from penstock.planner.compile import program_of
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stages import stage_numbers
from tests.support.pipeline_ranks import SEED, GradientKeeper, RankResult, expected
from tests.support.stage_pipeline import HandPipeline, evaluate, fill_rows, gradient_error, joined_over_stages
from tests.support.thread_shards import ThreadShards
from tests.support.threaded_run import ThreadedRun
from tests.support.worker_pool import CPU


@dataclass
class ShardedPipeline:
    """Stages with unit boundaries ``cuts``, each split over the shards of ``sharding``."""

    spec: ModelSpec
    sharding: Sharding
    cuts: Sequence[int]
    bounds: Sequence[int]
    batch: int = 1
    precision: Precision = Precision.FP64
    recompute: bool | Sequence[Remakes] = False
    inside: Literal[Kind.B, Kind.I] | None = None
    shards: list[HandPipeline] = field(init=False)

    def __post_init__(self) -> None:
        self.rank = ThreadShards(self.sharding.tp)
        self.shards = [
            HandPipeline(
                self.spec,
                self.cuts,
                self.bounds,
                batch=self.batch,
                precision=self.precision,
                recompute=self.recompute,
                inside=self.inside,
                sharding=self.sharding,
                shard=member.index,
                shards=member,
            )
            for member in self.rank.members
        ]

    def step(self, ids: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Forward and backward on all shards; the sum of their losses."""
        return torch.stack(self.rank.run(lambda member: self.shards[member.index].step(ids, labels, scale))).sum()

    def evaluate(self, ids: Tensor, labels: Tensor | None) -> list[list[Tensor | None]]:
        """What the last stage of every shard returns, per slice."""
        return self.rank.run(lambda member: evaluate(self.shards[member.index], ids, labels))

    @property
    def weights(self) -> dict[str, Tensor]:
        """All master weights by global name."""
        stages = [self.stage(index) for index in range(len(self.cuts) - 1)]
        found: dict[str, Tensor] = {}
        for stage in stages:
            for name, tensor in joined(stage, [shard.master for shard in stage]).items():
                fill_rows(stage[0].declared[name], found, tensor)
        return found

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of all shards, from whole tensors."""
        for pipeline in self.shards:
            for stage in pipeline.stages:
                stage.parameters.load(weights)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """All gradients by global name, summed over shards where they are addends; the copies of a tied matrix summed.

        To be read once after a step, since what is summed is summed in place.
        """
        stages = [self.stage(index) for index in range(len(self.cuts) - 1)]
        for stage in stages:
            sum_over_shards(self.spec, stage)
        return joined_over_stages((s[0].declared, joined(s, [shard.gradients for shard in s])) for s in stages)

    def stage(self, index: int) -> list[StageParameters]:
        """The parameters of one stage on every shard."""
        return [pipeline.stages[index].parameters for pipeline in self.shards]


def sum_over_shards(spec: ModelSpec, stage: Sequence[StageParameters]) -> None:
    """What a step's end does: sum the gradients of which shards have addends."""
    copies = spec.kv_copies(len(stage))
    _sum_alike([shard.shared_gradients() for shard in stage])
    for first in range(0, len(stage), copies):
        _sum_alike([shard.copied_gradients() for shard in stage[first : first + copies]])


def _sum_alike(addends: Sequence[Sequence[Tensor]]) -> None:
    for views in zip(*addends, strict=True):
        total = torch.stack(views).sum(0)
        for view in views:
            view.copy_(total)


def joined(stage: Sequence[StageParameters], tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A stage's tensors from those of all its shards, by name, of a divided head the stage's rows; copies must be equal
    in every bit.
    """
    wholes = {}
    for name, parameter in stage[0].declared.items():
        shape = [*parameter.shape]
        shape[parameter.axis] = sum(piece.size for piece in parameter.pieces(1, 0))
        whole = tensors[0][name].new_full(shape, torch.nan)
        for shard, held in enumerate(tensors):
            pieces = parameter.pieces(len(stage), shard)
            parts = torch.split(held[name], [piece.size for piece in pieces], dim=parameter.axis)
            for piece, part in zip(pieces, parts, strict=True):
                place = whole.narrow(parameter.axis, piece.start - parameter.start, piece.size)
                assert place.isnan().all() if piece.is_owner else torch.equal(place, part), f"{name}, shard {shard}"
                place.copy_(part)
        assert not whole.isnan().any(), f"nobody holds all of {name}"
        wholes[name] = whole
    return wholes


def joined_gradients(plan: Plan, kept: Sequence[dict[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Whole gradients of the first replica from those of every global rank, by stage and name; shards that hold the
    same agree in every bit.
    """
    mesh, program, model = plan.mesh, program_of(plan), plan.model
    found: dict[str, Tensor] = {}
    for own in program.ranks:
        ranks = mesh.shards(0, own.rank)
        for stage in stage_numbers(own):
            parameters = [
                StageParameters(
                    model,
                    *plan.stages[stage],
                    sharding=plan.sharding,
                    shard=mesh.shard(rank),
                    precision=Precision.FP64,
                    device=CPU,
                    seed=SEED,
                )
                for rank in ranks
            ]
            for name, tensor in joined(parameters, [kept[rank][stage] for rank in ranks]).items():
                fill_rows(parameters[0].declared[name], found, tensor)
    return found


def check_sharded(plan: Plan, results: Sequence[RankResult]) -> None:
    """Every rank has the whole model's loss and norm, and the joined gradients are its."""
    wanted = expected(plan.model, plan.global_batch, plan.sequence_length)
    for result in results:
        assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.evaluated_loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.gradient_norm == pytest.approx(wanted.norm, rel=1e-10)
    kept = [
        {stage: {name: torch.from_numpy(array) for name, array in of.items()} for stage, of in result.gradients.items()}
        for result in results
    ]
    assert gradient_error(joined_gradients(plan, kept), wanted.gradients) < 1e-10


def check_threads(plan: Plan) -> None:
    """The same of a step over the in-process transport."""
    run = ThreadedRun(plan)
    wanted = expected(plan.model, plan.global_batch, plan.sequence_length)
    assert run.train_step() == pytest.approx([wanted.loss] * plan.num_ranks, rel=1e-12)
    kept = [
        {stage: keeper.kept for stage, keeper in own.items() if isinstance(keeper, GradientKeeper)}
        for own in run.optimizers
    ]
    assert gradient_error(joined_gradients(plan, kept), wanted.gradients) < 1e-10
