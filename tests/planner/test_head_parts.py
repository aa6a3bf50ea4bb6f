"""Plans whose ranks share the head: against everything, against a whole head, and with more of anything."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from penstock.core.cluster import SoftwareSpec
from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec, UnitKind, linear_flops_per_token
from penstock.core.plan import Plan
from penstock.core.schedule import Kind, import_spec
from penstock.planner.candidate import Candidate
from penstock.planner.cost import CostModel
from penstock.planner.decide import Decision, decide
from penstock.planner.evaluate import Simulated
from penstock.planner.floor import floor_ns
from penstock.planner.measured import problem_from_profile
from penstock.planner.outlines import outlines
from penstock.planner.problem import Mesh, Problem, problem_from_cluster
from penstock.planner.replay import candidate_of, simulated
from penstock.planner.schedules.registry import stage_ranks
from penstock.planner.tables import boundary_bytes, tie_seconds
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, job, measured, problem, profile, units_at

HEAVY = ModelSpec(family=Family.LLAMA, layers=2, hidden=32, heads=4, vocab=2400)
"""Its head is 70 % of the work."""

ONE_NODE = cluster(num_nodes=1, devices_per_node=8)
FIXED = {"dp": 1, "tp": 1, "pp": 2, "micro_batch": 1, "slices": 1}


def shared(**changes: object) -> Problem:
    fields = {"model": HEAVY, "global_batch": 12, "sequence_length": 64, **changes}
    return problem(ONE_NODE, **fields)


def step_seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def decided(**changes: object) -> Decision:
    return decide(shared(**changes))


def test_the_head_is_what_it_is_said_to_be() -> None:
    blocks = HEAVY.layers * sum(linear_flops_per_token(HEAVY, kind) for kind in (UnitKind.ATTENTION, UnitKind.MLP))
    head = linear_flops_per_token(HEAVY, UnitKind.HEAD)
    assert head / (head + blocks) == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_parts_and_no_cut_are_better_than_the_plan(schedule: str) -> None:
    """All numbers of parts up to eight, all cuts."""
    asked = shared(**FIXED, schedule=schedule)
    judge, best = Simulated(asked), None
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=12)
    for parts in range(1, 9):
        num_units = HEAVY.divided(parts).num_units
        for cut in itertools.combinations(range(1, num_units), 1):
            stages = tuple(itertools.pairwise((0, *cut, num_units)))
            candidate = Candidate(mesh=mesh, stages=stages, slices=(64,), schedule=schedule, head_parts=parts)
            found = judge.evaluate(candidate).step_ns
            best = found if best is None else min(best, found)
    assert best is not None
    assert 1e9 * step_seconds(decide(asked).plan) <= 1.01 * best


def test_two_ranks_with_a_head_of_70_percent_gain_a_quarter() -> None:
    """No layers can be dealt so: a whole head keeps one rank busy for 70 % of the work."""
    free, whole = decided(pp=2, dp=1), decided(pp=2, dp=1, head_parts=1)
    assert free.plan.head_parts > 1
    assert step_seconds(whole.plan) >= 1.25 * step_seconds(free.plan)


def test_a_plan_with_head_parts_states_them_and_simulates_to_the_same_time() -> None:
    found = decided(**FIXED, schedule="1f1b")
    plan, problem_ = found.plan, shared(**FIXED, schedule="1f1b")
    assert plan.model == HEAVY.divided(plan.head_parts)
    assert plan.stages[-1][1] == plan.model.num_units
    assert plan.head_text == f", head in {plan.head_parts} parts"
    assert candidate_of(plan).head_parts == plan.head_parts
    assert found.chosen.candidate.label.endswith(plan.head_text)
    assert any(f"the head is in {plan.head_parts} parts of the vocabulary, on ranks 0 and 1" in r for r in plan.reasons)
    simulated = Simulated(problem_, plan.receive_ahead).evaluate(candidate_of(plan), in_full=True)
    assert simulated.step_ns == found.chosen.step_ns
    assert Plan.from_manifest(plan.to_manifest()) == plan


def test_a_pin_of_parts_is_obeyed_and_never_faster_than_none() -> None:
    free = decided(pp=2, dp=1)
    for parts in (1, 2, 3):
        pinned = decided(pp=2, dp=1, head_parts=parts)
        assert pinned.plan.head_parts == parts
        assert step_seconds(free.plan) <= 1.01 * step_seconds(pinned.plan)


def test_pinned_stages_have_a_part_each_at_the_end() -> None:
    pinned = decided(dp=1, tp=1, pp=2, stages=(1, 1, 0, 0), head_parts=2)
    assert pinned.plan.head_parts == 2
    assert pinned.plan.stages == ((0, 3), (3, 5), (5, 6), (6, 7))


def test_a_light_head_stays_whole_and_is_looked_at_no_longer() -> None:
    asked = problem(ONE_NODE, model=TINY_LLAMA, ranks=2, global_batch=4)
    assert {each.head_parts for each in outlines(asked)} == {1}


def test_other_software_than_penstock_has_a_whole_head() -> None:
    software = SoftwareSpec(head_in_forward=False)
    asked = problem_from_cluster(job(model=HEAVY, ranks=2), dataclasses.replace(ONE_NODE, software=software))
    assert {each.head_parts for each in outlines(asked)} == {1}


def test_more_memory_never_gives_a_slower_plan() -> None:
    roomy = decided(pp=2, dp=1).plan
    assert roomy.prediction is not None
    peak = max(roomy.prediction.peak_bytes)
    tight = decided(pp=2, dp=1, memory=peak * 3 // 4).plan
    assert tight.prediction is not None
    assert max(tight.prediction.peak_bytes) <= peak * 3 // 4
    assert step_seconds(roomy) <= 1.005 * step_seconds(tight)


# What goes between ranks


def test_a_border_inside_the_head_carries_two_hidden_states_down_and_one_up() -> None:
    asked = shared(**FIXED).divided(3)
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=12)
    stages = ((0, 3), (3, 5), (5, 6), (6, 8))
    candidate = Candidate(mesh=mesh, stages=stages, slices=(64,), schedule="zbv", head_parts=3)
    down, up = boundary_bytes(asked, candidate)
    hidden, statistics = 64 * HEAVY.hidden * 4, 64 * 3 * 4
    assert down[:, 0].tolist() == [hidden, hidden, 2 * hidden + statistics]
    assert up[:, 0].tolist() == [hidden, hidden, hidden + statistics]


def test_a_tied_head_is_summed_with_every_rank_that_has_parts() -> None:
    asked = problem(ONE_NODE, model=TINY_GPT2, ranks=2, global_batch=2)
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=2)
    cost, whole = asked.cost_of(1), ((0, 4), (4, 8))
    rows = TINY_GPT2.hidden * 4
    assert tie_seconds(asked, whole, (0, 1), mesh, (0, 1)) == pytest.approx(cost.all_reduce_seconds(64 * rows, (0, 1)))
    divided = asked.divided(4)
    stages = ((0, 4), (4, 8), (8, 10), (10, 11))
    expected = cost.all_reduce_seconds(3 * 16 * rows, (0, 1))
    assert tie_seconds(divided, stages, stage_ranks("zbv", 2), mesh, (0, 1)) == pytest.approx(expected)


# The published setting (arXiv 2411.05288, tables 1 and 5)


def published(vocab: int, **pinned: object) -> Plan:
    """8 A100, 32 layers of width 3,072, 128 micro-batches of one sequence of 2,048 tokens."""
    spec = JobSpec(
        model=ModelSpec(family=Family.GPT2, layers=32, hidden=3072, heads=24, vocab=vocab, positions=2048),
        data=DataSpec(source="", sequence_length=2048),
        training=TrainingSpec(global_batch=128, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=8, memory_per_rank=75 * 10**9),
        parallelism=ParallelismSpec(dp=1, tp=1, pp=8, micro_batch=1, slices=1, **pinned),  # type: ignore[arg-type]
    )
    return decide(problem_from_cluster(spec, cluster_of(device_kind("a100-80"), 1))).plan


def test_a_vocabulary_of_256k_gains_what_was_published() -> None:
    """Vocabulary parallelism is 1.288 times as fast as the best redistribution of layers there: 50.12 % to 38.91 %."""
    shared_plan, whole = published(256_000, schedule="1f1b"), published(256_000, schedule="1f1b", head_parts=1)
    assert step_seconds(whole) / step_seconds(shared_plan) >= 1.2


# Measured parts


def measured_parts(share: float) -> Problem:
    """Two measured ranks: blocks take 16 us a pass, a whole head 600 us in F, each half of it a ``share`` of that in F
    and W together.
    """
    whole = measured(UnitKind.HEAD, Kind.F, seconds=600e-6)
    seconds = {Kind.F: 400e-6 * share, Kind.I: 1e-6, Kind.W: 200e-6 * share}
    halves = [
        dataclasses.replace(measured(UnitKind.HEAD, kind, seconds=each), head_parts=2) for kind, each in seconds.items()
    ]
    blocks = [each for each in units_at(1) if each.unit is not UnitKind.HEAD]
    spec = job(global_batch=8, dp=1, tp=1, pp=2, micro_batch=1, slices=1)
    return problem_from_profile(spec, profile((*blocks, whole, *halves)))


def test_a_measured_head_is_divided_as_it_was_measured_where_that_is_faster() -> None:
    cheap, dear = measured_parts(0.5), measured_parts(1.2)
    assert tuple(cheap.head_degrees(1)) == (1, 2)
    assert decide(cheap).plan.head_parts == 2
    assert decide(dear).plan.head_parts == 1


@pytest.mark.parametrize(
    ("vocab", "ranks", "pinned"),
    [(3, 2, {"dp": 1, "pp": 1, "head_parts": 2}), (3, 8, {"dp": 1, "pp": 4, "stages": (2, 2, 0, 0)})],
)
def test_pins_that_no_division_can_have_are_refused(vocab: int, ranks: int, pinned: dict[str, object]) -> None:
    """It was a ValueError: parts of three tokens cannot be shared by two devices each."""
    spec = job(ranks=ranks, **pinned)  # type: ignore[arg-type]
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab=vocab))
    with pytest.raises(UserError, match="obeys what is pinned"):
        decide(problem_from_cluster(spec, cluster(num_nodes=ranks, devices_per_node=ranks)))


def test_a_head_measured_in_parts_at_some_degrees_has_a_floor() -> None:
    """It was a KeyError: the floor asked for parts at every degree of tensor parallelism."""
    asked = measured_parts(0.5)
    costs, degrees = asked.costs, {1: (1, 2), 2: (1,)}

    def known(tp: int, head_parts: int) -> CostModel:
        assert head_parts in degrees[tp]
        return costs(1, head_parts)

    shapes = [Mesh.of_share(dp=1, tp=tp, pp=1, microbatch=1, share=8) for tp in (1, 2)]
    some = dataclasses.replace(asked, costs=known, tp_degrees=(1, 2), head_degrees=degrees.__getitem__)
    assert floor_ns(some, shapes, (1, 2)) == floor_ns(some, shapes[1:], (1, 2)) <= floor_ns(some, shapes[:1], (1, 2))


def test_a_plan_with_parts_needs_a_profile_with_parts() -> None:
    """It was a KeyError."""
    plan = decide(measured_parts(0.5)).plan
    whole = [*units_at(1)]
    with pytest.raises(UserError, match="no measurement of tp 1 and the head in 2 parts"):
        simulated(plan, profile(tuple(whole)))


def test_a_schedule_that_recomputes_parts_of_stages_keeps_the_head_whole() -> None:
    """It was refused: the head was divided into units that the schedule does not name."""
    rows = (
        ",".join(f"0F{i}" for i in range(8)) + "," + ",".join(f"0R{i}[0:3],0R{i}[3:5],0B{i}" for i in range(8)),
        ",".join(f"1F{i},1B{i}" for i in range(8)),
    )
    schedule, _ = import_spec("\n".join(rows), "csv")
    pinned = ParallelismSpec(dp=1, tp=1, pp=2, stages=(2.0, 0.0), schedule=schedule)
    heavier = dataclasses.replace(HEAVY, vocab=9600)
    spec = dataclasses.replace(job(global_batch=8, ranks=2), model=heavier, parallelism=pinned)
    plan = decide(problem_from_cluster(spec, cluster(num_nodes=2, devices_per_node=1))).plan
    assert plan.head_parts == 1
