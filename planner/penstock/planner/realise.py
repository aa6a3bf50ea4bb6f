"""From a Plan to its Program: what every rank does again before the first step, and compares by digest."""

from __future__ import annotations

from penstock.core.errors import UserError
from penstock.core.invariants import prove
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import Schedule
from penstock.planner.lowering import Transients, lower, slot_sizes
from penstock.planner.schedules.registry import from_spec


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, from its recipe."""
    return from_spec(
        plan.schedule, num_ranks=plan.pp, num_microbatches=plan.num_microbatches, num_slices=len(plan.slices)
    )


def program_of(plan: Plan, transients: Transients | None = None) -> Program:
    """The plan's Program, proved to run; raises `UserError` if its digest is not the one the plan was made with."""
    schedule = schedule_of(plan)
    if schedule.num_stages != len(plan.stages):
        raise UserError(
            what=f"the schedule has {schedule.num_stages} stages, the plan {len(plan.stages)}",
            where="plan.stages",
            remedy="give one range of units per stage of the schedule",
        )
    program = lower(
        schedule,
        slot_sizes(plan.model, plan.precision, plan.stages, plan.microbatch),
        slices=plan.slices,
        receive_ahead=plan.receive_ahead,
        dp=plan.dp > 1,
        tie=tied_ranks(plan.model, schedule.stage_ranks),
        transients=transients or {},
    )
    if plan.program_digest and program.digest != plan.program_digest:
        raise UserError(
            what="describes another Program than this version of penstock makes from it",
            where="plan",
            remedy="plan again with the version that runs it",
        )
    prove(program)
    return program


def tied_ranks(model: ModelSpec, stage_ranks: tuple[int, ...]) -> tuple[int, int] | None:
    """The ranks that hold the two copies of a tied matrix, embedding and head, or none."""
    ends = (stage_ranks[0], stage_ranks[-1])
    return ends if model.tied and ends[0] != ends[1] else None
