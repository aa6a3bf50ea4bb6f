"""What recomputation is predicted to take: shares of a pass, and what R of a stage leaves out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.core.layout import Operation, remaking
from penstock.core.model import Family, ModelSpec, UnitKind, attention_flops, linear_flops_per_token
from penstock.core.schedule import Kind
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.order import FORWARD, RECOMPUTE
from penstock.planner.problem import Mesh
from penstock.planner.remake import operation_flops, remake_seconds, remake_until_ns
from penstock.planner.stagecost import stage_costs
from penstock.planner.work import Work
from tests.support.planning import cluster, problem
from tests.support.small_plans import looped_schedule

LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=64, heads=4, kv_heads=2, vocab=128)
GPT2 = ModelSpec(family=Family.GPT2, layers=4, hidden=64, heads=4, vocab=128)
SLICES = (96, 32)
WORK = Work.of(2, SLICES, (0, 96))
DESCRIBED = problem(cluster(num_nodes=1, devices_per_node=2), ranks=2)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
@pytest.mark.parametrize("kind", [UnitKind.ATTENTION, UnitKind.MLP])
def test_operations_add_up_to_the_pass(spec: ModelSpec, kind: UnitKind) -> None:
    total = sum(operation_flops(spec, kind, operation, WORK) for operation in remaking(spec, kind))
    expected = linear_flops_per_token(spec, kind) * WORK.tokens
    if kind is UnitKind.ATTENTION:
        expected = expected + attention_flops(spec, 1) * WORK.pairs
    np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", UnitKind)
def test_all_operations_take_the_pass_and_fewer_take_less(kind: UnitKind) -> None:
    cost, spec = DESCRIBED.cost_of(1), DESCRIBED.model
    whole = remake_seconds(cost, spec, kind, WORK, remaking(spec, kind))
    less = remake_seconds(cost, spec, kind, WORK, remaking(spec, kind, with_output=False))
    if kind is UnitKind.HEAD:
        assert not whole.any()
        return
    np.testing.assert_array_equal(whole, cost.unit_seconds(kind, Kind.F, WORK))
    assert (less < whole).all()


def test_a_stage_is_its_units_and_the_last_output_is_left_out() -> None:
    """Embedding, attention, MLP: the MLP's output goes to the next stage, which holds it."""
    cost, spec = DESCRIBED.cost_of(1), DESCRIBED.model
    until = remake_until_ns(cost, spec, (0, 3), SLICES, 2)
    kinds = (UnitKind.EMBEDDING, UnitKind.ATTENTION)
    before = sum(cost.unit_seconds(kind, Kind.F, WORK) for kind in kinds)
    last = remake_seconds(cost, spec, UnitKind.MLP, WORK, (Operation.NORM, Operation.PROJECT, Operation.ACTIVATE))
    np.testing.assert_allclose(until[2], 1e9 * before, atol=1)
    np.testing.assert_allclose(until[3], 1e9 * (before + last), atol=1)
    assert not until[0].any()


def test_recomputation_leaves_out_the_head() -> None:
    """Its F does its whole backward and keeps nothing."""
    num_units = DESCRIBED.model.num_units
    candidate = Candidate(
        mesh=Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=2),
        stages=((0, 3), (3, num_units)),
        slices=(DESCRIBED.sequence_length // 2,) * 2,
        schedule=looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2, recompute=True),
    )
    judge = Simulated(DESCRIBED)
    table = judge.costs(candidate, (0, 1)).compute_ns
    assert (table[RECOMPUTE] < table[FORWARD]).all()
    units = DESCRIBED.units(1, 1, candidate.slices)
    without_head = stage_costs(units, DESCRIBED.model, ((0, 3), (3, num_units - 1))).alone_ns[0]
    assert (table[RECOMPUTE][1] < without_head[1]).all()
    whole = judge.evaluate(candidate).step_ns
    forward = looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2)
    assert judge.evaluate(dataclasses.replace(candidate, schedule=forward)).step_ns < whole
