"""Pairs: the recurrence against a ticking clock, segments against their costs, schedules, and the choice."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.schedule import ScheduleSpec, import_spec, parse_schedule
from penstock.core.timeline import Activity
from penstock.planner.braiding import braided_outlines, hidden_share
from penstock.planner.candidate import Candidate
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.memory_fit import MemoryFit, Shortage
from penstock.planner.order import BACKWARD, FORWARD, Order, from_schedule, to_schedule
from penstock.planner.outlines import outlines
from penstock.planner.pair_costs import collectives_of
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem, all_meshes, problem_from_cluster
from penstock.planner.replay import candidate_of, simulated
from penstock.planner.schedules.braided import BRAIDED, ahead, braided_1f1b
from penstock.planner.schedules.recorded import record, replay
from penstock.planner.schedules.registry import find
from penstock.planner.simulate.arrays import link_order, simulate_arrays
from penstock.planner.simulate.pairs import Collectives, pair_ns
from penstock.planner.simulate.periodic import extrapolate
from penstock.planner.stagecost import equal_slices
from tests.support.reference_simulator import in_turns
from tests.support.step_costs import equal_costs, random_costs, shape

SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(SEGMENTS, SEGMENTS)
def test_two_passes_in_turns(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    found = pair_ns(np.array(first, dtype=np.int64), np.array(second, dtype=np.int64))
    assert found == in_turns([[list(each) for each in first], [list(each) for each in second]])
    computes, collectives = (sum(each[column] for each in (*first, *second)) for column in range(2))
    assert max(computes, collectives) <= found <= computes + collectives


def test_the_example_of_two_segments_each() -> None:
    passes = np.array([[3, 2], [3, 2]], dtype=np.int64)
    assert pair_ns(passes, passes) == 14


def test_without_collectives_nothing_is_hidden() -> None:
    assert pair_ns(np.array([[3, 0], [4, 0]]), np.array([[5, 0]])) == 12


MODEL = ModelSpec(
    family=Family.LLAMA, layers=16, hidden=5120, heads=40, kv_heads=8, ffn_hidden=13824, vocab=32000, positions=8192
)


def problem(
    tp: int,
    pp: int,
    *,
    num_sequences: int = 64,
    sequence_parallel: bool = True,
    schedule: str | None = None,
    micro_batch: int | None = None,
    slices: int | None = None,
) -> Problem:
    spec = JobSpec(
        model=MODEL,
        data=DataSpec(source="corpus", sequence_length=4096),
        training=TrainingSpec(global_batch=num_sequences, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(ranks=tp * pp, memory_per_rank=80 * 2**30),
        parallelism=ParallelismSpec(
            tp=tp,
            pp=pp,
            sequence_parallel=None if sequence_parallel else False,
            schedule=schedule,
            micro_batch=micro_batch,
            slices=slices,
        ),
    )
    return problem_from_cluster(spec, cluster_of(device_kind("h100"), max(tp * pp // 8, 1)))


def candidate(one: Problem, tp: int, pp: int, slices: tuple[int, ...] = (4096,)) -> Candidate:
    return Candidate(
        mesh=Mesh.of_share(dp=1, tp=tp, pp=pp, microbatch=1, share=one.global_batch),
        stages=pinned_stages([16 / pp] * pp, MODEL.num_units),
        slices=slices,
        schedule=BRAIDED,
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("slices", [(4096,), (1500, 1300, 1296)])
def test_segments_hold_all_that_an_action_takes(sequence_parallel: bool, slices: tuple[int, ...]) -> None:
    """The segments exclude only its fixed overhead."""
    one = problem(8, 4, sequence_parallel=sequence_parallel)
    plan = candidate(one, 8, 4, slices)
    found = collectives_of(one, plan)
    costs = Simulated(one).costs(plan, (0, 1, 2, 3))
    assert found is not None
    overhead = one.cost_of(8).action_overhead_seconds * 1e9
    for kind in (FORWARD, BACKWARD):
        for stage in range(4):
            for column in range(len(slices)):
                segments = found.segments_of((kind, stage, column))
                whole = int(costs.compute_ns[kind, stage, column]) - overhead
                assert segments.min() >= 0
                assert abs(int(segments.sum()) - whole) <= 4 * len(segments)
    per_block = 2 if sequence_parallel else 1
    forward = found.segments_of((FORWARD, 1, 0))
    assert np.count_nonzero(forward[:, 1]) == per_block * (plan.stages[1][1] - plan.stages[1][0])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_head_parts_have_separate_collectives(sequence_parallel: bool) -> None:
    """F of a part gathers and sums, I of all but the last adds the rows of targets, W gathers."""
    one = problem(8, 4, sequence_parallel=sequence_parallel)
    stages = ((0, 12), (12, 24), (24, 33), (33, 34), (34, 35), (35, 36))
    plan = dataclasses.replace(candidate(one, 8, 4), stages=stages, head_parts=3)
    found = collectives_of(one, plan)
    assert found is not None
    num_gathers = int(sequence_parallel)
    for stage, num_sums in ((3, 1), (4, 1), (5, 0)):
        collectives = [np.count_nonzero(found.segments_of((kind, stage, 0))[:, 1]) for kind in (FORWARD, BACKWARD)]
        assert collectives == [num_gathers + 1, num_gathers + num_sums]


def test_one_shard_has_no_collectives() -> None:
    one = problem(1, 8)
    assert collectives_of(one, candidate(one, 1, 8)) is None


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9])
def test_no_outline_of_pairs_below_the_best_score_is_left_out(place: float) -> None:
    one = problem(8, 4)
    ranked = [candidate(one, 8, 4)]
    everything = braided_outlines(one, outlines(one), ranked)
    scores = [one.score(outline.estimate_ns, outline.mesh.num_devices) for outline in everything]
    most_score = sorted(scores)[int(place * len(scores))] + 1
    below = [outline for outline, score in zip(everything, scores, strict=True) if score < most_score]
    left = braided_outlines(one, outlines(one), ranked, most_score)
    assert [outline for outline in left if outline in below] == below
    assert braided_outlines(one, outlines(one), ranked, 0) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_every_steady_backward_is_a_pair_with_the_forward_after_it(num_ranks: int, num_slices: int) -> None:
    inputs = shape(num_ranks, 12, num_slices, BRAIDED)
    order = braided_1f1b(inputs)
    for rank in range(num_ranks):
        own = slice(order.offsets[rank], order.offsets[rank + 1])
        assert order.joined is not None
        assert order.joined[own].sum() == inputs.num_units - ahead(inputs, rank)
        kinds = order.kinds[own][np.flatnonzero(order.joined[own])]
        assert (kinds == BACKWARD).all()
    assert all(action.is_pair for row in to_schedule(order).ranks for action in row if action.children)


FORWARD_NS, BACKWARD_NS = 40, 80


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [8, 20])
@pytest.mark.parametrize(
    ("forward", "backward", "pair"),
    [
        ([[15, 25]], [[80, 0]], 120),  # the forward is second, and its collective the last thing of all
        ([[30, 0], [10, 0]], [[50, 30]], 90),
        ([[10, 10], [10, 10]], [[20, 20], [20, 20]], 90),
    ],
)
def test_the_step_of_equal_stages(
    num_ranks: int, num_microbatches: int, forward: list[list[int]], backward: list[list[int]], pair: int
) -> None:
    """The first forward goes down alone, the last backward comes up alone, and between them each pair is a round."""
    tables = {FORWARD: np.array(forward), BACKWARD: np.array(backward)}
    assert pair_ns(tables[BACKWARD], tables[FORWARD]) == pair
    costs = equal_costs(num_ranks, 1, FORWARD_NS, BACKWARD_NS - 30, 30)
    costs = dataclasses.replace(costs, collectives=Collectives(lambda place: tables[place[0]]))
    found = simulate_arrays(braided_1f1b(shape(num_ranks, num_microbatches, 1, BRAIDED)), costs)
    assert found.makespan_ns == num_ranks * (FORWARD_NS + BACKWARD_NS) + (num_microbatches - 1) * pair


def test_pairs_survive_files_and_objects() -> None:
    order = find(BRAIDED).generate(shape(3, 6, 2, BRAIDED))
    sizes = {"num_ranks": 3, "num_microbatches": 6, "num_slices": 2}
    assert replay(record(order), **sizes).same_as(order)
    assert from_schedule(to_schedule(order), keep_pairs=True).same_as(order)
    assert from_schedule(to_schedule(order)).same_as(order.unpaired())
    short = order.with_remainder(1)
    assert from_schedule(to_schedule(order).with_remainder(1), keep_pairs=True).same_as(short)


@pytest.mark.parametrize("at", [0, -1])
def test_a_schedule_whose_marks_are_not_pairs_is_refused(at: int) -> None:
    order = find(BRAIDED).generate(shape(2, 4, 1, BRAIDED))
    assert order.joined is not None
    joined = order.joined.copy()
    joined[at] = True
    with pytest.raises(UserError, match="does not hold an order"):
        replay(record(dataclasses.replace(order, joined=joined)), num_ranks=2, num_microbatches=4, num_slices=1)


@pytest.mark.parametrize("seed", range(8))
def test_long_braided_steps_repeat_themselves(seed: int) -> None:
    """A step proved to be periodic has the time of a full simulation."""
    rng = random.Random(seed)
    num_ranks, num_slices = rng.choice([1, 2, 4]), rng.choice([1, 2])
    costs = random_costs(rng, num_ranks, num_ranks, num_slices)

    def order(count: int) -> Order:
        return braided_1f1b(shape(num_ranks, count, num_slices, BRAIDED))

    settings = {"receive_ahead": rng.choice([1, 2, 4]), "late_receives": rng.random() < 0.5}
    found = extrapolate(order, 150, costs, **settings)  # type: ignore[arg-type]
    whole = simulate_arrays(order(150), costs, **settings)  # type: ignore[arg-type]
    assert found.times.makespan_ns == pytest.approx(whole.makespan_ns, rel=0 if found.is_exact else 0.01)
    assert found.num_simulated < 150


def test_children_that_wait_for_what_comes_after_them_are_refused() -> None:
    """As ranks of several shards run them; one after the other they can."""
    schedule, _ = parse_schedule("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(UserError, match=r"0F1\.0;0B0\.0 never gets what it needs\n.*both actions of an overlap"):
        link_order(from_schedule(schedule, keep_pairs=True), receive_ahead=2)
    link_order(from_schedule(schedule), receive_ahead=2)


APART = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n"
"""The two actions of its overlap cannot begin together: the backward comes of the forward."""


def imported(tp: int | None, text: str = APART) -> Problem:
    """Four devices, two pipeline ranks."""
    spec = JobSpec(
        model=dataclasses.replace(MODEL, layers=2),
        data=DataSpec(source="corpus", sequence_length=1024),
        training=TrainingSpec(global_batch=4, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(ranks=4, memory_per_rank=80 * 2**30),
        parallelism=ParallelismSpec(tp=tp, pp=2, schedule=import_spec(text, "mine.csv")[0]),
    )
    return problem_from_cluster(spec, cluster_of(device_kind("h100"), 1))


@pytest.mark.parametrize("tp", [None, 1])
def test_an_imported_order_whose_pairs_cannot_be_joined_runs_on_one_shard(tp: int | None) -> None:
    assert decide(imported(tp)).plan.tp == 1


def test_it_is_refused_where_several_shards_are_pinned() -> None:
    with pytest.raises(
        UserError, match=r"with tp 2 both actions of an overlap begin together, and rank 0 has \(0F1"
    ) as e:
        decide(imported(2))
    assert e.value.where == "spec.parallelism.schedule"
    with pytest.raises(UserError, match=r"^(?!.*begin together).*before 0F0\.0 is done"):
        decide(imported(2, "(0F1;0B0)OVERLAP_F_B,0F0,0B1\n1F0,1F1,1B0,1B1\n"))


def test_an_imported_order_whose_pairs_can_be_joined_runs_on_several() -> None:
    joined = "0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n"
    assert {mesh.tp for mesh in all_meshes(imported(None, joined))} == {1, 2}
    assert decide(imported(2, joined)).plan.tp == 2


def test_one_shard_runs_pairs_one_after_the_other() -> None:
    one = problem(1, 8)
    judge = Simulated(one)
    plan = candidate(one, 1, 8)
    assert judge.order(plan).joined is None
    eager = dataclasses.replace(plan, schedule="eager-1f1b")
    assert judge.evaluate(plan).step_ns == pytest.approx(judge.evaluate(eager).step_ns, rel=0.01)


def test_a_pair_needs_the_memory_of_both() -> None:
    """Slots of both at once, and the transients of the second next to the largest."""
    one = problem(8, 4)
    judge = Simulated(one)
    plan = candidate(one, 8, 4)
    apart = ScheduleSpec(generator=BRAIDED, text=record(judge.order(plan).unpaired()))
    together, serial = judge.evaluate(plan), judge.evaluate(dataclasses.replace(plan, schedule=apart))
    transients = [a - b for a, b in zip(together.peak_bytes, together.slot_bytes, strict=True)]
    alone = [a - b for a, b in zip(serial.peak_bytes, serial.slot_bytes, strict=True)]
    assert all(both > one_of_them for both, one_of_them in zip(transients, alone, strict=True))
    assert all(both >= one for both, one in zip(together.slot_bytes, serial.slot_bytes, strict=True))


@pytest.mark.parametrize("tp", [1, 8])
def test_memory_estimates_equal_those_of_the_simulator(tp: int) -> None:
    """A candidate that needs exactly the memory is offered, one that needs a byte more is not."""
    one = problem(tp, 4)
    plan = candidate(one, tp, 4)
    needed = max(Simulated(one).evaluate(plan).peak_bytes)
    assert plan in MemoryFit(one.limited(needed), 4).fitted(plan)
    judge = Simulated(one.limited(needed - 1))
    for found in MemoryFit(judge.problem, 4).fitted(plan):
        assert isinstance(found, Shortage) or max(judge.evaluate(found).peak_bytes) < needed


PLAIN = ("1f1b", "zb-h1", "zb", "zbv", "interleaved-zb")
"""Schedules without pairs, with which the planner compares."""


def decided(tp: int, pp: int, num_sequences: int, schedule: str | None = None) -> Plan:
    """The plan with whole micro-batches of two sequences."""
    pins = {"micro_batch": 2, "slices": 1, "schedule": schedule}
    return decide(problem(tp, pp, num_sequences=num_sequences, **pins)).plan  # type: ignore[arg-type]


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def test_no_step_with_pairs_is_below_the_floor() -> None:
    """The floor counted collectives, of which pairs hide some."""
    one = problem(8, 2, micro_batch=1, slices=1, schedule=BRAIDED)
    decision = decide(one)
    assert decision.plan.prediction is not None
    explanation = decision.plan.prediction.explanation
    assert explanation is not None
    assert explanation.search is not None
    floor = explanation.search.floor_seconds
    assert floor is not None
    assert floor <= decision.plan.prediction.step_seconds


def test_the_planner_chooses_pairs_where_they_are_faster() -> None:
    chosen = decided(8, 2, 64)
    assert chosen.schedule.generator == BRAIDED
    best = min(seconds(decided(8, 2, 64, schedule)) for schedule in PLAIN)
    assert best > 1.05 * seconds(chosen)
    simulation = simulated(chosen, cluster_of(device_kind("h100"), 2))
    assert simulation.makespan_ns == pytest.approx(1e9 * seconds(chosen), abs=1)
    assert any("OVERLAP" in event.action for event in simulation.timeline.events)


@pytest.mark.parametrize(("tp", "pp", "num_sequences"), [(1, 8, 64), (8, 4, 8)])
def test_the_planner_chooses_no_pairs_where_they_are_slower(tp: int, pp: int, num_sequences: int) -> None:
    """One shard hides nothing; and few micro-batches do not make up for the longer warm-up."""
    chosen = decided(tp, pp, num_sequences)
    assert chosen.schedule.generator != BRAIDED
    assert seconds(chosen) <= seconds(decided(tp, pp, num_sequences, BRAIDED))


@pytest.mark.parametrize("num_slices", [1, 4])
def test_a_few_layers_hide_the_same_share_as_a_stage_of_them(num_slices: int) -> None:
    """Within 5 % of the total time, since a stage repeats the same layers."""
    one = problem(8, 1)
    slices = equal_slices(4096, num_slices)
    plan = dataclasses.replace(candidate(one, 8, 1), stages=((1, 33),), slices=slices)
    collectives = collectives_of(one, plan)
    assert collectives is not None
    places = np.array([[[kind, 0, num_slices // 2]] for kind in (BACKWARD, FORWARD)])
    whole = sum(int(collectives.segments_of(tuple(place[0].tolist())).sum()) for place in places)
    share = collectives.hidden_ns(places[0], places[1])[0] / whole
    assert hidden_share(one, plan.mesh, num_slices) == pytest.approx(share, abs=0.05)
    assert share > 0.05


@pytest.mark.parametrize("schedule", ["1f1b", BRAIDED])
def test_timelines_have_the_time_that_ranks_wait_for_their_shards(schedule: str) -> None:
    """The time is that of all collectives of an action, minus the part that a pair hides."""
    one = problem(8, 2, num_sequences=6, schedule=schedule, micro_batch=1, slices=2)
    plan = decide(one).plan
    timeline = simulated(plan, cluster_of(device_kind("h100"), 2)).timeline
    computes = [event for event in timeline.events if event.activity is Activity.COMPUTE]
    assert all(0 < event.collective_ns < event.duration_ns for event in computes)
    assert timeline.collectives is not None
    found = collectives_of(one, candidate_of(plan))
    assert found is not None
    apart = sum(
        found.waited_ns((kind, stage, column)) for kind in (FORWARD, BACKWARD) for stage in (0, 1) for column in (0, 1)
    )
    waited = sum(event.collective_ns for event in computes)
    assert waited == 6 * apart if schedule == "1f1b" else 0 < waited < 6 * apart


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=40), st.integers(0, 9))
def test_hidden_times_are_those_of_every_pair_by_itself(places: list[tuple[int, int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    tables = {place: draw.integers(0, 9, (draw.integers(1, 5), 2)) for place in dict.fromkeys(places)}
    first = np.array(places, dtype=np.int64).reshape(-1, 3)
    second = first[::-1]
    hidden = Collectives(lambda place: tables[place]).hidden_ns(first, second)
    serial = [int(tables[one].sum() + tables[other].sum()) for one, other in zip(places, places[::-1], strict=True)]
    together = [pair_ns(tables[one], tables[other]) for one, other in zip(places, places[::-1], strict=True)]
    assert hidden.tolist() == [a - b for a, b in zip(serial, together, strict=True)]
