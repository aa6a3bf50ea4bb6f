"""Search for a plan whose stages recompute inside their backwards, next to the best plan of another search.

Recomputation inside a backward takes memory for one layer, where R takes it for all layers of a stage and slice. So
stages that recompute inside need less memory and recompute less within the same limit, but no wait hides their
recomputation. Both forms are compared by their simulated steps. Where such a plan has memory for an R in a wait of its
rank, it gets that (`penstock.planner.recompute_windows`).

This search has a budget of its own and begins after the other has ended, so it can only improve the plan. If the other
found plans, this one tries only meshes and schedules of plans that recompute and are close to the best, since the two
forms differ by less. If nothing fits by R, it tries all, which may take as long as the search before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.planner.budget import Budget
from penstock.planner.judge import Evaluation, Judge, Reporter
from penstock.planner.moves import NEAR, inside_of
from penstock.planner.outlines import Outline, outlines, outlines_of
from penstock.planner.problem import Mesh, Problem
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.search import Result, Search

MOST_KINDS = 3
"""Maximum number of pairs of mesh and schedule of plans with R that are tried with recomputation inside."""


def search_inside(
    problem: Problem, judge: Judge, ranked: Sequence[Evaluation], budget: Budget, reporter: Reporter | None = None
) -> Result | None:
    """The result of a search for plans that recompute inside their backwards what exceeds the limit; None if none fits,
    or none is better than the first of ``ranked``.

    ``ranked`` are evaluations of an earlier search that fit, the first of which is its plan; empty if nothing fitted.
    """
    run = Search(problem, judge, budget, reporter or Reporter(), [])
    if ranked:
        run.to_beat = run.score(ranked[0].candidate.mesh, ranked[0].step_ns)
        near = _near(ranked, problem)
        alike = outlines_of(problem, dict.fromkeys(mesh for mesh, _ in near))
        run.outlines = _relieved(outline for outline in alike if (outline.mesh, outline.schedule) in near)
    else:
        run.outlines = _relieved(outlines(problem))
    run.explore(run.outlines, budget)
    if not _may_improve(run):
        return None
    run.improve()
    run.settle()
    result = run.result()
    return None if run.to_beat is not None and run.rank(result.best)[0] >= run.to_beat else result


def _relieved(among: Iterable[Outline]) -> list[Outline]:
    """The outlines with recomputation inside, but for pairs, which need the memory for their forwards."""
    relieved = (outline.relieved_inside for outline in among if outline.schedule != BRAIDED)
    return [outline for outline in relieved if outline is not None]


def _near(ranked: Sequence[Evaluation], problem: Problem) -> Sequence[tuple[Mesh, object]]:
    """Meshes and schedules of the first kinds of ``ranked`` that recompute and are close to its first."""

    def score(evaluation: Evaluation) -> int:
        return problem.score(evaluation.step_ns, evaluation.candidate.mesh.num_devices)

    close = (evaluation.candidate for evaluation in ranked if score(evaluation) <= NEAR * score(ranked[0]))
    kinds = ((candidate.mesh, inside_of(candidate).schedule) for candidate in close if any(candidate.recompute))
    return list(dict.fromkeys(kinds))[:MOST_KINDS]


def _may_improve(run: Search) -> bool:
    """Whether any evaluation is so close to the best score that it may become better than that."""
    best = run.best_score()
    return best is not None and any(run.rank(evaluation)[0] <= NEAR * best for evaluation in run.fitting)
