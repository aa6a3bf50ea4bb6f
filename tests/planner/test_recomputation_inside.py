"""Plans that recompute inside of their backwards: what they may recompute, and that they are chosen only if better."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.layout import Operation
from penstock.core.model import ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.remaking import OF_LAYERS, Remake, remade_of
from penstock.core.scratch import segments
from penstock.planner import decide as deciding
from penstock.planner.budget import Budget
from penstock.planner.candidate import Candidate
from penstock.planner.compile import program_of
from penstock.planner.decide import Decision, best_plans, decide
from penstock.planner.evaluate import Simulated
from penstock.planner.judge import NothingFitsError
from penstock.planner.problem import Mesh, Problem
from penstock.planner.recompute import fully_recomputed
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, problem

LINK = (UnitKind.MLP, Operation.OUTPUT)
DEEP = dataclasses.replace(TINY_LLAMA, layers=8)


def operations(candidate: Candidate) -> set[tuple[UnitKind, Operation]]:
    """What its stages recompute."""
    named = itertools.chain.from_iterable(candidate.recompute)
    return {(remake.unit, operation) for remake in named for operation in remake.operations}


@given(st.sampled_from([TINY_LLAMA, TINY_GPT2, DEEP]), st.data())
def test_with_everything_recomputed_inside_no_segment_is_longer_than_a_layer(
    model: ModelSpec, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, model.num_units - 1))
    stages = ((0, cut), (cut, model.num_units))
    mesh = Mesh.of_share(dp=1, tp=1, pp=2, microbatch=1, share=2)
    shape = Candidate(mesh=mesh, stages=stages, slices=(16,), schedule="1f1b", recompute_inside=True)
    full = fully_recomputed(problem(model=model), shape)
    assert LINK not in operations(full)
    for stage, remakes in zip(stages, full.recompute, strict=True):
        if remakes:
            assert max(map(len, segments(model, *stage, remade_of(model, stage, remakes)))) <= 2
    apart = fully_recomputed(problem(model=model), dataclasses.replace(shape, recompute_inside=False))
    assert operations(apart) - operations(full) <= {LINK}


def policies(asked: Problem, shape: Candidate) -> Iterator[Candidate]:
    """The candidate of one stage with every number of units for each operation but the link."""
    own = sorted(operations(fully_recomputed(asked, shape)))
    layers = asked.model.layers
    for counts in itertools.product(range(layers + 1), repeat=len(own)):
        remakes = []
        for kind in OF_LAYERS:
            of_kind = {operation: n for (unit, operation), n in zip(own, counts, strict=True) if unit is kind and n}
            before = 0
            for count in sorted(set(of_kind.values())):
                chosen = tuple(operation for operation in Operation if of_kind.get(operation, 0) >= count)
                remakes.append(Remake(unit=kind, count=count - before, operations=chosen))
                before = count
        yield dataclasses.replace(shape, recompute=(tuple(remakes),) if remakes else ())


def test_the_policy_is_close_to_the_best_of_all() -> None:
    """On one rank, whose slices recompute one layer at a time, against every policy of its two layers."""
    model = dataclasses.replace(TINY_LLAMA, layers=2, hidden=64)
    fields: dict[str, Any] = {"model": model, "sequence_length": 512, "global_batch": 4, "ranks": 1}
    roomy = problem(cluster(num_nodes=1, devices_per_node=1), **fields)
    mesh = Mesh.of_share(dp=1, tp=1, pp=1, microbatch=1, share=4)
    stages = ((0, model.num_units),)
    shape = Candidate(mesh=mesh, stages=stages, slices=(128,) * 4, schedule="1f1b", recompute_inside=True)
    judge = Simulated(roomy)
    known = {each: judge.evaluate(each) for each in policies(roomy, shape)}
    peaks = {each: max(evaluation.peak_bytes) for each, evaluation in known.items()}
    least, most = min(peaks.values()), peaks[shape]
    for part in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0):
        limit = round(least + part * (most - least))
        leaner = judge.limited(limit).proposer.memory_fit.leaner(shape)
        assert leaner is not None
        assert peaks[leaner] <= limit
        best_ns = min(evaluation.step_ns for each, evaluation in known.items() if peaks[each] <= limit)
        assert known[leaner].step_ns <= 1.03 * best_ns


QUICK = Budget(candidates=8, neighbours=0, moves=4)
ROOMY = 2**30


def asked_for(memory: int, **pins: Any) -> Problem:
    """Two ranks with long sequences, whose activations are most of the memory."""
    fields = {"model": DEEP, "sequence_length": 512, "global_batch": 4, "ranks": 2, "memory": memory}
    return problem(cluster(num_nodes=1, devices_per_node=2), dp=1, tp=1, pp=2, **fields, **pins)


def decided(asked: Problem) -> Decision | None:
    """The decision; None if nothing fits."""
    try:
        return decide(asked, QUICK)
    except UserError:
        return None


def apart(asked: Problem) -> Plan | None:
    """The best plan with recomputation by R alone; None if nothing fits."""
    try:
        return deciding._separate(Simulated(asked), QUICK, None).plan
    except NothingFitsError:
        return None


def seconds(plan: Plan | None) -> float:
    """The predicted step; infinite without a plan."""
    if plan is None:
        return math.inf
    assert plan.prediction is not None
    return plan.prediction.step_seconds


@pytest.mark.parametrize("pins", [{"schedule": "1f1b", "slices": 1}, {"schedule": "zb", "slices": 4}])
def test_a_plan_is_never_slower_than_with_r_alone_and_steps_fall_with_memory(pins: dict[str, Any]) -> None:
    roomy = decide(asked_for(ROOMY, **pins), QUICK).plan
    assert roomy.prediction is not None
    assert not roomy.recompute
    most, steps, forms = max(roomy.prediction.peak_bytes), [], set()
    for percent in (35, 50, 65, 80, 100):
        asked = asked_for(most * percent // 100, **pins)
        decision = decided(asked)
        plan = None if decision is None else decision.plan
        steps.append(seconds(plan))
        assert steps[-1] <= seconds(apart(asked))
        if decision is not None and plan is not None:
            first, *others = best_plans(asked, decision, 2)
            assert first == plan
            assert not any(other.recompute_inside for other in others)
            assert decision.separate is None or plan.recompute_inside
            assert plan.prediction is not None
            assert max(plan.prediction.peak_bytes) <= asked.memory_limit_bytes
            assert Plan.from_manifest(plan.to_manifest()) == plan
            assert program_of(plan).digest == plan.program_digest
            assert not plan.recompute_inside or any(plan.recompute)
            forms.add(plan.recompute_inside)
    assert all(more <= 1.03 * less for less, more in itertools.pairwise(steps))
    assert steps[-1] == seconds(roomy)
    assert forms == {False, True}
