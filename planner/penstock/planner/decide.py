"""From a problem to a Plan: search, lower the winner, prove it, and record the prediction and its explanation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.core.cluster import PENSTOCK
from penstock.core.errors import UserError
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.remaking import Recompute
from penstock.core.units import MEBIBYTE, bytes_apart, to_nanoseconds
from penstock.planner.budget import Budget, usual_budget
from penstock.planner.candidate import Candidate
from penstock.planner.compile import lowered, prove_plan
from penstock.planner.device_order import Placement, peak_flops
from penstock.planner.evaluate import DEFAULT_RECEIVE_AHEAD, Simulated, owners_of
from penstock.planner.explain import explained
from penstock.planner.judge import Ending, Evaluation, NothingFitsError, Reporter
from penstock.planner.moves import inside_of
from penstock.planner.pins import PINNED, check_pins
from penstock.planner.placement import placed
from penstock.planner.predictions import prediction_of, with_interval
from penstock.planner.problem import Mesh, Problem, all_meshes
from penstock.planner.recompute import may_recompute
from penstock.planner.search import Result, search
from penstock.planner.search_inside import search_inside
from penstock.planner.tables import action_transients, resident_bytes, static_bytes

MOST_PROVED_ACTIONS = 3_000
"""Programs up to this many compute actions are lowered and proved with the plan; larger ones when ranks bind. Programs
of other software are not lowered: its memory layout is unknown.
"""

FIRST_FIT = Budget(candidates=0, shortages=0, lean_shortages=60, lean_fits=1, neighbours=0, moves=0)
"""A budget that ends with the first plan that fits, opening the smallest memory bounds first."""

FIRST_RECOMPUTED = dataclasses.replace(FIRST_FIT, lean_shortages=200)
"""The same if ranks may recompute: then outlines with the smallest memory bounds often do not fit."""

FEW_DEVICES = 64
"""With more devices, a search for any plan that fits tries fewer candidates, by the square root of their ratio."""

MOST_LAID_OUT, MOST_ALIKE = 8, 3
"""Limits of arenas that are laid out before a search with a tighter limit follows: in total, and per label."""

MOST_SEARCHES, TIGHTER, TIGHTER_PART = 4, 0.99, 2
"""Limit of searches, of which the first has the problem's memory limit. A tighter search lowers the limit by the factor
by which the best plan's arenas were too large, times `TIGHTER`, with 1 / `TIGHTER_PART` of the first budget.
"""

INSIDE_PART = 4
"""The search for plans that recompute inside their backwards gets 1 / `INSIDE_PART` of the budget."""

MOST_INSIDE, MOST_LEANER = 3, 3
"""Limits of the search for plans that recompute inside their backwards: of candidates that are laid out, and of retries
of each with more recomputation if its arena does not fit.
"""

MOST_PLACEMENTS, PLACEMENT_PART = 2, 2
"""Limit of searches with the placement of the best plan so far, each with 1 / `PLACEMENT_PART` of the budget."""

CLOSE_ENOUGH = 1.003
"""If a plan takes at most the best candidate's step times this factor, no tighter search follows."""

GROWTH = (1.02, 1.04, 1.08, 1.16, 1.32, 1.64, 2.28)
"""If nothing fits, these multiples of the bytes that the closest candidates need are tried as limits. After a failed
search, its limit or its least need is multiplied, whichever is larger.
"""

CLOSE = 1.25
"""Candidates that need at most this factor more than the least possible are tried before all others."""


UNPIN_HINTS = {
    "recompute": (Recompute.FULL, "leave out parallelism.recompute, and ranks recompute as much as memory requires"),
    "zero": (1, "leave out parallelism.zero, and replicas divide the state of the optimizer"),
}
"""Pins that may cost memory, each with the value that needs least, and the advice to leave the pin out."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The plan, how it was found, and its Program unless that is too large to lower here.

    ``overshoot_bytes`` is the excess of a better candidate's arena over the limit, 0 if there is no better one.
    ``chosen`` is the plan's candidate as ``judge`` simulated it. ``separate`` is the best plan that does not recompute
    inside its backwards, if this one does.
    """

    plan: Plan
    result: Result
    program: Program | None
    judge: Simulated
    chosen: Evaluation
    overshoot_bytes: int = 0
    separate: Decision | None = None

    def score(self, problem: Problem) -> int:
        """The objective: nanoseconds, or those of all devices together."""
        assert self.plan.prediction is not None, "a plan that was decided is predicted"
        return problem.score(to_nanoseconds(self.plan.prediction.step_seconds), self.plan.num_ranks)

    def aim(self, problem: Problem) -> int:
        """The score of the search's best candidate, whose arena may not fit."""
        return _score(problem, self.result.best)


def decide(problem: Problem, budget: Budget | None = None, reporter: Reporter | None = None) -> Decision:
    """The best plan for ``problem``; raises `UserError` if nothing fits or the pins cannot be met."""
    check_pins(problem, DEFAULT_RECEIVE_AHEAD)
    if next(all_meshes(problem), None) is None:
        raise _nothing_obeys(problem)
    judge = Simulated(problem)
    try:
        return _decided(judge, budget, reporter)
    except NothingFitsError as shortage:
        raise _memory_error(judge, shortage) from None


def decide_if_possible(
    problem: Problem, budget: Budget | None = None, reporter: Reporter | None = None
) -> Decision | None:
    """As `decide`, but None if there is no plan, or the search takes too long: without a search for the remedy."""
    try:
        check_pins(problem, DEFAULT_RECEIVE_AHEAD)
        if next(all_meshes(problem), None) is None:
            return None
        return _decided(Simulated(problem), budget, reporter)
    except (NothingFitsError, UserError):
        return None


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
    """The best plan for the judge's problem; those that recompute inside their backwards are searched last."""
    budget = budget or usual_budget(judge.problem.num_devices)
    try:
        separate = _separate(judge, budget, reporter)
    except NothingFitsError:
        inside = _inside(judge, budget.part(INSIDE_PART), reporter, None)
        if inside is None:
            raise
        return inside
    same_placement = separate.judge.limited(judge.problem.memory_limit_bytes)
    return _inside(same_placement, budget.part(INSIDE_PART), reporter, separate) or separate


def _inside(judge: Simulated, budget: Budget, reporter: Reporter | None, separate: Decision | None) -> Decision | None:
    """The best plan that recomputes inside its backwards, if it is better than ``separate``; else None."""
    problem = judge.problem
    if not may_recompute(problem) or problem.software.recomputes_on_demand:
        return None
    ranked = () if separate is None else (separate.chosen, separate.result.best, *separate.result.others)
    result = search_inside(problem, judge, ranked, budget, reporter)
    if result is None:
        return None
    best = None if separate is None else separate.score(problem)
    fitting = None
    for evaluation in itertools.islice((result.best, *result.others), MOST_INSIDE):
        for leaner_judge, laid_out in _leaner(judge, evaluation, problem, best):
            score = _score(problem, laid_out.evaluation)
            if (best is None or score < best) and laid_out.peak_bytes <= problem.memory_limit_bytes:
                fitting, best = (leaner_judge, laid_out), score
    if fitting is None:
        return None
    leaner_judge, laid_out = fitting
    result = dataclasses.replace(result, best=laid_out.evaluation)
    return Decision(
        plan=_explained_plan(laid_out, problem, _merged(problem, result, separate), place=1),
        result=result,
        program=laid_out.program,
        judge=leaner_judge,
        chosen=laid_out.evaluation,
        separate=separate,
    )


def _leaner(
    judge: Simulated, evaluation: Evaluation, problem: Problem, best: int | None
) -> Iterator[tuple[Simulated, _LaidOut]]:
    """The evaluation laid out, and while its arena does not fit, its candidate with more recomputation; nothing that
    does not improve the ``best`` score, since laying out a Program takes longer than a simulation.
    """
    if not evaluation.is_exact:
        evaluation = judge.evaluate(evaluation.candidate, in_full=True)
    for _ in range(1 + MOST_LEANER):
        if best is not None and _score(problem, evaluation) >= best:
            return
        laid_out = _laid_out(judge, evaluation, problem)
        yield judge, laid_out
        excess = laid_out.peak_bytes - problem.memory_limit_bytes
        judge = judge.limited(judge.problem.memory_limit_bytes - excess)
        leaner = None if excess <= 0 else judge.proposer.memory_fit.leaner(inside_of(evaluation.candidate))
        if leaner is None:
            return
        evaluation = judge.evaluate(leaner, in_full=True)


def _score(problem: Problem, evaluation: Evaluation) -> int:
    return problem.score(evaluation.step_ns, evaluation.candidate.mesh.num_devices)


def _separate(judge: Simulated, budget: Budget, reporter: Reporter | None) -> Decision:
    """The best plan that does not recompute inside its backwards. A search assumes one placement per mesh. If another
    placement suits its plan better, the search is repeated with it; otherwise the plan would depend on the numbering of
    devices.
    """
    problem = judge.problem
    best = _by_placement(judge, budget, reporter)
    for _ in range(MOST_PLACEMENTS):
        if best.plan.placement == best.judge.placement(best.chosen.candidate.mesh):
            break
        try:
            placement = _placement_like(best.plan, judge)
            decision = _by_placement(judge.placing(placement), budget.part(PLACEMENT_PART), reporter)
        except NothingFitsError:
            break
        if decision.score(problem) >= best.score(problem):
            break
        best = decision
    return best


def _placement_like(plan: Plan, judge: Simulated) -> Placement:
    """The plan's placement for meshes with its degrees of parallelism, the judge's for others."""

    def placement(mesh: Mesh) -> tuple[int, ...]:
        is_like = (mesh.dp, mesh.tp, mesh.pp) == (plan.dp, plan.tp, plan.pp)
        return plan.placement if is_like else judge.placement(mesh)

    return placement


def _by_placement(judge: Simulated, budget: Budget, reporter: Reporter | None) -> Decision:
    """The best plan whose laid-out arena fits: if that of the best does not, searches with tighter limits follow."""
    problem, best, closest = judge.problem, None, None
    for number in range(MOST_SEARCHES):
        if number == 1:
            budget = budget.part(TIGHTER_PART)
        try:
            result = search(judge.problem, judge, budget, reporter)
        except NothingFitsError as shortage:
            closest = closest or shortage
            break
        try:
            decision = decision_of(judge, result, problem)
        except _NoArenaFitsError as shortage:
            closest = closest or shortage
            needed_bytes = shortage.of_best_bytes
        else:
            best = decision if best is None else min(best, decision, key=lambda decision: decision.score(problem))
            if not decision.overshoot_bytes or decision.score(problem) <= CLOSE_ENOUGH * decision.aim(problem):
                break
            needed_bytes = problem.memory_limit_bytes + decision.overshoot_bytes
        judge = _tighter(judge, problem, needed_bytes)
    if best is None:
        assert closest is not None, "a search ends with a plan or with a shortage"
        raise closest
    return best


def _tighter(judge: Simulated, problem: Problem, needed_bytes: int) -> Simulated:
    """The judge with its limit multiplied by `TIGHTER`, and by the ratio of the problem's limit to ``needed_bytes``."""
    limit = TIGHTER * judge.problem.memory_limit_bytes * problem.memory_limit_bytes / needed_bytes
    return judge.limited(max(int(limit), 1))


class _NoArenaFitsError(NothingFitsError):
    """No laid-out arena fits; with the best candidate's arena a rank needs ``of_best_bytes``."""

    def __init__(self, needs: list[tuple[int, str]]) -> None:
        super().__init__(*min(needs))
        self.of_best_bytes = needs[0][0]


def _memory_error(judge: Simulated, shortage: NothingFitsError) -> UserError:
    """The error if nothing fits in the limit: how much the closest candidate needs, and a limit that was found to
    suffice.
    """
    if not shortage.label:
        return _nothing_obeys(judge.problem)
    problem, enough_bytes = judge.problem, _enough_bytes(judge, shortage)
    remedy = "use more ranks, or make the model, the sequence or pinned micro-batches smaller"
    if enough_bytes is not None:
        remedy = f"allow {enough_bytes // MEBIBYTE}Mi per rank, {remedy}"
    hint = next((hint for name, (least, hint) in UNPIN_HINTS.items() if _fits_without(problem, name, least)), None)
    if hint is not None:
        remedy = f"{hint}; or {remedy}"
    limit, least = bytes_apart(problem.memory_limit_bytes, shortage.least_bytes)
    return UserError(
        what=f"nothing fits in {limit} per rank; the closest ({shortage.label}) needs at least {least}",
        where="spec.resources.memoryPerRank",
        remedy=remedy,
    )


def _fits_without(problem: Problem, name: str, least: object) -> bool:
    """Whether a plan is found without this pin, provided that it is pinned to another value than ``least``."""
    if getattr(problem.pinned, name) in (None, least):
        return False
    return _first_fit(Simulated(_pinning(problem, **{name: None}))) is None


def _enough_bytes(judge: Simulated, shortage: NothingFitsError) -> int | None:
    """A limit, in whole MiB, with which a plan was found; None if none was, up to the devices' memory.

    Limits are tried upwards: first for the closest candidates alone, which takes a fraction of a search, then for all.
    A failed search gives the closest candidates of the next round. The first round may have none, if estimates ruled
    out everything.
    """
    problem, least_bytes = judge.problem, shortage.least_bytes
    for factor in GROWTH:
        closest = [need for need in shortage.closest if need[0] <= CLOSE * least_bytes]
        enough_bytes = _enough_for_closest(problem, closest)
        if enough_bytes is not None:
            return enough_bytes
        limit = _whole_mebibytes(least_bytes * factor)
        if limit > problem.device_memory_bytes:
            return None
        latest = _first_fit(judge.limited(limit))
        if latest is None:
            return limit
        shortage, least_bytes = latest, max(limit, latest.least_bytes)
    return None


def _enough_for_closest(problem: Problem, closest: Sequence[tuple[int, Candidate]]) -> int | None:
    """A limit with which a plan was found for one of the ``closest`` candidates, each with the bytes it needs."""
    for factor in GROWTH:
        for needed_bytes, candidate in closest:
            limit = _whole_mebibytes(needed_bytes * factor)
            pinned = _pinned_to(problem, candidate).limited(limit)
            if limit <= problem.device_memory_bytes and _first_fit(Simulated(pinned)) is None:
                return limit
    return None


def _whole_mebibytes(num_bytes: float) -> int:
    return -(-int(num_bytes) // MEBIBYTE) * MEBIBYTE


def _first_fit(judge: Simulated) -> NothingFitsError | None:
    """The shortage, or None if some plan fits, however slow. A candidate for more devices takes longer, so fewer are
    tried. The plan itself is not made, because recording its schedule may take longer than finding it.
    """
    problem, closest = judge.problem, None
    budget = FIRST_RECOMPUTED if may_recompute(problem) else FIRST_FIT
    budget = budget.part(max(math.isqrt(problem.num_devices // FEW_DEVICES), 1))
    for number in range(MOST_SEARCHES):
        if number == 1:
            budget = budget.part(TIGHTER_PART)
        try:
            _first_laid_out(judge, search(judge.problem, judge, budget), problem)
        except _NoArenaFitsError as shortage:
            closest = closest or shortage
            judge = _tighter(judge, problem, shortage.of_best_bytes)
        except NothingFitsError as shortage:
            return closest or shortage
        else:
            return None
    return closest


def _pinning(problem: Problem, **pins: Any) -> Problem:
    return dataclasses.replace(problem, pinned=dataclasses.replace(problem.pinned, **pins), _divided={})


def _pinned_to(problem: Problem, candidate: Candidate) -> Problem:
    """The problem with the candidate's mesh, number of slices, schedule, parts of the head and degree of ZeRO."""
    mesh, pinned = candidate.mesh, problem.pinned
    return _pinning(
        problem,
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        micro_batch=mesh.microbatch,
        slices=pinned.slices or len(candidate.slices),
        schedule=candidate.schedule,
        head_parts=candidate.head_parts,
        zero=candidate.zero if mesh.dp > 1 else pinned.zero,
    )


def decision_of(judge: Simulated, result: Result, problem: Problem) -> Decision:
    """The result's best candidate as a Plan for ``problem``, whose limit may be above the judge's.

    If the arena of its Program does not fit, the next best candidates are tried, a few times.

    Raises `NothingFitsError` if no laid-out arena fits.
    """
    chosen, laid_out, overshoot_bytes = _first_laid_out(judge, result, problem)
    return Decision(
        plan=_explained_plan(laid_out, problem, result, place=1),
        result=result,
        program=laid_out.program,
        overshoot_bytes=overshoot_bytes,
        judge=judge,
        chosen=chosen,
    )


def _first_laid_out(judge: Simulated, result: Result, problem: Problem) -> tuple[Evaluation, _LaidOut, int]:
    """The best candidate whose arena fits, as evaluated and as laid out, and the excess of the best one's arena."""
    needs: list[tuple[int, str]] = []
    for ranked in itertools.islice(_few_alike((result.best, *result.others)), MOST_LAID_OUT):
        laid_out = _laid_out(judge, ranked, problem)
        if laid_out.peak_bytes <= problem.memory_limit_bytes:
            return ranked, laid_out, needs[0][0] - problem.memory_limit_bytes if needs else 0
        needs.append((laid_out.peak_bytes, laid_out.evaluation.candidate.label))
    raise _NoArenaFitsError(needs)


def _merged(problem: Problem, result: Result, separate: Decision | None) -> Result:
    """The results of both searches as one, for an explanation; ``result`` has the best evaluation."""
    if separate is None:
        return result
    earlier = separate.result
    others, order = (*result.others, earlier.best, *earlier.others), list(Ending)
    return dataclasses.replace(
        result,
        others=tuple(sorted(others, key=lambda evaluation: _score(problem, evaluation))),
        too_large=(*result.too_large, *earlier.too_large),
        shortages=(*result.shortages, *earlier.shortages),
        ruled_out=(*result.ruled_out, *earlier.ruled_out),
        num_outlines=result.num_outlines + earlier.num_outlines,
        num_judged=result.num_judged + earlier.num_judged,
        ending=max(result.ending, earlier.ending, key=order.index),
        overview=earlier.overview,
    )


def _few_alike(ranked: Iterable[Evaluation]) -> Iterator[Evaluation]:
    """The first `MOST_ALIKE` evaluations of each label. If their arenas do not fit, neither do those of others."""
    counts = Counter[str]()
    for evaluation in ranked:
        counts[evaluation.candidate.label] += 1
        if counts[evaluation.candidate.label] <= MOST_ALIKE:
            yield evaluation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LaidOut:
    """A candidate placed on devices by ``judge``, its Program unless that is too large, and its bytes."""

    judge: Simulated
    evaluation: Evaluation
    program: Program | None

    @property
    def peak_bytes(self) -> int:
        return max(self.evaluation.peak_bytes)


def _laid_out(judge: Simulated, simulated: Evaluation, problem: Problem) -> _LaidOut:
    """The candidate placed on devices and lowered; proved if it fits."""
    placed_judge, evaluation = placed(judge, simulated)
    program = None
    if evaluation.candidate.num_actions <= MOST_PROVED_ACTIONS and problem.software == PENSTOCK:
        divided = problem.divided(evaluation.candidate.head_parts)
        draft = draft_plan(placed_judge, evaluation)
        program = lowered(draft, action_transients(divided, evaluation.candidate))
        evaluation = _with_arena(placed_judge, evaluation, program)
        if max(evaluation.peak_bytes) <= problem.memory_limit_bytes:
            prove_plan(draft, program, _free_bytes(placed_judge, problem, evaluation), num_places=problem.num_places)
    return _LaidOut(judge=placed_judge, evaluation=evaluation, program=program)


def _explained_plan(laid_out: _LaidOut, problem: Problem, result: Result, place: int) -> Plan:
    why = explained(problem, result, laid_out.evaluation, place)
    draft = draft_plan(laid_out.judge, laid_out.evaluation)
    prediction = dataclasses.replace(
        prediction_of(laid_out.evaluation),
        peak_flops=peak_flops(problem, draft.devices),
        explanation=why.explanation,
    )
    speed = dataclasses.replace(draft, prediction=prediction).speed()
    prediction = dataclasses.replace(prediction, speed=speed)
    return dataclasses.replace(
        draft,
        program_digest=laid_out.program.digest if laid_out.program else "",
        prediction=with_interval(prediction, problem.confidence),
        reasons=why.reasons,
        alternatives=why.alternatives,
    )


def best_plans(problem: Problem, decision: Decision, count: int) -> Iterator[Plan]:
    """The decision's plan and the next best by prediction, at most ``count``, one per label (mesh, number of slices,
    schedule). Plans that differ only in boundaries are nearly as fast. Plans whose arena does not fit are skipped.
    """
    yield decision.plan
    labels, place = {decision.chosen.candidate.label}, 1
    separate = decision.separate
    ranked = decision.result.others if separate is None else (separate.chosen, *separate.result.others)
    decision = separate or decision
    for other in ranked:
        if place >= count:
            return
        label = other.candidate.label
        if label in labels:
            continue
        laid_out = _laid_out(decision.judge, other, problem)
        if laid_out.peak_bytes <= problem.memory_limit_bytes:
            labels.add(label)
            place += 1
            yield _explained_plan(laid_out, problem, decision.result, place)


def _free_bytes(judge: Simulated, problem: Problem, evaluation: Evaluation) -> list[int]:
    """Bytes that every rank has for its arena and transients."""
    candidate, order = evaluation.candidate, judge.order(evaluation.candidate)
    always = resident_bytes(problem.divided(candidate.head_parts), candidate, owners_of(candidate), order)
    return [problem.memory_limit_bytes - num_bytes for num_bytes in always.tolist()]


def draft_plan(judge: Simulated, evaluation: Evaluation) -> Plan:
    """The candidate as a Plan without explanation."""
    candidate, problem = evaluation.candidate, judge.problem
    mesh = candidate.mesh
    return Plan(
        model=problem.model,
        precision=problem.precision,
        moment_type=problem.moment_type,
        gradient_reduction_type=problem.gradient_reduction_type,
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
        prefix_by_slice=problem.prefix_by_slice(candidate.slices),
        split_slots=True,
        placement=judge.placement(mesh),
        remainder=mesh.remainder,
        remainder_slices=candidate.remainder_slices,
        head_parts=candidate.head_parts,
        recompute=candidate.recompute,
        recompute_ahead=candidate.recompute_ahead,
        recompute_inside=candidate.recompute_inside and any(candidate.recompute),
        zero=candidate.zero,
        profile_digest=problem.profile_digest,
    )


def _with_arena(judge: Simulated, evaluation: Evaluation, program: Program) -> Evaluation:
    """The evaluation with the exact bytes of the laid-out arenas."""
    arenas = tuple(rank.arena_bytes for rank in program.ranks)
    order, problem = judge.order(evaluation.candidate), judge.problem_of(evaluation.candidate)
    always = static_bytes(problem, evaluation.candidate, tuple(order.stage_ranks.tolist()), order)
    peaks = tuple(a + b for a, b in zip(always, arenas, strict=True))
    return dataclasses.replace(evaluation, peak_bytes=peaks, slot_bytes=arenas)
