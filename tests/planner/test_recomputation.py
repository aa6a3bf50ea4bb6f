"""Orders in which stages recompute, and the bytes and seconds of plans with them: against the Program of each plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.invariants import prove
from penstock.core.job import ParallelismSpec
from penstock.core.layout import Operation
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute, full_remakes, uniform_remakes
from penstock.core.schedule import Action, Kind, Schedule, ScheduleSpec, flatten
from penstock.planner.budget import Budget
from penstock.planner.candidate import Candidate
from penstock.planner.compile import lowered, program_of
from penstock.planner.decide import decide, draft_plan
from penstock.planner.evaluate import Simulated, owners_of
from penstock.planner.order import Order, actions_of, from_schedule, to_schedule
from penstock.planner.passes.rounds import cell_of
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem
from penstock.planner.recompute import pinned_remakes
from penstock.planner.remainder import remainder_slices
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.schedules.registry import BUILT_IN, find
from penstock.planner.simulate.simulation import simulate
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, problem
from tests.support.reference_simulator import ReferenceSimulator
from tests.support.remaking import random_remakes
from tests.support.small_plans import looped_schedule
from tests.support.strategies import schedules

QUICK = Budget(candidates=6, neighbours=0, moves=0)

# Orders


@st.composite
def orders(draw: st.DrawFn) -> Order:
    keep_pairs = draw(st.booleans())
    schedule = draw(schedules(pairing=keep_pairs))
    last = draw(st.integers(0, schedule.num_slices)) if schedule.num_microbatches > 1 else 0
    return from_schedule(schedule, keep_pairs=keep_pairs).with_remainder(last)


def groups(schedule: Schedule) -> Iterator[list[list[Action]]]:
    """For every rank what runs one after the other: single actions and pairs."""
    for row in schedule.ranks:
        yield [list(flatten((action,))) for action in row]


def lacks_r(order: Order, action: Action, group: list[Action], added: set[int], stages: set[int]) -> bool:
    """Whether it is a backward that gets an R: of a stage without any, or in a pair and without one."""
    if action.kind not in (Kind.B, Kind.I) or action.stage not in stages:
        return False
    has_r = any(each.kind is Kind.R and cell_of(each) == cell_of(action) for each in actions_of(order))
    return action.stage in added or (len(group) > 1 and not has_r)


@given(orders(), st.sets(st.integers(0, 5)))
def test_every_backward_gets_its_recomputation_directly_before_it(order: Order, chosen: set[int]) -> None:
    before = {action.stage for action in actions_of(order) if action.kind is Kind.R}
    stages = {stage for stage in chosen if stage < order.num_stages}
    again = order.with_recomputation(stages)
    added = stages - before
    expected = []
    for rank in groups(to_schedule(order)):
        row: list[list[Action]] = []
        for group in rank:
            backward = [each for each in group if lacks_r(order, each, group, added, stages)]
            row += [[dataclasses.replace(each, kind=Kind.R)] for each in backward]
            row.append(group)
        expected.append(row)
    assert list(groups(to_schedule(again))) == expected
    assert again.stage_ranks.tolist() == order.stage_ranks.tolist()
    assert again.offsets[0] == 0
    assert again.offsets[-1] == len(again.kinds) == len(again.columns)
    assert again.with_recomputation(stages).same_as(again)
    assert order.unpaired().with_recomputation(before).same_as(order.unpaired())


@given(orders(), st.sets(st.integers(0, 5)), st.integers(1, 6))
def test_recomputations_ahead_stay_behind_their_forwards_and_out_of_pairs(
    order: Order, chosen: set[int], ahead: int
) -> None:
    again = order.with_recomputation(chosen, ahead)
    added = chosen - {action.stage for action in actions_of(order) if action.kind is Kind.R}
    expected = []
    for rank in groups(to_schedule(order)):
        group_of = [number for number, group in enumerate(rank) for _ in group]
        actions = [action for group in rank for action in group]
        inserted: dict[int, list[list[Action]]] = {}
        for place, action in enumerate(actions):
            if lacks_r(order, action, rank[group_of[place]], added, chosen):
                forward = group_of[actions.index(dataclasses.replace(action, kind=Kind.F))]
                group = max(group_of[max(place - ahead, 0)], forward + 1)
                inserted.setdefault(group, []).append([dataclasses.replace(action, kind=Kind.R)])
        expected.append([row for number, group in enumerate(rank) for row in (*inserted.get(number, ()), group)])
    assert list(groups(to_schedule(again))) == expected
    assert again.stage_ranks.tolist() == order.stage_ranks.tolist()


@given(schedules(), st.sets(st.integers(0, 5)), st.data())
def test_a_smaller_last_micro_batch_is_left_out_before_or_after(
    schedule: Schedule, stages: set[int], data: st.DataObject
) -> None:
    """Of stages without an R of their own, which may be of what is left out alone."""
    order = from_schedule(schedule)
    stages -= {action.stage for action in actions_of(order) if action.kind is Kind.R}
    last = data.draw(st.integers(0, order.num_slices)) if order.num_microbatches > 1 else 0
    orders = (
        order.with_remainder(last).with_recomputation(stages),
        order.with_recomputation(stages).with_remainder(last),
    )
    assert orders[0].same_as(orders[1])


@given(schedules(pairing=True), st.sets(st.integers(0, 5)))
def test_pairs_come_apart_before_or_after(schedule: Schedule, stages: set[int]) -> None:
    """One by one an R is directly before its backward, or before the first of both."""
    order = from_schedule(schedule, keep_pairs=True)
    stages -= {action.stage for action in actions_of(order) if action.kind is Kind.R}
    apart = order.with_recomputation(stages).unpaired()
    assert sorted(map(str, actions_of(apart))) == sorted(
        map(str, actions_of(order.unpaired().with_recomputation(stages)))
    )


# Plans


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Problem, Candidate]:
    """Any mesh, schedule and parts of the head, with random operations of random units made again."""
    model = draw(st.sampled_from([TINY_LLAMA, TINY_GPT2]))
    asked = problem(cluster(num_nodes=2, devices_per_node=8), model=model, ranks=16, global_batch=12)
    name = draw(st.sampled_from(sorted(BUILT_IN)))
    pp = draw(st.integers(2, 4))
    microbatch = draw(st.sampled_from([1, 2]))
    mesh = Mesh.of_share(
        dp=1,
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        microbatch=microbatch,
        share=draw(st.integers(microbatch, 6)),
    )
    parts = draw(st.sampled_from([1, 1, 2]))
    num_units, num_stages = asked.divided(parts).model.num_units, pp * find(name).per_rank(pp, None)
    cuts = draw(st.sets(st.integers(1, num_units - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), num_units)))
    slices = draw(st.sampled_from([(16,), (9, 7), (4, 4, 4, 4), (1, 2, 13)]))
    remakes = random_remakes(asked.divided(parts).model, stages, draw(st.integers(0, 2**32)))
    return asked, Candidate(
        mesh=mesh,
        stages=stages,
        slices=slices,
        schedule=name,
        remainder_slices=remainder_slices(asked, mesh, slices),
        head_parts=parts,
        recompute=remakes if any(remakes) else (),
        recompute_ahead=draw(st.sampled_from([0, 0, 1, 3])),
        recompute_inside=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(candidates())
def test_a_plan_that_recomputes_takes_the_bytes_and_seconds_of_its_program(chosen: tuple[Problem, Candidate]) -> None:
    """The quick figures that a search goes by are those of the Program, instruction by instruction."""
    asked, candidate = chosen
    judge = Simulated(asked)
    found = judge.evaluate(candidate, in_full=True)
    plan = draft_plan(judge, found)
    program = lowered(plan)
    costs = judge.costs(candidate, owners_of(candidate))
    reference = ReferenceSimulator(program, costs)
    assert found.slot_bytes == tuple(worker.peak for worker in reference.workers)
    assert found.step_ns == reference.makespan == simulate(program, costs).makespan_ns
    assert found.step_ns >= judge.bound_ns(candidate)
    recomputing = {stage for stage, remakes in enumerate(candidate.recompute) if remakes}
    with_r = {
        action.stage
        for rank in program.ranks
        for each in rank.instructions
        for action in flatten((each.action,))
        if action.kind is Kind.R
    }
    if candidate.recompute_inside:
        has_pairs = candidate.schedule == BRAIDED and candidate.mesh.tp > 1
        assert with_r <= (recomputing if has_pairs else set())
    else:
        assert with_r == recomputing
    assert program_of(plan).digest == program.digest


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("slices", [(16,), (4, 4, 4, 4)])
def test_ranks_of_one_shard_may_recompute_within_a_pair(ahead: int, slices: tuple[int, ...]) -> None:
    """They run its actions one after the other, in the search and in the Program alike."""
    asked = problem(cluster(num_nodes=2, devices_per_node=8), model=TINY_LLAMA, ranks=16, global_batch=12)
    stages = ((0, 1), (1, TINY_LLAMA.num_units))
    candidate = Candidate(
        mesh=Mesh.of_share(dp=1, tp=1, pp=2, microbatch=1, share=5),
        stages=stages,
        slices=slices,
        schedule=BRAIDED,
        recompute=random_remakes(TINY_LLAMA, stages, 5),
        recompute_ahead=ahead,
    )
    judge = Simulated(asked)
    evaluation = judge.evaluate(candidate, in_full=True)
    program = lowered(draft_plan(judge, evaluation))
    reference = ReferenceSimulator(program, judge.costs(candidate, owners_of(candidate)))
    assert evaluation.slot_bytes == tuple(worker.peak for worker in reference.workers)
    assert evaluation.step_ns == reference.makespan


@settings(max_examples=60)
@given(candidates())
def test_what_is_made_again_is_not_held_meanwhile(chosen: tuple[Problem, Candidate]) -> None:
    """Recomputation directly before the backward adds to no slots, except under orders that adapt to free memory."""
    asked, candidate = chosen
    candidate = dataclasses.replace(candidate, recompute_ahead=0)
    if find(str(candidate.schedule)).uses_costs:
        return
    judge = Simulated(asked)
    again, kept = (judge.evaluate(each) for each in (candidate, dataclasses.replace(candidate, recompute=())))
    assert all(a <= b for a, b in zip(again.slot_bytes, kept.slot_bytes, strict=True))


# Pins

IN_ALL = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=2, recompute=True)
HALF = ScheduleSpec(
    generator="csv", text="0F0.0,0F0.1,0R0.1,0B0.1,0R0.0,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n"
)  # stage 0 alone


def remakes_of(plan: Plan, stage: int) -> set[Operation]:
    return {operation for each in plan.recompute[stage] for operation in each.operations} if plan.recompute else set()


def names_all(plan: Plan, stage: int) -> bool:
    return plan.recompute[stage] == full_remakes(plan.model, plan.stages[stage])


@pytest.mark.parametrize("pinned", [{}, {"recompute": Recompute.NONE}, {"recompute": Recompute.FULL}])
def test_an_imported_schedule_with_recomputation_is_planned(pinned: dict[str, Any]) -> None:
    """Its stages with an R make everything again; the pin says what the others do."""
    plan = decide(problem(schedule=IN_ALL, global_batch=2, **pinned), QUICK).plan
    assert len(plan.stages) == 4
    assert all(names_all(plan, stage) for stage in range(4))
    half = decide(problem(schedule=HALF, global_batch=1, **pinned), QUICK).plan
    assert names_all(half, 0)
    assert names_all(half, 1) == (pinned.get("recompute") is Recompute.FULL)
    assert half.recompute[1] == () or names_all(half, 1)
    prove(program_of(half))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pin", Recompute)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb", "zbv", "interleaved-1f1b", BRAIDED])
def test_what_is_pinned_is_what_all_stages_make_again(schedule: str, pin: Recompute, tp: int) -> None:
    """On any number of shards, with several stages per rank, in pairs, and in a smaller last micro-batch."""
    described = cluster(num_nodes=2, devices_per_node=4)
    asked = problem(
        described,
        ranks=2 * tp,
        global_batch=5,
        pp=2,
        tp=tp,
        micro_batch=2,
        slices=2,
        schedule=schedule,
        recompute=pin,
    )
    decision = decide(asked, QUICK)
    plan = decision.plan
    assert plan.remainder == 1
    expected = tuple(uniform_remakes(plan.model, stage, pin.operations) for stage in plan.stages)
    assert plan.recompute == (expected if any(expected) else ())
    assert plan.recompute == pinned_remakes(asked.divided(plan.head_parts), plan.stages)
    program = program_of(plan)
    num_again = sum(
        action.kind is Kind.R
        for rank in program.ranks
        for each in rank.instructions
        for action in flatten((each.action,))
    )
    cells = 2 * len(plan.slices) + len(plan.remainder_slices)
    assert num_again == cells * sum(map(bool, expected))
    assert ("recomputes" in decision.chosen.candidate.label) == (pin is not Recompute.NONE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("zb", 2), ("zbv", 4), (BRAIDED, 2)])
def test_a_list_says_of_every_stage_what_it_makes_again(schedule: str, num_stages: int, seed: int) -> None:
    """Planned as pinned, and again by what the plan itself is pinned as."""
    blocks = (1.0,) * num_stages
    described = cluster(num_nodes=1, devices_per_node=2)
    model = dataclasses.replace(TINY_LLAMA, layers=num_stages)
    stages = pinned_stages(blocks, model.num_units)
    policy = random_remakes(model, stages, seed)
    pins = {"pp": 2, "schedule": schedule, "stages": blocks, "slices": 2, "micro_batch": 1}
    asked = problem(described, model=model, ranks=2, global_batch=4, recompute=policy, **pins)
    plan = decide(asked, QUICK).plan
    assert plan.stages == stages
    assert plan.recompute == (policy if any(policy) else ())
    assert plan.recomputes(policy)
    again = dataclasses.replace(asked, pinned=dataclasses.replace(asked.pinned, recompute=plan.recompute_pin))
    assert decide(again, QUICK).plan.program_digest == plan.program_digest


NORMS_OF = {"unit": "mlp", "count": 1, "operations": ["norm"]}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"recompute": [[], []]}, "recompute: lists recomputation by stage, but stages are not pinned"),
        ({"recompute": [[]], "stages": [1, 1]}, "recompute: is of 1 stages, and 2 are pinned"),
        ({"recompute": [[{**NORMS_OF, "unit": "none"}], []], "stages": [1, 1]}, r"recompute\[0\]\[0\].unit: 'none'"),
    ],
)
def test_a_list_of_other_stages_is_refused(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelismSpec.from_manifest(pins)


def test_a_list_of_units_that_a_stage_has_not_is_refused() -> None:
    pins = ParallelismSpec.from_manifest({"pp": 2, "stages": [1, 1], "recompute": [[], [{**NORMS_OF, "count": 2}]]})
    described = cluster(num_nodes=1, devices_per_node=2)
    asked = problem(described, model=dataclasses.replace(TINY_LLAMA, layers=2), ranks=2, global_batch=4)
    with pytest.raises(UserError, match=r"parallelism.recompute\[1\]\[0\].count: 2 mlp units of a stage that has 1"):
        decide(dataclasses.replace(asked, pinned=pins), QUICK)


@pytest.mark.parametrize("stages", [(6.0, 2.0, 2.0, 2.0), (5.0, 3.0, 2.0, 2.0)])
@pytest.mark.parametrize("share", [0.7, 0.85, 0.95])
def test_pinned_stages_of_unequal_length_recompute_what_does_not_fit(stages: tuple[float, ...], share: float) -> None:
    """Ranks with equal shares of the layers would fit. The plan is as fast as with any pin that fits."""

    def planned(limit: int, **pinned: Any) -> Plan:
        asked = problem(
            cluster(num_nodes=4),
            ranks=4,
            model=ModelSpec(family=Family.LLAMA, layers=12, hidden=256, heads=4, vocab=64),
            sequence_length=512,
            global_batch=8,
            dp=1,
            tp=1,
            pp=4,
            micro_batch=1,
            slices=1,
            schedule="1f1b",
            stages=stages,
            **pinned,
        )
        return decide(dataclasses.replace(asked, memory_limit_bytes=limit), QUICK).plan

    roomy = planned(2**40, recompute=Recompute.NONE).prediction
    assert roomy is not None
    limit = int(share * max(roomy.peak_bytes))
    free = planned(limit).prediction
    assert free is not None
    assert max(free.peak_bytes) <= limit
    for pin in Recompute:
        with contextlib.suppress(UserError):
            pinned = planned(limit, recompute=pin).prediction
            assert pinned is not None
            assert free.step_seconds <= pinned.step_seconds


@pytest.mark.parametrize(("written", "pin"), [(True, Recompute.FULL), (False, Recompute.NONE), (None, None)])
def test_true_and_false_of_earlier_manifests(written: bool | None, pin: Recompute | None) -> None:
    spec = ParallelismSpec.from_manifest({"recompute": written, "pp": 2})
    assert spec.recompute is pin
    assert ParallelismSpec.from_manifest(spec.to_manifest()) == spec


def test_an_unknown_pin_names_those_that_there_are() -> None:
    with pytest.raises(UserError, match="recompute: 'some' is not one of none, selective, full"):
        ParallelismSpec.from_manifest({"recompute": "some"})
