"""From a problem to a plan that runs, or to an error that helps."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.planner.decide
from penstock.core.errors import UserError
from penstock.core.invariants import prove
from penstock.core.job import Device, JobSpec, Objective
from penstock.core.layout import stage_parameters
from penstock.core.plan import Plan, Prediction
from penstock.core.residency import NUM_PLACES
from penstock.core.schedule import Kind, ScheduleSpec
from penstock.core.timeline import Activity
from penstock.planner.budget import Budget
from penstock.planner.compile import fitting_program_of, program_of, schedule_of
from penstock.planner.decide import MOST_PROVED_ACTIONS, decide
from penstock.planner.evaluate import Simulated
from penstock.planner.measured import problem_from_profile
from penstock.planner.order import RECOMPUTE
from penstock.planner.problem import Problem, problem_from_cluster
from penstock.planner.replay import candidate_of, simulated
from penstock.planner.search import Result, search
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, job, measured_problem, problem, profile_for
from tests.support.small_plans import looped_schedule

QUICK = Budget(candidates=20, moves=6)

JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([TINY_LLAMA, TINY_GPT2]),
        "sequence_length": st.sampled_from([5, 16]),
        "ranks": st.sampled_from([1, 2, 4]),
        "global_batch": st.sampled_from([1, 2, 6]),
    }
)


@settings(max_examples=20)
@given(JOBS, st.booleans())
def test_a_plan_is_its_program(chosen: dict[str, Any], measured: bool) -> None:
    decision = decide(measured_problem(**chosen) if measured else problem(**chosen), QUICK)
    plan, program = decision.plan, decision.program
    assert Plan.from_manifest(plan.to_manifest()) == plan
    assert program is not None
    assert program_of(plan).digest == plan.program_digest == program.digest
    assert plan.prediction is not None
    assert plan.prediction.slot_bytes == tuple(rank.arena_bytes for rank in program.ranks)
    assert schedule_of(plan).num_stages == len(plan.stages)
    assert plan.global_batch == chosen["global_batch"]
    assert plan.sequence_length == chosen["sequence_length"]
    assert len(plan.placement) == plan.dp * plan.pp


@settings(max_examples=10)
@given(JOBS)
def test_equal_problems_have_equal_plans(chosen: dict[str, Any]) -> None:
    assert decide(problem(**chosen), QUICK).plan.digest == decide(problem(**chosen), QUICK).plan.digest


def test_the_parts_of_a_prediction_add_up() -> None:
    prediction = decide(problem(ranks=4, global_batch=4), QUICK).plan.prediction
    assert prediction is not None
    parts = (
        prediction.compute_seconds,
        prediction.bubble_seconds,
        prediction.communication_seconds,
        prediction.reduction_seconds,
    )
    assert sum(parts) + prediction.optimizer_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


def test_a_prediction_s_bubble_is_that_of_its_simulated_step() -> None:
    """The mean over ranks and the worst of them; the parts of the step are of the busiest, which waits least."""
    wanted = problem(ranks=4, global_batch=4, pp=4, schedule="1f1b", slices=1, micro_batch=1)
    plan = decide(wanted, QUICK).plan
    prediction, timeline = plan.prediction, simulated(plan, cluster()).timeline
    assert prediction is not None
    assert prediction.bubble is not None
    assert prediction.waiting is not None
    assert prediction.bubble.to_manifest() == pytest.approx(timeline.bubble.to_manifest())
    busiest = prediction.bubble_seconds / prediction.step_seconds
    assert busiest <= prediction.waiting.mean <= prediction.waiting.worst <= prediction.bubble.worst
    assert busiest < prediction.waiting.worst
    assert f"waiting {prediction.waiting.range_text}" in plan.reasons[1]


def predicted(**changes: Any) -> Prediction:
    pinned = job(ranks=2, pp=2, dp=1)
    found = decide(problem_from_profile(pinned, profile_for(pinned, **changes)), QUICK).plan.prediction
    assert found is not None
    assert found.low_seconds is not None
    assert found.high_seconds is not None
    assert found.low_seconds <= found.step_seconds <= found.high_seconds
    return found


def test_a_prediction_of_described_hardware_is_as_far_off_as_the_description_says() -> None:
    prediction = decide(problem(), QUICK).plan.prediction
    assert prediction is not None
    assert prediction.low_seconds == pytest.approx((1 - cluster().error) * prediction.step_seconds)
    assert prediction.high_seconds == pytest.approx((1 + cluster().error) * prediction.step_seconds)
    assert prediction.warnings == ()


def test_the_interval_widens_with_the_spread_of_measurements() -> None:
    def width(found: Prediction) -> float:
        assert found.low_seconds is not None
        assert found.high_seconds is not None
        return found.high_seconds - found.low_seconds

    def linked(error: float, *, bounded: bool = False) -> Prediction:
        """On links slow enough that a step waits for them."""
        measured = profile_for(job(ranks=2)).links
        links = (dataclasses.replace(each, bytes_per_second=1e6, error=error, bounded=bounded) for each in measured)
        return predicted(links=tuple(links))

    assert linked(0.1).communication_seconds > 0
    assert width(linked(0.1)) < width(linked(0.9, bounded=True))
    spread = tuple(
        dataclasses.replace(each, spread=0.5, together_spread=0.5) for each in profile_for(job(ranks=2)).units
    )
    assert width(predicted()) < width(predicted(units=spread))


def test_a_prediction_says_why_it_may_be_wrong() -> None:
    assert predicted(load=0.1).warnings == ()
    assert predicted(load=13.96).warnings == profile_for(job(ranks=2), load=13.96).warnings != ()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_the_proof_of_a_plan_counts_what_its_actions_take_beyond_their_slots(schedule: str) -> None:
    decision = decide(problem(pp=2, schedule=schedule), QUICK)
    plan, program = decision.plan, decision.program
    assert program is not None
    assert plan.prediction is not None
    proof = prove(program)
    assert max(proof.transient_bytes) == 2 * min(plan.microbatch * max(plan.slices), 512) * TINY_LLAMA.vocab * 4
    state = [0] * plan.pp
    for (first, stop), rank in zip(plan.stages, schedule_of(plan).stage_ranks, strict=True):
        state[rank] += 16 * stage_parameters(plan.model, first, stop)
    assert plan.prediction.peak_bytes == tuple(a + b for a, b in zip(state, proof.peak_bytes, strict=True))


def test_a_plan_of_another_program_is_refused() -> None:
    plan = decide(problem(), QUICK).plan
    with pytest.raises(UserError, match="another Program"):
        program_of(dataclasses.replace(plan, program_digest="0" * 64))


def test_a_schedule_of_other_stages_than_the_plan_is_refused() -> None:
    plan = decide(problem(pp=2, schedule="1f1b"), QUICK).plan
    with pytest.raises(UserError, match="the schedule has 2 stages, the plan 4"):
        program_of(dataclasses.replace(plan, stages=((0, 2), (2, 4), (4, 6), (6, 10)), program_digest=""))


def test_an_imported_schedule_of_several_stages_per_rank_becomes_a_plan() -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=3, num_slices=2)
    plan = decide(problem(global_batch=6, schedule=schedule, stages=(1, 0.5, 1, 1.5)), QUICK).plan
    assert (plan.pp, plan.num_microbatches, len(plan.slices)) == (2, 3, 2)
    assert plan.stages == ((0, 3), (3, 4), (4, 6), (6, 10))
    assert program_of(plan).digest == plan.program_digest


HUB = (0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 1)
"""The ranks of twelve stages: rank 0 borders on each other one, with ten channels that it sends on."""
LOOPED = (0, 1, 2, 3, 4, 5) * 2


def crossed(stage_ranks: tuple[int, ...], device: str) -> JobSpec:
    """A job that pins a schedule in which eight micro-batches follow each other through all stages and back, at such a
    distance that rank 0 of a hub soon has forwards and backwards under way to all others.
    """
    num_stages = len(stage_ranks)
    forward = [(stage + 2 * batch, stage, f"{stage}F{batch}") for batch in range(8) for stage in range(num_stages)]
    backward = [
        (2 * num_stages - stage + 2 * batch, stage, f"{stage}B{batch}")
        for batch in range(8)
        for stage in range(num_stages)
    ]
    actions = sorted(forward + backward)
    rows = [[text for _, stage, text in actions if stage_ranks[stage] == rank] for rank in range(6)]
    text = "".join(",".join(row) + "\n" for row in rows)
    model = dataclasses.replace(TINY_LLAMA, layers=5)
    spec = job(model=model, global_batch=8, ranks=6, schedule=ScheduleSpec(generator="csv", text=text))
    return dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, device=Device(device)))


@pytest.mark.parametrize(("ranks", "device"), [(LOOPED, "cuda"), (HUB, "cpu")])
def test_a_schedule_runs_where_no_device_holds_too_many_kernels(ranks: tuple[int, ...], device: str) -> None:
    assert decide(problem_from_cluster(crossed(ranks, device), cluster(num_nodes=3)), QUICK).plan.pp == 6


def test_a_schedule_that_devices_would_hang_in_is_refused_before_anything_is_searched() -> None:
    """Rank 0 has sends under way on eight channels and posts a receive, where a device holds eight kernels."""
    with pytest.raises(UserError) as caught:
        decide(problem_from_cluster(crossed(HUB, "cuda"), cluster(num_nodes=3)), QUICK)
    assert caught.value.where == "spec.parallelism.schedule"
    assert re.search(r"rank 0, \d+\w+\.0: may be kernel 9 .* with places for 8", caught.value.what)


def test_a_plan_that_devices_would_hang_in_is_the_user_s_to_change() -> None:
    """At the start of a rank it was an internal error, which was retried."""
    plan = decide(problem_from_cluster(crossed(HUB, "cpu"), cluster(num_nodes=3)), QUICK).plan
    fitting_program_of(plan, 2**30)
    with pytest.raises(UserError, match="may be kernel 16 that waits for its peer") as caught:
        fitting_program_of(plan, 2**30, num_places=NUM_PLACES)
    assert caught.value.where == "plan"


@pytest.mark.parametrize(("device", "late"), [("cuda", True), ("cpu", False)])
def test_receives_are_posted_late_where_they_occupy_the_device(device: str, late: bool) -> None:
    """At the start of a step rank 0 posted the receives of its first gradients, whose kernels spun through the warm-up.

    The planner simulates, proves and measures the memory of the same Program that every rank compiles from the plan.
    """
    spec = job(ranks=2, global_batch=4, pp=2, micro_batch=1, schedule="1f1b")
    spec = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, device=Device(device)))
    decision = decide(problem_from_cluster(spec, cluster()), QUICK)
    program = program_of(Plan.from_manifest(decision.plan.to_manifest()))
    assert decision.plan.program_digest == program.digest
    kinds = [instruction.action.kind for instruction in program.ranks[0].instructions]
    assert kinds[: kinds.index(Kind.F)].count(Kind.POST_RECV_B) == (0 if late else 4)
    assert decision.plan.late_receives == late
    assert simulated(decision.plan, cluster()).makespan_ns == decision.result.best.step_ns


def test_long_plans_leave_their_proof_to_the_ranks() -> None:
    decision = decide(problem(sequence_length=64, global_batch=64, micro_batch=1, pp=2, slices=16), QUICK)
    assert MOST_PROVED_ACTIONS < 3 * 2 * 64 * 16
    assert decision.program is None
    assert decision.plan.program_digest == ""
    assert decision.result.best.is_exact


def test_cost_takes_fewer_devices_than_time() -> None:
    def devices(objective: Objective) -> int:
        return decide(problem(ranks=4, global_batch=1, objective=objective), QUICK).plan.num_ranks

    assert devices(Objective.COST) == 1 < devices(Objective.TIME) == 4


def test_ranks_stay_unused_where_fewer_are_faster() -> None:
    """Three replicas of two sequences cannot be, and a pipeline of three for two micro-batches waits."""
    shape: dict[str, Any] = {"ranks": 3, "global_batch": 2, "sequence_length": 4}
    all_of_them, fewer = (decide(problem(min_ranks=least, **shape), QUICK).plan for least in (None, 2))
    assert all_of_them.num_ranks == 3 > fewer.num_ranks == 2
    assert all_of_them.prediction is not None
    assert fewer.prediction is not None
    gain = all_of_them.prediction.step_seconds / fewer.prediction.step_seconds - 1
    assert gain > 0.0025
    reason = next(each for each in fewer.reasons if "unused" in each)
    assert reason.startswith("1 of 3 devices stay unused: the best plan found for all of them is ")
    assert not any("unused" in each for each in all_of_them.reasons)


def test_pins_that_leave_ranks_unused_are_obeyed() -> None:
    pinned: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 2, "ranks": 4}
    with pytest.raises(UserError, match="no division of 4 ranks"):
        decide(problem(**pinned), QUICK)
    with pytest.raises(UserError, match="no division of 3 to 4 ranks"):
        decide(problem(min_ranks=3, **pinned), QUICK)
    plan = decide(problem(min_ranks=2, **pinned), QUICK).plan
    assert (plan.num_ranks, plan.placement) == (2, (0, 1))
    assert "2 of 4 devices stay unused: no plan that was found uses all of them" in plan.reasons


def test_pins_need_not_divide_all_ranks() -> None:
    """It was refused: 3 do not divide 4."""
    with pytest.raises(UserError, match="dp x tp x pp = 3 does not divide ranks 4"):
        decide(problem(pp=3, ranks=4), QUICK)
    assert decide(problem(pp=3, ranks=4, min_ranks=3), QUICK).plan.num_ranks == 3


def test_a_measured_machine_leaves_ranks_unused_as_well() -> None:
    asked = measured_problem(ranks=3, min_ranks=2, global_batch=2)
    plan = decide(asked, QUICK).plan
    assert plan.num_ranks == 2
    assert any("1 of 3 devices stay unused" in each for each in plan.reasons)


def test_what_saves_money_says_so_of_fewer_devices() -> None:
    reasons = decide(problem(ranks=2, global_batch=1, objective=Objective.COST), QUICK).plan.reasons
    assert "1 of 2 devices stay unused: no plan that was found for more of them costs less" in reasons


@pytest.mark.parametrize(("per_node", "kv_heads"), [(2, 4), (4, 1), (1, 2)])
def test_tensor_parallelism_spans_nodes_and_key_value_heads(per_node: int, kv_heads: int) -> None:
    model = dataclasses.replace(TINY_LLAMA, kv_heads=kv_heads)
    described = cluster(num_nodes=8, devices_per_node=per_node)
    plan = decide(problem(described, model=model, ranks=8, global_batch=2, tp=4), QUICK).plan
    assert plan.tp == 4
    assert sorted(plan.placement) == [4 * each for each in range(plan.dp * plan.pp)]


LIMITED: list[dict[str, Any]] = [
    {},
    {"pp": 2, "dp": 1},
    {"pp": 2, "slices": (8, 8), "schedule": "gpipe"},
    {"pp": 2, "schedule": "zb"},
    {"stages": (4, 0)},
    {"dp": 2, "micro_batch": 2},
]


@pytest.mark.parametrize("pinned", LIMITED)
@pytest.mark.parametrize("memory", [1000, 600_000])
def test_the_suggested_memory_is_enough(pinned: dict[str, Any], memory: int) -> None:
    wide = dataclasses.replace(TINY_LLAMA, hidden=128)

    def limited(limit: int) -> Problem:
        return problem(model=wide, global_batch=4, memory=limit, **pinned)

    with pytest.raises(UserError, match="nothing fits") as caught:
        decide(limited(memory))
    assert caught.value.where == "spec.resources.memoryPerRank"
    allowed = re.search(r"allow (\d+)Mi", caught.value.remedy)
    assert allowed is not None
    limit = int(allowed.group(1)) * 2**20
    prediction = decide(limited(limit)).plan.prediction
    assert prediction is not None
    assert max(prediction.peak_bytes) <= limit


def test_more_memory_than_devices_have_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor searched for: a limit above that would only be turned down."""
    limits = []

    def noted(asked: Problem, *others: Any) -> Result:
        limits.append(asked.memory_limit_bytes)
        return search(asked, *others)

    monkeypatch.setattr(penstock.planner.decide, "search", noted)
    small = cluster()
    small = dataclasses.replace(small, device=dataclasses.replace(small.device, memory_bytes=1000))
    with pytest.raises(UserError, match="nothing fits") as caught:
        decide(problem(small))
    assert "allow" not in caught.value.remedy
    assert "more ranks" in caught.value.remedy
    assert limits == [1000]


CSV = looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2)

IN_PARTS = ScheduleSpec(
    generator="csv",
    text="0F0.0,0F0.1,0R0.1[0:3],0R0.1[3:5],0B0.1,0R0.0,0B0.0\n1F0.0,1F0.1,1R0.1[0:4],1B0.1,1R0.0[0],1R0.0[1:4],1B0.0\n",
)
"""For stages of five units each, of which the last is the head."""


def test_a_schedule_with_parts_of_recomputations_goes_the_whole_way() -> None:
    """Pinned, planned, lowered and proved; simulated by the units of each part, which together take what R does."""
    described = problem(cluster(), global_batch=1, ranks=2, schedule=IN_PARTS, stages=(2, 2), slices=2)
    decision = decide(described, QUICK)
    program = program_of(decision.plan)
    assert program.digest == decision.plan.program_digest
    timeline = simulated(decision.plan, cluster()).timeline
    taken = {event.action: event.duration_ns for event in timeline.events if event.activity is Activity.COMPUTE}
    overhead = round(1e9 * described.cost_of(1).action_overhead_seconds)
    assert taken["0R0.1[0:3]"] > taken["0R0.1[3:5]"] > overhead
    whole = Simulated(described).costs(candidate_of(decision.plan), (0, 1)).compute_ns[RECOMPUTE]
    assert taken["0R0.0"] == whole[0, 0]
    assert taken["0R0.1[0:3]"] + taken["0R0.1[3:5]"] == whole[0, 1] + overhead
    assert taken["1R0.0[0]"] + taken["1R0.0[1:4]"] == whole[1, 0] + overhead


CLASHES: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "zigzag"}, "'zigzag' is not a schedule"),
    ({"pp": 2, "stages": (1, 1, 2)}, "3 stages are pinned, but pp has 2 or 4"),
    ({"stages": (1, 0, 3), "ranks": 3, "global_batch": 3}, r"stages\[1\]: holds no unit"),
    ({"tp": 3, "ranks": 3, "global_batch": 3}, "tp 3 does not divide"),
    ({"tp": 6, "ranks": 6}, "tp 6 does not divide 4 heads"),
    ({"pp": 12, "ranks": 12, "global_batch": 12}, "12 stages cannot share the model's 10 units"),
    ({"dp": 1, "pp": 1, "tp": 1}, "no division of 2 ranks"),
    ({"schedule": CSV, "slices": (4, 4, 8)}, "for 2 slices, the job has 3"),
    ({"schedule": CSV, "slices": 4}, "for 2 slices, the job has 4"),
    ({"schedule": CSV, "pp": 1}, "for 2 ranks, the job has 1"),
    ({"schedule": CSV, "micro_batch": 2}, "for 2 micro-batches, the job has 1"),
    ({"schedule": CSV, "stages": (1, 1, 2)}, "3 stages are pinned, but the schedule has 2"),
    ({"schedule": CSV, "dp": 2}, "for 2 micro-batches, the job has 1"),
    ({"schedule": ScheduleSpec(generator="csv", text="0F0.0,wobble\n")}, "wobble"),
    ({"schedule": IN_PARTS, "global_batch": 1}, "recomputes parts of stages, whose units the planner would choose"),
    (
        {"schedule": IN_PARTS, "global_batch": 1, "stages": (1, 3)},
        "recomputes 5 units of stage 0, of which 3 keep anything",
    ),
    (
        {"schedule": looped_schedule(num_ranks=2, num_stages=12, num_microbatches=2, num_slices=1)},
        "12 stages cannot share the model's 10 units",
    ),
]


@pytest.mark.parametrize(("pinned", "message"), CLASHES)
def test_pins_that_clash_are_one_clear_error(pinned: dict[str, Any], message: str) -> None:
    described = cluster(num_nodes=6, devices_per_node=2)
    with pytest.raises(UserError, match=message) as caught:
        decide(problem(described, **{"global_batch": 2, **pinned}), QUICK)
    assert caught.value.where.startswith("spec.parallelism") or caught.value.where == "schedule"
    assert caught.value.remedy
