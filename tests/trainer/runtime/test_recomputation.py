"""Whole steps of plans that say what their stages run again: as exact as without, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.layout import Operation, num_remade_units
from penstock.core.model import Family, UnitKind
from penstock.core.plan import Plan
from penstock.core.remaking import SELECTIVE, Remake, full_remakes, uniform_remakes
from penstock.core.schedule import CSV, Action, Kind, ScheduleSpec
from penstock.planner.compile import program_of, schedule_of
from penstock.planner.evaluate import Simulated
from penstock.planner.replay import candidate_of, problem_of
from penstock.planner.shared_memory import scratch_table
from penstock.trainer.runtime import Batch, Runtime
from tests.support.pipeline_ranks import GradientKeeper, expected, sample
from tests.support.planning import cluster
from tests.support.remaking import randomly_recomputed
from tests.support.sharded_pipeline import joined_gradients
from tests.support.small_plans import looped_schedule, small_plan
from tests.support.stage_pipeline import gradient_error
from tests.support.strategies import in_parts
from tests.support.threaded_run import ThreadedRun

SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2, "interleaved-1f1b": 2, "looped": 2}
"""Stages per rank."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Small ones of every kind."""
    schedule, pp = draw(st.sampled_from([*SCHEDULES])), draw(st.integers(1, 3))
    pp = max(pp, 2) if schedule == "interleaved-1f1b" else pp
    num_stages, num_microbatches = pp * SCHEDULES[schedule], draw(st.integers(1, 3))
    slices = draw(st.sampled_from([(6,), (3, 1, 2), (1, 5)]))
    recipe: str | ScheduleSpec = schedule
    if schedule == "looped":
        recipe = looped_schedule(
            num_ranks=pp, num_stages=num_stages, num_microbatches=num_microbatches, num_slices=len(slices)
        )
    has_remainder = num_microbatches > 1 and draw(st.booleans())
    plan = small_plan(
        family=draw(st.sampled_from(Family)),
        schedule=recipe,
        pp=pp,
        num_stages=num_stages,
        slices=slices,
        num_microbatches=num_microbatches,
        layers=draw(st.integers(2, 4)),
        head_parts=draw(st.integers(1, 3)),
        remainder=int(has_remainder),
        remainder_slices=((4, 2) if len(slices) > 1 else (6,)) if has_remainder else (),
    )
    bounds = sorted(
        draw(st.sets(st.integers(1, plan.model.num_units - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    )
    stages = tuple(pairwise([0, *bounds, plan.model.num_units]))
    tp = draw(st.sampled_from([1, 1, 2]))
    return replace(plan, stages=stages, tp=tp, sequence_parallel=tp == 1 or draw(st.booleans()))


def trained(plan: Plan) -> tuple[list[float], list[dict[int, dict[str, Tensor]]]]:
    """Every rank's loss of a step and of an evaluation, and its gradients by stage and name."""
    run = ThreadedRun(plan)
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    batch = Batch(token_ids=ids, labels=labels, num_valid_tokens=int((labels >= 0).sum()))

    def step(_: int, runtime: Runtime) -> list[float]:
        return [runtime.train_step(0, batch).loss_sum, runtime.evaluate(0, ids, labels)]

    losses = [loss for rank in run.on_every_rank(step) for loss in rank]
    kept = [
        {stage: keeper.kept for stage, keeper in own.items() if isinstance(keeper, GradientKeeper)}
        for own in run.optimizers
    ]
    return losses, kept


def check(plan: Plan, without: Plan) -> None:
    """Exact, and to the last bit what ``without`` gives, a plan that recomputes nothing."""
    losses, kept = trained(plan)
    wanted = expected(plan.model, plan.global_batch, plan.sequence_length)
    assert losses == pytest.approx([wanted.loss] * len(losses), rel=1e-12)
    assert gradient_error(joined_gradients(plan, kept), wanted.gradients) < 1e-10
    same_losses, same_kept = trained(without)
    assert losses == same_losses
    for own, other in zip(kept, same_kept, strict=True):
        for stage, gradients in own.items():
            assert all(torch.equal(gradient, other[stage][name]) for name, gradient in gradients.items())


@settings(max_examples=30)
@given(plans(), st.integers(0, 2**30))
def test_any_operations_of_any_units(plan: Plan, seed: int) -> None:
    check(randomly_recomputed(plan, seed), plan)


@settings(max_examples=20)
@given(plans(), st.integers(0, 2**30), st.sampled_from([0.5, 1.0]))
def test_imported_schedules_that_recompute_some_slices_in_parts_or_whole(plan: Plan, seed: int, share: float) -> None:
    """Slices without an R are recomputed inside their backwards."""
    plan = replace(plan, remainder=0, remainder_slices=())
    rng = random.Random(seed)
    schedule = schedule_of(plan)
    rows = [tuple(_with_some(rng, row, share)) for row in schedule.ranks]
    units = [num_remade_units(plan.model, *stage) for stage in plan.stages]
    recomputed = in_parts(replace(schedule, ranks=tuple(rows)), units, seed)
    with_r = randomly_recomputed(_imported(plan, recomputed.to_csv()), seed)
    check(_where_there_is_an_r(with_r), _imported(plan, schedule.to_csv()))


@settings(max_examples=20)
@given(plans(), st.integers(0, 2**30), st.sampled_from([0.0, 0.5, 1.0]))
def test_shared_memory_has_the_bytes_that_the_planner_counts(plan: Plan, seed: int, share: float) -> None:
    """Of what forwards give up and of what backwards without an R recompute, in schedules with R for some slices."""
    plan = replace(plan, remainder=0, remainder_slices=())
    schedule, rng = schedule_of(plan), random.Random(seed)
    rows = [tuple(_with_some(rng, row, share)) for row in schedule.ranks]
    plan = randomly_recomputed(_imported(plan, replace(schedule, ranks=tuple(rows)).to_csv()), seed)
    run = ThreadedRun(plan)
    judge, candidate = Simulated(problem_of(plan, cluster(num_nodes=1, devices_per_node=8))), candidate_of(plan)
    table = scratch_table(judge.problem_of(candidate), candidate, judge.order(candidate))
    for rank, runtime in enumerate(run.runtimes):
        own = [stage for stage, owner in enumerate(schedule.stage_ranks) if owner == run.mesh.pipeline_rank(rank)]
        assert vars(runtime._executor)["_scratch"].numel() == max(table[own])


def _with_some(rng: random.Random, row: Sequence[Action], share: float) -> Sequence[Action]:
    """The actions with an R before some of the backwards."""
    found: list[Action] = []
    for action in row:
        if action.kind in (Kind.B, Kind.I) and rng.random() < share:
            found.append(replace(action, kind=Kind.R))
        found.append(action)
    return found


def _imported(plan: Plan, text: str) -> Plan:
    return replace(plan, schedule=ScheduleSpec(generator=CSV, text=text))


def _where_there_is_an_r(plan: Plan) -> Plan:
    """The plan without remakes of stages that its schedule has no R of, which would get one."""
    own = schedule_of(replace(plan, recompute=())).recomputed_stages
    return replace(plan, recompute=tuple(each if i in own else () for i, each in enumerate(plan.recompute)))


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("is_full", [False, True])
def test_the_arena_shrinks_by_what_is_given_up(family: Family, is_full: bool) -> None:
    """All forwards come first, so the first rank keeps every slice's activations at once."""
    plan = small_plan(family=family, schedule="gpipe", pp=2, num_microbatches=4, layers=4, slices=(8, 8))
    operations = tuple(Operation) if is_full else SELECTIVE
    recomputed = replace(plan, recompute=tuple(uniform_remakes(plan.model, stage, operations) for stage in plan.stages))
    before, after = (program_of(each).ranks[0].arena_bytes for each in (plan, recomputed))
    assert after < before * (0.5 if is_full else 0.95)


def test_a_text_is_continued_by_stages_that_give_up_some_activations() -> None:
    plan = small_plan(pp=2, schedule="zbv", num_microbatches=2, head_parts=2)
    texts = []
    for each in (plan, *(randomly_recomputed(plan, seed) for seed in range(3))):
        run = ThreadedRun(each)
        texts.append(run.on_every_rank(lambda _, runtime: runtime.continue_from(0, [3, 1], 9, _likeliest)))
    assert len(texts[0][0]) == 9
    assert all(text == texts[0] for text in texts)


def _likeliest(logits: Tensor) -> int:
    return int(logits.argmax())


def test_a_stage_that_runs_only_what_it_does_not_have_again_is_as_it_was() -> None:
    """The second part of a head has no norm: its R does nothing."""
    plan = small_plan(pp=2, head_parts=2, layers=2)
    stages = ((0, 6), (6, 7))
    plan = replace(plan, stages=stages)
    remakes = (Remake(unit=UnitKind.HEAD, count=1, operations=(Operation.NORM,)),)
    assert set(remakes[0].operations) < set(full_remakes(plan.model, stages[1])[0].operations)
    check(replace(plan, recompute=((), remakes)), plan)
