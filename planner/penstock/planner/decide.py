"""From a problem to a Plan: search, lower the winner, prove it, and write down what was predicted and why."""

from __future__ import annotations

import dataclasses

from penstock.core.errors import UserError
from penstock.core.plan import Plan, Prediction
from penstock.core.program import Program
from penstock.core.units import format_bytes, to_seconds
from penstock.planner.evaluate import Simulated
from penstock.planner.explain import alternatives, reasons
from penstock.planner.problem import Problem
from penstock.planner.realise import program_of
from penstock.planner.search import Budget, Evaluation, Reporter, Result, search
from penstock.planner.tables import static_bytes

MOST_PROVED_ACTIONS = 3_000
"""Programs up to this many compute actions are lowered and proved with the plan; larger ones when ranks bind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The plan, how it was found, and its Program unless that is too large to lower here."""

    plan: Plan
    result: Result
    program: Program | None


def decide(problem: Problem, budget: Budget | None = None, reporter: Reporter | None = None) -> Decision:
    """The best plan for ``problem``; raises `UserError` when nothing fits or what is pinned cannot run."""
    judge = Simulated(problem)
    result = search(problem, judge, budget, reporter)
    return realised(judge, result)


def realised(judge: Simulated, result: Result) -> Decision:
    """The result's best candidate as a Plan. A Program whose arena does not fit gives way to the next best."""
    for evaluation in (result.best, *result.others):
        draft = draft_plan(judge, evaluation)
        if _num_actions(evaluation) > MOST_PROVED_ACTIONS:
            program, prediction = None, draft.prediction
        else:
            program = program_of(draft)
            prediction = _with_arena(judge, evaluation, program)
            if max(prediction.peak_bytes) > judge.problem.memory_limit_bytes:
                continue
        plan = dataclasses.replace(
            draft,
            program_digest=program.digest if program else "",
            prediction=prediction,
            reasons=reasons(judge.problem, result, evaluation),
            alternatives=alternatives(result, evaluation),
        )
        return Decision(plan=plan, result=result, program=program)
    raise UserError(
        what=f"every plan's buffers exceed {format_bytes(judge.problem.memory_limit_bytes)} once they are laid out",
        where="spec.resources.memoryPerRank",
        remedy="allow a little more memory per rank",
    )


def _num_actions(evaluation: Evaluation) -> int:
    """F, I and W of every slice on every stage."""
    candidate = evaluation.candidate
    return 3 * len(candidate.stages) * candidate.mesh.num_microbatches * len(candidate.slices)


def draft_plan(judge: Simulated, evaluation: Evaluation) -> Plan:
    """The candidate as a Plan, with what the simulator predicted of it."""
    candidate, problem = evaluation.candidate, judge.problem
    mesh = candidate.mesh
    return Plan(
        model=problem.model,
        precision=problem.precision,
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        microbatch=mesh.microbatch,
        num_microbatches=mesh.num_microbatches,
        slices=candidate.slices,
        stages=candidate.stages,
        schedule=judge.spec(candidate),
        receive_ahead=judge.receive_ahead,
        placement=judge.placement(mesh),
        profile_digest=problem.profile_digest,
        prediction=_prediction(evaluation),
    )


def _prediction(evaluation: Evaluation) -> Prediction:
    return Prediction(
        step_seconds=to_seconds(evaluation.step_ns),
        compute_seconds=to_seconds(evaluation.compute_ns),
        bubble_seconds=to_seconds(evaluation.bubble_ns),
        communication_seconds=to_seconds(evaluation.communication_ns),
        reduction_seconds=to_seconds(evaluation.reduction_ns),
        optimizer_seconds=to_seconds(evaluation.optimizer_ns),
        peak_bytes=evaluation.peak_bytes,
        slot_bytes=evaluation.slot_bytes,
    )


def _with_arena(judge: Simulated, evaluation: Evaluation, program: Program) -> Prediction:
    """The prediction with the exact bytes of the laid-out arenas."""
    arenas = tuple(rank.arena_bytes for rank in program.ranks)
    always = static_bytes(judge.problem, evaluation.candidate, _stage_ranks(program))
    peaks = tuple(a + b for a, b in zip(always, arenas, strict=True))
    return dataclasses.replace(_prediction(evaluation), peak_bytes=peaks, slot_bytes=arenas)


def _stage_ranks(program: Program) -> tuple[int, ...]:
    owners = {
        instruction.action.stage: rank.rank
        for rank in program.ranks
        for instruction in rank.instructions
        if instruction.action.is_compute
    }
    return tuple(owners[stage] for stage in range(program.num_stages))
