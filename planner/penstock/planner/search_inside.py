"""Search for a plan whose stages recompute inside of their backwards, next to the best plan of another search.

Recomputation inside of a backward takes memory for one layer, where R takes it for all layers of a stage and slice. So
stages that recompute inside need less of it, and recompute less at equal memory; but no wait hides it. Both forms are
compared by their simulated steps. Where such a plan has memory for an R in a wait of its rank, it gets that
(`penstock.planner.recompute_windows`).

This search has a budget of its own and begins after the other has ended, so it can only improve the plan. Bounds that
are no better than that plan rule most candidates out. One is made from that plan itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.planner.budget import Budget
from penstock.planner.judge import Evaluation, Judge, Reporter
from penstock.planner.moves import NEAR, cut_inside
from penstock.planner.outlines import Outline
from penstock.planner.problem import Problem
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.search import Result, Search


def search_inside(
    problem: Problem,
    judge: Judge,
    among: Iterable[Outline],
    best: Evaluation | None,
    budget: Budget,
    reporter: Reporter | None = None,
) -> Result:
    """The evaluation of the best plan that recomputes inside of its backwards what exceeds the limit; raises
    `NothingFitsError` if none fits, or none that is better than the ``best`` of an earlier search. ``among`` are the
    outlines of that search.
    """
    relieved = [
        outline.relieved_inside
        for outline in among
        if outline.schedule != BRAIDED  # pairs need the memory for their forwards
    ]
    run = Search(problem, judge, budget, reporter or Reporter(), [*filter(None, relieved)])
    if best is not None:
        run.to_beat = run.score(best.candidate.mesh, best.step_ns)
        for candidate in cut_inside(judge.proposer.room, best.candidate):
            if run.ruled_out_by(candidate) is None and not run.fits(evaluation := run.judged(candidate)):
                run.judge_leaner(evaluation)
    run.explore(run.outlines, budget)
    if not _may_improve(run):
        raise run.nothing_fits()
    run.improve()
    run.settle()
    result = run.result()
    if run.to_beat is not None and run.rank(result.best)[0] >= run.to_beat:
        raise run.nothing_fits()
    return result


def _may_improve(run: Search) -> bool:
    """Whether any evaluation is so close to the best score that it may become better than that."""
    best = run.best_score()
    return best is not None and any(run.rank(evaluation)[0] <= NEAR * best for evaluation in run.fitting)
