"""From a problem to a Plan: search, lower the winner, prove it, and write down what was predicted and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from penstock.core.cluster import PENSTOCK
from penstock.core.errors import UserError
from penstock.core.plan import Plan, Prediction
from penstock.core.program import Program
from penstock.core.remaking import Recompute
from penstock.core.units import MEBIBYTE, bytes_apart, to_nanoseconds, to_seconds
from penstock.planner.budget import Budget, usual_budget
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import DEFAULT_RECEIVE_AHEAD, Simulated, owners_of
from penstock.planner.explain import explained
from penstock.planner.judge import Evaluation, Reporter
from penstock.planner.pins import PINNED, check_pins
from penstock.planner.placement import placed
from penstock.planner.problem import Confidence, Mesh, Problem, all_meshes
from penstock.planner.realise import lowered, prove_plan
from penstock.planner.recompute import may_recompute
from penstock.planner.search import NothingFitsError, Result, search
from penstock.planner.tables import Placement, action_transients, devices_in_order, resident_bytes, static_bytes

MOST_PROVED_ACTIONS = 3_000
"""Programs up to this many compute actions are lowered and proved with the plan; larger ones when ranks bind. Those of
another software are not: its arenas are its own.
"""

FIRST_FIT = Budget(candidates=0, shortages=0, lean_shortages=60, lean_fits=1, neighbours=0, moves=0)
"""A search with this budget ends with the first plan that fits, from those that hold the least."""

FIRST_RECOMPUTED = dataclasses.replace(FIRST_FIT, shortages=200, lean_shortages=200)
"""The same, where ranks may have to make much again: outlines that hold the least are not those that fit then."""

MOST_LAID_OUT = 8
"""Arenas that are laid out before a search with a tighter limit takes their place."""

MOST_TIGHTER_SEARCHES, TIGHTER, TIGHTER_PART = 4, 0.99, 3
"""Each asks for as many times less as the arenas of the best were too large, and for a little less than that, with a
part of the first one's budget.
"""

MOST_PLACEMENTS, PLACEMENT_PART = 2, 2
"""Searches that go by the placement of the best plan so far, each with a part of the budget."""

CLOSE_ENOUGH = 1.003
"""A plan that takes no longer than so many times the best candidate is worth no further search."""

CONTINUED = "the step has {:,} actions: it was simulated with fewer micro-batches, and continued in a straight line"

GROWTH = (1.02, 1.04, 1.08, 1.16, 1.32, 1.64, 2.28)
"""Limits that are tried where nothing fits, each as a multiple of what came closest with the one before."""


LEAVE_OUT = {
    "recompute": (Recompute.FULL, "leave out parallelism.recompute, and ranks make again what they have no room for"),
    "zero": (1, "leave out parallelism.zero, and replicas divide the state of the optimizer"),
}
"""Pins that may take memory, each with the value that takes least, and what leaving it out does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The plan, how it was found, and its Program unless that is too large to lower here.

    ``overshoot_bytes`` is what the arena of a better candidate takes above the limit, 0 if there is no better one.
    ``chosen`` is the plan's candidate as ``judge`` simulated it.
    """

    plan: Plan
    result: Result
    program: Program | None
    judge: Simulated
    chosen: Evaluation
    overshoot_bytes: int = 0

    def score(self, problem: Problem) -> int:
        """What is minimised: nanoseconds, or those of all devices together."""
        assert self.plan.prediction is not None, "a plan that was decided is predicted"
        return problem.score(to_nanoseconds(self.plan.prediction.step_seconds), self.plan.num_ranks)

    def aim(self, problem: Problem) -> int:
        """The same of the search's best candidate, whose arena may not fit."""
        best = self.result.best
        return problem.score(best.step_ns, best.candidate.mesh.num_devices)


def decide(problem: Problem, budget: Budget | None = None, reporter: Reporter | None = None) -> Decision:
    """The best plan for ``problem``; raises `UserError` when nothing fits or what is pinned cannot run."""
    check_pins(problem, DEFAULT_RECEIVE_AHEAD)
    if next(all_meshes(problem), None) is None:
        raise _nothing_obeys(problem)
    judge = Simulated(problem)
    try:
        return _decided(judge, budget, reporter)
    except NothingFitsError as shortage:
        raise _memory_error(judge, shortage) from None


def _nothing_obeys(problem: Problem) -> UserError:
    return UserError(
        what=f"no division of {_ranks(problem)} ranks, {problem.global_batch} sequences obeys what is pinned",
        where=PINNED,
        remedy="pin fewer of dp, tp, pp, headParts, microBatch, stages and schedule, or others: dp x tp x pp is the "
        "number of ranks, dp divides globalBatch, microBatch is at most the sequences of a replica, and headParts x tp "
        "is at most the vocabulary",
    )


def _ranks(problem: Problem) -> str:
    fewest, most = problem.min_devices, problem.num_devices
    return str(most) if fewest is None else f"{fewest} to {most}"


def _decided(judge: Simulated, budget: Budget | None, reporter: Reporter | None = None) -> Decision:
    """The best plan found for the judge's problem. A search goes by one placement of every mesh: where another suits
    its plan better, what else suits that is looked for, or the plan would depend on how devices are numbered.
    """
    problem = judge.problem
    budget = budget or usual_budget(problem.num_devices)
    best = _by_placement(judge, budget, reporter)
    for _ in range(MOST_PLACEMENTS):
        if best.plan.placement == best.judge.placement(best.chosen.candidate.mesh):
            break
        try:
            found = _by_placement(judge.placing(_like(best.plan)), budget.part(PLACEMENT_PART), reporter)
        except NothingFitsError:
            break
        if found.score(problem) >= best.score(problem):
            break
        best = found
    return best


def _like(plan: Plan) -> Placement:
    """The plan's placement for meshes of its degrees."""

    def placement(mesh: Mesh) -> tuple[int, ...]:
        is_like = (mesh.dp, mesh.tp, mesh.pp) == (plan.dp, plan.tp, plan.pp)
        return plan.placement if is_like else devices_in_order(mesh)

    return placement


def _by_placement(judge: Simulated, budget: Budget, reporter: Reporter | None) -> Decision:
    """The best plan whose laid-out arena fits: where that of the best does not, those are looked for that hold less."""
    problem, best, closest = judge.problem, None, None
    for number in range(MOST_TIGHTER_SEARCHES):
        if number == 1:
            budget = budget.part(TIGHTER_PART)
        asked = judge.problem
        try:
            result = search(asked, judge, budget, reporter)
        except NothingFitsError as shortage:
            closest = closest or shortage
            break
        try:
            found = realised(judge, result, problem)
        except _NoArenaFitsError as shortage:
            closest = closest or shortage
            needed = shortage.of_best_bytes
        else:
            best = found if best is None else min(best, found, key=lambda each: each.score(problem))
            if not found.overshoot_bytes or found.score(problem) <= CLOSE_ENOUGH * found.aim(problem):
                break
            needed = problem.memory_limit_bytes + found.overshoot_bytes
        limit = TIGHTER * asked.memory_limit_bytes * problem.memory_limit_bytes / needed
        judge = judge.limited(max(int(limit), 1))
    if best is None:
        assert closest is not None, "a search ends with a plan or with what it lacks"
        raise closest
    return best


class _NoArenaFitsError(NothingFitsError):
    """No arena that was laid out fits; that of the best candidate takes ``of_best_bytes`` with all else."""

    def __init__(self, needs: list[tuple[int, str]]) -> None:
        super().__init__(*min(needs))
        self.of_best_bytes = needs[0][0]


def _memory_error(judge: Simulated, shortage: NothingFitsError) -> UserError:
    """What fits in the limit is nothing: say how much came closest, and how much was tried and does."""
    if not shortage.label:
        return _nothing_obeys(judge.problem)
    problem, enough = judge.problem, _enough_bytes(judge, shortage.least_bytes)
    cure = "use more ranks, or make the model, the sequence or pinned micro-batches smaller"
    if enough is not None:
        cure = f"allow {enough // MEBIBYTE}Mi per rank, {cure}"
    hint = next((hint for name, (least, hint) in LEAVE_OUT.items() if _fits_without(problem, name, least)), None)
    if hint is not None:
        cure = f"{hint}; or {cure}"
    limit, least = bytes_apart(problem.memory_limit_bytes, shortage.least_bytes)
    return UserError(
        what=f"nothing fits in {limit} per rank; the closest ({shortage.label}) needs at least {least}",
        where="spec.resources.memoryPerRank",
        remedy=cure,
    )


def _fits_without(problem: Problem, name: str, least: object) -> bool:
    """Whether a plan is found without this pin, if another value than the ``least`` is pinned."""
    if getattr(problem.pinned, name) in (None, least):
        return False
    free = dataclasses.replace(problem, pinned=dataclasses.replace(problem.pinned, **{name: None}))
    try:
        _decided(Simulated(free), FIRST_RECOMPUTED)
    except NothingFitsError:
        return False
    return True


def _enough_bytes(judge: Simulated, least_bytes: int) -> int | None:
    """A limit, in whole MiB, under which a plan was found; tried upwards from the least that could do, as long as
    devices have it.
    """
    for factor in GROWTH:
        limit = -(-int(least_bytes * factor) // MEBIBYTE) * MEBIBYTE
        if limit > judge.problem.device_memory_bytes:
            return None
        try:
            _decided(judge.limited(limit), FIRST_RECOMPUTED if may_recompute(judge.problem) else FIRST_FIT)
        except NothingFitsError as shortage:
            least_bytes = max(limit, shortage.least_bytes)
        else:
            return limit
    return None


def realised(judge: Simulated, result: Result, problem: Problem) -> Decision:
    """The result's best candidate as a Plan for ``problem``, whose limit may be above the judge's.

    A Program whose arena does not fit gives way to the next best, a few times.

    Raises `NothingFitsError` if that is so of all that were laid out.
    """
    needs: list[tuple[int, str]] = []
    for found in itertools.islice((result.best, *result.others), MOST_LAID_OUT):
        laid_out = _laid_out(judge, found, problem)
        if laid_out.peak_bytes > problem.memory_limit_bytes:
            needs.append((laid_out.peak_bytes, laid_out.evaluation.candidate.label))
            continue
        overshoot = needs[0][0] - problem.memory_limit_bytes if needs else 0
        plan = _explained_plan(laid_out, problem, result, place=1)
        return Decision(
            plan=plan,
            result=result,
            program=laid_out.program,
            overshoot_bytes=overshoot,
            judge=judge,
            chosen=found,
        )
    raise _NoArenaFitsError(needs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LaidOut:
    """A candidate as a Plan without explanation, its Program unless that is too large, and its exact bytes."""

    draft: Plan
    evaluation: Evaluation
    program: Program | None

    @property
    def peak_bytes(self) -> int:
        return max(self.evaluation.peak_bytes)


def _laid_out(judge: Simulated, found: Evaluation, problem: Problem) -> _LaidOut:
    """The candidate placed on devices and lowered; proved if it fits."""
    seated, evaluation = placed(judge, found)
    draft = draft_plan(seated, evaluation)
    program = None
    if evaluation.candidate.num_actions <= MOST_PROVED_ACTIONS and problem.software == PENSTOCK:
        divided = problem.divided(evaluation.candidate.head_parts)
        program = lowered(draft, action_transients(divided, evaluation.candidate))
        evaluation = _with_arena(seated, evaluation, program)
        if max(evaluation.peak_bytes) <= problem.memory_limit_bytes:
            prove_plan(draft, program, _room(problem, evaluation.candidate), num_places=problem.num_places)
    return _LaidOut(draft=draft, evaluation=evaluation, program=program)


def _explained_plan(laid_out: _LaidOut, problem: Problem, result: Result, place: int) -> Plan:
    why = explained(problem, result, laid_out.evaluation, place)
    prediction = dataclasses.replace(
        _prediction(laid_out.evaluation), peak_flops=problem.peak_flops, explanation=why.explanation
    )
    speed = dataclasses.replace(laid_out.draft, prediction=prediction).speed()
    prediction = dataclasses.replace(prediction, speed=speed)
    return dataclasses.replace(
        laid_out.draft,
        program_digest=laid_out.program.digest if laid_out.program else "",
        prediction=_with_interval(prediction, problem.confidence),
        reasons=why.reasons,
        alternatives=why.alternatives,
    )


def best_plans(problem: Problem, decision: Decision, count: int) -> Iterator[Plan]:
    """The decision's plan and the next best by prediction, ``count`` at most, one of each label: mesh, number of slices
    and schedule. Those that differ in boundaries alone are nearly as fast, and those whose arena does not fit are
    passed over.
    """
    yield decision.plan
    labels, place = {decision.chosen.candidate.label}, 1
    for found in decision.result.others:
        if place >= count:
            return
        label = found.candidate.label
        if label in labels:
            continue
        laid_out = _laid_out(decision.judge, found, problem)
        if laid_out.peak_bytes <= problem.memory_limit_bytes:
            labels.add(label)
            place += 1
            yield _explained_plan(laid_out, problem, decision.result, place)


def _room(problem: Problem, candidate: Candidate) -> list[int]:
    """What every rank has for its arena and transients."""
    always = resident_bytes(problem.divided(candidate.head_parts), candidate, owners_of(candidate))
    return [problem.memory_limit_bytes - each for each in always.tolist()]


def draft_plan(judge: Simulated, evaluation: Evaluation) -> Plan:
    """The candidate as a Plan without explanation."""
    candidate, problem = evaluation.candidate, judge.problem
    mesh = candidate.mesh
    return Plan(
        model=problem.model,
        precision=problem.precision,
        dp=mesh.dp,
        tp=mesh.tp,
        sequence_parallel=problem.sequence_parallel or mesh.tp == 1,
        pp=mesh.pp,
        microbatch=mesh.microbatch,
        num_microbatches=mesh.num_microbatches,
        slices=candidate.slices,
        stages=candidate.stages,
        schedule=judge.spec(candidate),
        receive_ahead=judge.receive_ahead,
        late_receives=problem.late_receives,
        placement=judge.placement(mesh),
        remainder=mesh.remainder,
        remainder_slices=candidate.remainder_slices,
        head_parts=candidate.head_parts,
        recompute=candidate.recompute,
        recompute_ahead=candidate.recompute_ahead,
        zero=candidate.zero,
        profile_digest=problem.profile_digest,
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
        bubble=evaluation.bubble,
        waiting=evaluation.waiting,
        warnings=() if evaluation.is_exact else (CONTINUED.format(evaluation.candidate.num_actions),),
    )


def _with_interval(prediction: Prediction, confidence: Confidence | None) -> Prediction:
    """The prediction, and how far the step may be off if all that was measured is off the same way."""
    if confidence is None:
        return prediction
    margin = (
        confidence.computing * (prediction.compute_seconds + prediction.bubble_seconds)
        + confidence.transfers * prediction.communication_seconds
        + confidence.reductions * prediction.reduction_seconds
        + confidence.optimizer * prediction.optimizer_seconds
    )
    return dataclasses.replace(
        prediction,
        low_seconds=max(prediction.step_seconds - margin, 0.0),
        high_seconds=prediction.step_seconds + margin,
        warnings=(*prediction.warnings, *confidence.warnings),
    )


def _with_arena(judge: Simulated, evaluation: Evaluation, program: Program) -> Evaluation:
    """The evaluation with the exact bytes of the laid-out arenas."""
    arenas = tuple(rank.arena_bytes for rank in program.ranks)
    order, problem = judge.order(evaluation.candidate), judge.problem_of(evaluation.candidate)
    always = static_bytes(problem, evaluation.candidate, tuple(order.stage_ranks.tolist()), order)
    peaks = tuple(a + b for a, b in zip(always, arenas, strict=True))
    return dataclasses.replace(evaluation, peak_bytes=peaks, slot_bytes=arenas)
