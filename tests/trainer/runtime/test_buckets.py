"""Buckets on one rank: gradients that a replica hands over when a bucket starts are complete, bit for bit, and a
forward in parts is that of the whole stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.buckets import completed_by_units
from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Channel, Program
from penstock.core.remaking import full_remakes
from penstock.core.schedule import Group, Part
from penstock.core.sharding import Sharding
from penstock.planner.compile import lowered
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import NO_SHARDS, Shards, Work
from tests.support.pipeline_ranks import RankResult, train
from tests.support.small_plans import small_model, small_plan
from tests.support.worker_pool import CPU

FINEST = 10**6


@dataclasses.dataclass
class _Sum:
    """A sum with another replica that has the same gradients as this one had at the start."""

    tensor: Tensor
    at_start: Tensor

    def wait(self) -> None:
        self.tensor.copy_(2 * self.at_start)


class _Done:
    def wait(self) -> None:
        pass


class TwinTransport:
    """The transport of a replica whose twin computes the same; counts what is summed."""

    shards: Shards = NO_SHARDS

    def __init__(self) -> None:
        self.summed: list[int] = []

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        if group is not Group.DP:
            return _Done()
        self.summed.append(tensor.numel())
        return _Sum(tensor, tensor.clone())

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        raise AssertionError("a pipeline of one rank has no messages")

    send = post_recv

    def reduce_scatter(self, tensor: Tensor) -> Work:
        return self.all_reduce(Group.DP, tensor)

    def sum_narrow(self, tensor: Tensor, *, scattered: bool) -> Work:
        raise AssertionError("gradients are exchanged in fp32")

    def all_gather(self, tensor: Tensor) -> Work:
        return _Done()

    def sum_copies(self, tensor: Tensor) -> Work:
        raise AssertionError("a rank of one shard has no copies")

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        raise AssertionError("one rank has both copies")


def in_buckets(plan: Plan, monkeypatch: pytest.MonkeyPatch, buckets: Sequence[tuple[Part, ...]]) -> Program:
    """The plan's Program with these buckets."""
    monkeypatch.setattr("penstock.planner.compile.stage_buckets", lambda *arguments: buckets)
    return lowered(plan)


def trained(plan: Plan, program: Program) -> tuple[RankResult, TwinTransport]:
    transport = TwinTransport()
    return train(plan, program, 0, transport), transport


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("head_parts", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_sums_of_buckets_are_those_of_whole_stages(
    family: Family, schedule: str, head_parts: int, recompute: bool, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that starts before its gradients are complete, or has others, would leave half of them. With zero 1 the
    first forward is in parts, too, and the norm counts only what this replica steps.
    """
    plan = small_plan(
        family=family,
        schedule=schedule,
        pp=1,
        dp=2,
        slices=(5, 7),
        num_microbatches=2,
        head_parts=head_parts,
        zero=zero,
    )
    if recompute:
        plan = dataclasses.replace(plan, recompute=(full_remakes(plan.model, plan.stages[0]),))
    last = plan.model.num_units
    body = plan.model.first_head_unit
    finest = tuple(Part(unit, unit + 1) for unit in reversed(range(body)))
    cuts = {
        "none": (),
        "each unit": (Part(body, last), *finest),
        "two": (Part(3, last), Part(0, 3)),
        "three": (Part(body - 1, last), Part(2, body - 1), Part(0, 2)),
    }
    results = {name: trained(plan, in_buckets(plan, monkeypatch, (buckets,))) for name, buckets in cuts.items()}
    whole, transport = results.pop("none")
    assert len(transport.summed) == 1
    for name, (result, other) in results.items():
        assert (result.loss, result.evaluated_loss) == (whole.loss, whole.evaluated_loss)
        assert zero or result.gradient_norm == whole.gradient_norm
        assert zero or sum(other.summed) == sum(transport.summed)
        assert len(cuts[name]) <= len(other.summed) <= 2 * len(cuts[name])
        for stage, gradients in whole.gradients.items():
            for parameter, gradient in gradients.items():
                own = result.gradients[stage][parameter]
                is_summed = ~(np.isnan(own) | np.isnan(gradient))
                assert zero or is_summed.all()
                assert np.array_equal(own[is_summed], gradient[is_summed]), (name, parameter)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("sharding", [Sharding(1, True), Sharding(2, True), Sharding(2, False)])
def test_buckets_of_parameters_are_all_gradients_once(family: Family, sharding: Sharding) -> None:
    model = small_model(family)
    own = StageParameters(
        model, 0, model.num_units, sharding=sharding, shard=0, precision=Precision.FP64, device=CPU, seed=0
    )
    for cut in itertools.combinations(range(1, model.num_units), 2):
        parts = [Part(*bounds) for bounds in itertools.pairwise((0, *cut, model.num_units))]
        for part in parts:
            for stretch in own.bucket(part):
                stretch.add_(1 + part.first)
        names = completed_by_units(model, 0, model.num_units)
        for part in parts:
            for name in itertools.chain.from_iterable(names[part.first : part.stop]):
                assert set(own.gradients[name].flatten().tolist()) == {1.0 + part.first}
        for views in (own.shared_gradients, own.copied_gradients):
            of_parts = [view.data_ptr() for part in parts for view in views(part)]
            assert sorted(of_parts) == sorted(view.data_ptr() for view in views())
        own.gradient_flat.zero_()
    assert own.bucket(None)[0].data_ptr() == own.gradient_flat.data_ptr()
    assert torch.equal(own.bucket(None)[0], own.gradient_flat)
