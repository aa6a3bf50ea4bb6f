"""Simulation of an existing plan on measured or described hardware: its timeline, and its cost there."""

from __future__ import annotations

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, JobSpec, OptimizerSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.profile_matching import unmeasured_type
from penstock.planner.candidate import Candidate
from penstock.planner.compile import program_of
from penstock.planner.device_order import Placement, devices_by_number
from penstock.planner.evaluate import Simulated
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import Mesh, Problem, problem_from_cluster
from penstock.planner.simulate.simulation import Simulation, simulate
from penstock.planner.tables import static_bytes

MOST_ACTIONS = 60_000
"""Plans with more compute actions have a prediction, but no timeline: it would be unreadable."""


def problem_of(plan: Plan, hardware: Profile | ClusterSpec) -> Problem:
    """The planning problem of ``plan``, on ``hardware``."""
    if isinstance(hardware, Profile):
        return problem_from_profile(spec_of(plan), hardware)
    return problem_from_cluster(spec_of(plan), hardware)


def spec_of(plan: Plan) -> JobSpec:
    """The smallest job that ``plan`` is for, on as many devices as its placement needs."""
    return JobSpec(
        model=plan.model.whole,
        data=DataSpec(source="", sequence_length=plan.sequence_length),
        training=TrainingSpec(
            global_batch=plan.global_batch,
            steps=1,
            precision=plan.precision,
            optimizer=OptimizerSpec(moment_type=plan.moment_type),
            gradient_reduction_type=plan.gradient_reduction_type,
        ),
        resources=ResourcesSpec(ranks=max([plan.num_ranks, *(device + plan.tp for device in plan.placement)])),
        parallelism=ParallelismSpec(sequence_parallel=None if plan.sequence_parallel else False),
    )


def placement_of(plan: Plan) -> Placement:
    """The plan's placement of ranks; `devices_by_number` if the plan has none."""
    return (lambda mesh: plan.placement) if plan.placement else devices_by_number


def num_actions(plan: Plan) -> int:
    """Approximate number of compute actions of a step."""
    return candidate_of(plan).num_actions


def simulated(plan: Plan, hardware: Profile | ClusterSpec) -> Simulation:
    """Simulate one step of ``plan`` on ``hardware``; raises `UserError` for a plan too large to draw."""
    if num_actions(plan) > MOST_ACTIONS:
        raise UserError(
            what=f"has about {num_actions(plan):,} actions, too many for a timeline",
            where="plan",
            remedy="look at the plan's prediction, or plan with a smaller globalBatch",
        )
    problem = problem_of(plan, hardware)
    if isinstance(hardware, Profile):
        _require_measured(plan, hardware, problem)
    judge = Simulated(problem, plan.receive_ahead, placement_of(plan))
    candidate = candidate_of(plan)
    order = judge.order(candidate)
    stage_ranks = tuple(order.stage_ranks.tolist())
    always = static_bytes(judge.problem_of(candidate), candidate, stage_ranks, order)
    return simulate(program_of(plan), judge.costs(candidate, stage_ranks), static_bytes=always)


def _require_measured(plan: Plan, profile: Profile, problem: Problem) -> None:
    """Raise `UserError` for a part of the plan that would count as taking no time, because it was not measured."""
    if plan.tp not in problem.tp_degrees or plan.head_parts not in problem.head_degrees(plan.tp):
        parts = f" and the head in {plan.head_parts} parts" if plan.head_parts > 1 else ""
        raise UserError(
            what=f"holds no measurement of tp {plan.tp}{parts}, which the plan has",
            where="profile",
            remedy="run penstock profile with a job that pins the plan's tp and headParts",
        )
    reduction_type = plan.gradient_reduction_type if plan.dp > 1 else None
    missing = unmeasured_type(profile, plan.moment_type, reduction_type)
    if missing:
        raise UserError(
            what=f"{missing}, which the plan has",
            where="profile",
            remedy="run penstock profile with a job that has the plan's momentType and gradientReductionType",
        )


def candidate_of(plan: Plan) -> Candidate:
    """The plan as a candidate of the search."""
    degrees = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp}
    return Candidate(
        mesh=Mesh.of_share(**degrees, microbatch=plan.microbatch, share=plan.num_sequences),
        stages=plan.stages,
        slices=plan.slices,
        schedule=plan.schedule,
        remainder_slices=plan.remainder_slices,
        head_parts=plan.head_parts,
        recompute=plan.recompute,
        recompute_ahead=plan.recompute_ahead,
        recompute_inside=plan.recompute_inside,
        zero=plan.zero,
    )
