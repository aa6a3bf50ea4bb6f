"""Search for a plan: outlines in the order of their estimates, candidates filtered by proved bounds, then simulation.

Every outline - a mesh, a number of slices, a schedule - has an estimate of its step and a lower bound of its bytes
(`penstock.planner.outlines`). Outlines that could fit are opened by rising estimate: they become candidates that fit
every rank by the bytes that the simulator counts. A candidate is simulated unless a proved bound rules it out. This
phase ends when the remaining estimates, corrected by the simulated steps so far, are `SLACK` times the best step. That
is not a proof.

The next phase opens the neighbours of the best outline regardless of their estimates: the next smaller and larger
number of slices and size of micro-batches, the next mesh in every direction, every schedule. It repeats from any better
outline, and then opens one slice more and one fewer. At last the boundaries between slices and between stages of the
best few kinds are moved, as long as the simulated step gets shorter.

The memory limit decides which outlines can fit, the stages of candidates whose time-balanced stages do not fit, and the
orders and estimates of schedules that adapt to the free memory. Everything else is the same with another limit.

Meshes that leave devices unused, or whose tensor parallelism spans hosts, are searched later: only their outlines with
estimates below `SLACK` times the best step are kept (`penstock.planner.problem.later_meshes`). If the objective is
time, a plan with unused devices is chosen only if its step is shorter by more than 1 / `LEAST_GAIN` (`Problem.score`).

Outlines whose ranks recompute what exceeds the limit are also searched later, those that do so inside their
backwards in a search of their own (`penstock.planner.search_inside`).

Replicas divide the optimizer state (ZeRO-1), which needs less memory. If the estimated step is shorter without that,
there are outlines for both degrees. The best few candidates are simulated both ways.

Budgets are counts, such as those of candidates and of simulated actions, so equal inputs give equal plans on any
machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.planner.braiding import MOST_SIMULATED, braided_outlines
from penstock.planner.budget import Budget, usual_budget
from penstock.planner.candidate import Candidate, at_other_zero
from penstock.planner.judge import Ending, Evaluation, Judge, NothingFitsError, Reporter, RuledOut
from penstock.planner.memory_fit import Shortage
from penstock.planner.moves import (
    MOST_PRICES,
    STEPS,
    Key,
    best_of_kinds,
    by_key,
    closest_of_kinds,
    key_of,
    kind_of,
    moves,
    neighbours,
    other_orders,
    recut,
    relieved_of,
    relieving,
    similar_groups,
)
from penstock.planner.outlines import Outline, Overview, outlines, outlines_of, owners_of_stages, slice_counts
from penstock.planner.problem import Mesh, Problem, later_meshes, zero_degrees
from penstock.planner.recompute import may_recompute

SLACK = 1.05
"""Tolerance for estimates above their steps: with few micro-batches over uneven stages they are up to 7 % above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The best evaluation, the others that fit from best to worst, those that do not fit, and why the search ended."""

    best: Evaluation
    others: tuple[Evaluation, ...]
    too_large: tuple[Evaluation, ...]
    shortages: tuple[Shortage, ...]
    ruled_out: tuple[RuledOut, ...]
    num_outlines: int
    num_judged: int
    ending: Ending
    overview: Overview


def search(problem: Problem, judge: Judge, budget: Budget | None = None, reporter: Reporter | None = None) -> Result:
    """The evaluation of the best plan; raises `NothingFitsError` if no candidate fits.

    The problem has at least one mesh, and its pins were checked (`penstock.planner.pins`).
    """
    budget = budget or usual_budget(problem.num_devices)
    run = Search(problem, judge, budget, reporter or Reporter(), outlines(problem))
    run.explore(run.outlines, budget)
    if run.fitting:
        run.explore_neighbours(2 * budget.actions)
    best_before_score = run.best_score()
    run.explore_later()
    run.recompute()
    if not run.fitting:
        raise run.nothing_fits()
    if run.best_score() != best_before_score:
        run.explore_neighbours(run.num_actions + budget.actions)
    if budget.neighbours:
        run.braid()
    run.improve()
    run.settle()
    return run.result()


VARIED_KINDS = 2
"""Number of the best kinds of plan that get better orders, because these may change which kind is best."""

SLIGHTLY_MORE = 1.05
"""If an order made for the free memory holds at most the limit times this factor, other stages are tried."""

MOST_LEANER = 3
"""How often a candidate whose order holds more bytes than estimated is retried with more recomputation."""

FAR = 1.02
"""If time-balanced stages take at least the best step times this factor, no stages that fit are searched for them."""

HOPELESS = 1.1
"""A candidate whose order takes the best step times this factor is not simulated: `settle` shortens orders by less."""

MOST_GROUPS_IN_TURN, IN_TURN = 16, 8
"""While nothing fits, up to `MOST_GROUPS_IN_TURN` groups of meshes are tried in turn, each with 1 / `IN_TURN` of the
budget, or with all of it if no mesh was searched before them.
"""

PROMISING = 1.1
"""`later_meshes` get half a budget, or a whole one if their least estimate times this factor is below the best step."""

RELIEVED_PART, NEEDED_PART, MUCH_BETTER = 12, 2, 1.5
"""Outlines that recompute get 1 / `RELIEVED_PART` of a usual budget, also in searches with less, since each may take a
second. They get 1 / `NEEDED_PART` if nothing else fits, or only steps above `MUCH_BETTER` times their least estimate.
"""

MOST_ABOVE_LEAST = 1.5
"""Outlines of pruned meshes are kept if their estimates are at most the least one times this factor."""


@dataclass(slots=True)
class Search:
    """The state of a search."""

    problem: Problem
    judge: Judge
    budget: Budget
    reporter: Reporter
    outlines: list[Outline]
    fitting: list[Evaluation] = field(default_factory=list)
    too_large: list[Evaluation] = field(default_factory=list)
    shortages: list[Shortage] = field(default_factory=list)
    evaluated: dict[Candidate, Evaluation] = field(default_factory=dict)
    ruled_out: list[RuledOut] = field(default_factory=list)
    opened: set[Outline] = field(default_factory=set)
    ratios: dict[object, float] = field(default_factory=dict)
    num_actions: int = 0
    ending: Ending = Ending.EVERYTHING
    pruned: list[list[Mesh]] = field(default_factory=list)
    """Groups of meshes of which ``outlines`` has only the promising outlines."""
    unmoved: dict[tuple[object, ...], Evaluation] = field(default_factory=dict)
    """By kind, the evaluations before their boundaries were moved."""
    compared: set[Candidate] = field(default_factory=set)
    """Candidates that were simulated only to compare degrees of ZeRO."""
    to_beat: int | None = None
    """The score of the best plan of an earlier search."""

    def score(self, mesh: Mesh, nanoseconds: int) -> int:
        """The objective: time, or device time."""
        return self.problem.score(nanoseconds, mesh.num_devices)

    def rank(self, evaluation: Evaluation) -> tuple[int, int, str]:
        """Sort key, best first; ties are broken by memory, then by label, so that the order is deterministic."""
        mesh = evaluation.candidate.mesh
        return self.score(mesh, evaluation.step_ns), max(evaluation.peak_bytes), evaluation.candidate.label

    def best_score(self) -> int | None:
        """The smallest score so far: that of an earlier search, and of evaluations that fit."""
        scores = [self.score(evaluation.candidate.mesh, evaluation.step_ns) for evaluation in self.fitting]
        return min(scores if self.to_beat is None else [*scores, self.to_beat], default=None)

    def result(self) -> Result:
        """The evaluations so far; at least one fits."""
        ranked = sorted(self.fitting, key=self.rank)
        return Result(
            best=ranked[0],
            others=tuple(ranked[1:]),
            too_large=tuple(self.too_large),
            shortages=tuple(self.shortages),
            ruled_out=tuple(self.ruled_out),
            num_outlines=len(self.opened),
            num_judged=len(self.evaluated),
            ending=self.ending,
            overview=Overview.of(self.outlines, self.problem.memory_limit_bytes),
        )

    def explore(self, among: list[Outline], budget: Budget) -> None:
        """Open outlines by rising expected score, until the rest is far above the best or the budget is spent."""
        limit, numbers = self.problem.memory_limit_bytes, itertools.count()
        could_fit = [outline for outline in among if outline.least_bytes <= limit]
        queue = [(self.score(outline.mesh, outline.estimate_ns), next(numbers), outline) for outline in could_fit]
        heapq.heapify(queue)
        while queue:
            expected, number, outline = heapq.heappop(queue)
            corrected = self.expected(outline)
            if corrected > expected and queue and corrected > queue[0][0]:
                heapq.heappush(queue, (corrected, number, outline))
                continue
            best = self.best_score()
            if best is not None and corrected >= SLACK * best:
                self._end(Ending.ESTIMATES)
                return
            if best is not None and (
                len(self.opened) >= budget.opened or not self._affordable(budget.candidates, budget.actions)
            ):
                self._end(Ending.BUDGET)
                return
            if len(self.shortages) >= budget.shortages:
                self._end(Ending.BUDGET)
                if best is None:
                    self.open_leanest(could_fit, budget)
                return
            self.open(outline)

    def _end(self, ending: Ending) -> None:
        """Record why outlines were skipped. The later of two reasons in `Ending` stays, since it guarantees less."""
        order = list(Ending)
        self.ending = max(self.ending, ending, key=order.index)

    def explore_later(self) -> None:
        """Open outlines of `later_meshes` whose estimates promise a better step than the best.

        If nothing fits yet, their groups are tried in turn.
        """
        groups = later_meshes(self.problem)
        if not self.fitting:
            part = IN_TURN if self.outlines else 1
            for group in itertools.islice(groups, MOST_GROUPS_IN_TURN):
                self._explore_more(list(outlines_of(self.problem, group)), part)
                if self.fitting:
                    break
        best = self.best_score()
        if best is None:
            return
        self.pruned = list(groups)
        if promising := self._promising(best):
            least_score = min(self.score(outline.mesh, outline.estimate_ns) for outline in promising)
            self._explore_more(promising, 1 if PROMISING * least_score <= best else 2)
        if self.pruned:
            self._end(Ending.ESTIMATES)

    def recompute(self) -> None:
        """Open outlines whose ranks recompute what exceeds the memory limit, as long as they promise a better step."""
        best, promising, others = self.best_score(), list[Outline](), list[Outline]()
        for outline in self.outlines:
            is_promising = best is None or self.score(outline.mesh, outline.estimate_ns) < SLACK * best
            (promising if is_promising else others).append(outline)
        if self.ending is Ending.EVERYTHING and any(relieved_of(others)):
            self._end(Ending.ESTIMATES)
        if relieved := list(relieved_of(promising)):
            usual = usual_budget(self.problem.num_devices).candidates
            part = max(RELIEVED_PART * min(self.budget.candidates, usual) // usual, 1)
            least_score = min(self.score(outline.mesh, outline.estimate_ns) for outline in relieved)
            is_needed = best is None or MUCH_BETTER * least_score <= best
            self._explore_more(relieved, min(part, NEEDED_PART) if is_needed else part)

    def relieve(self) -> None:
        """Add all relieved outlines to ``outlines``."""
        known = {outline for outline in self.outlines if outline.recomputes}
        self.outlines += [outline for outline in relieved_of(self.outlines) if outline not in known]

    def _promising(self, best: int) -> list[Outline]:
        """Outlines of ``pruned`` meshes that may be better than ``best`` and are not far above the best among them."""
        most_score, limit = SLACK * best, self.problem.memory_limit_bytes
        opened: list[Outline] = []

        def most_ns(mesh: Mesh) -> float:
            return self.problem.longest_ns(most_score, mesh.num_devices)

        for outline in outlines_of(self.problem, itertools.chain.from_iterable(self.pruned), most_ns):
            opened.append(outline)
            if outline.least_bytes <= limit:
                most_score = min(most_score, MOST_ABOVE_LEAST * self.score(outline.mesh, outline.estimate_ns))
        return [outline for outline in opened if self.score(outline.mesh, outline.estimate_ns) <= most_score]

    def _explore_more(self, more_outlines: list[Outline], part: int) -> None:
        """Open outlines with a ``part``-th of the budget on top of the spent one."""
        self.outlines = [*self.outlines, *more_outlines]
        more_budget = replace(
            self.budget,
            candidates=len(self.evaluated) + self.budget.candidates // part,
            opened=len(self.opened) + self.budget.opened // part,
            shortages=len(self.shortages) + self.budget.shortages // part,
            lean_shortages=self.budget.lean_shortages // part,
            actions=self.num_actions + self.budget.actions // part,
        )
        self.explore(more_outlines, more_budget)

    def expected(self, outline: Outline) -> int:
        """Its estimated score, corrected by a fraction of the error of the most similar outlines."""
        known_ratios = ((trust, self.ratios[group]) for trust, group in similar_groups(outline) if group in self.ratios)
        trust, ratio = next(known_ratios, (0.0, 1.0))
        return round((1 + trust * (ratio - 1)) * self.score(outline.mesh, outline.estimate_ns))

    def open_leanest(self, roomy: list[Outline], budget: Budget) -> None:
        """Open outlines with small memory bounds until some fit, since estimates led to none: half of the budget by
        rising estimate, of bounds that are closer to the least than to the limit, the rest by rising bound.
        """
        leanest = sorted(roomy, key=lambda outline: outline.least_bytes)
        halfway = (leanest[0].least_bytes + self.problem.memory_limit_bytes) / 2 if leanest else 0
        lean = [outline for outline in leanest if outline.least_bytes <= halfway and budget.lean_fits > 1]
        lean.sort(key=lambda outline: self.score(outline.mesh, outline.estimate_ns))
        for among, part in ((lean, 2), (leanest, 1)):
            most_shortages = len(self.shortages) + budget.lean_shortages // part
            for outline in among:
                if len(self.shortages) >= most_shortages or len(self.fitting) >= budget.lean_fits:
                    break
                self.open(outline)

    def open(self, outline: Outline) -> None:
        """Simulate the outline's candidates, or record the bounds that rule them out."""
        if outline in self.opened:
            return
        self.opened.add(outline)
        num_candidates = 0
        for candidate in self.judge.proposer.candidates(outline, self._may_be_better, self._far_ns):
            if isinstance(candidate, Shortage):
                self.shortages.append(candidate)
                self.reporter.no_stages_fit(candidate)
                continue
            num_candidates += 1
            ruled_out = self._ruled_out(candidate)
            if ruled_out is not None:
                self.ruled_out.append(ruled_out)
            is_cut = outline.mesh.pp == 1 and len(candidate.slices) > outline.num_slices
            step_ns = self._judged_or_relieved(candidate, outline) if ruled_out is None else ruled_out.bound_ns
            is_alike = not is_cut and any(candidate.recompute) >= outline.recomputes
            if is_alike and (ruled_out is None or ruled_out.of_order):
                self._learn(outline, step_ns)
        self.reporter.opened(outline.mesh, num_candidates)

    def _judged_or_relieved(self, candidate: Candidate, outline: Outline) -> int:
        """Simulate the candidate and return its step in nanoseconds.

        If its order exceeds the limit slightly, stages whose fullest rank has one unit less are simulated as well: an
        order's bytes are estimated before messages are known, which may need more than the estimated margin. Candidates
        that recompute get more recomputation instead.
        """
        evaluation = self.judged(candidate)
        if not self.fits(evaluation) and outline.recomputes:
            self._judge_leaner(evaluation)
        elif (
            not self.fits(evaluation) and max(evaluation.peak_bytes) <= SLIGHTLY_MORE * self.problem.memory_limit_bytes
        ):
            owners = owners_of_stages(self.problem, candidate.mesh, candidate.schedule)
            for move in relieving(candidate, self.problem, owners, evaluation.peak_bytes):
                moved = self.judge.proposer.memory_fit.moved(move)
                if moved is not None and self._ruled_out(moved) is None:
                    self.judged(moved)
        return evaluation.step_ns

    def _judge_leaner(self, latest: Evaluation) -> None:
        """Simulate the candidate with more recomputation, by as many bytes as ranks exceeded the limit, a few times."""
        lacking_bytes, candidate, limit = (
            [0] * len(latest.peak_bytes),
            latest.candidate,
            self.problem.memory_limit_bytes,
        )
        for _ in range(MOST_LEANER):
            lacking_bytes = [
                lacking + max(peak - limit, 0) for lacking, peak in zip(lacking_bytes, latest.peak_bytes, strict=True)
            ]
            leaner = self.judge.proposer.memory_fit.leaner(candidate, lacking_bytes)
            if leaner is None or self._ruled_out(leaner) is not None:
                return
            latest = self.judged(leaner)
            if self.fits(latest):
                return

    def _far_ns(self, mesh: Mesh) -> float:
        """Steps of at least this length on the mesh are far from the best."""
        best = self.best_score()
        return math.inf if best is None else self.problem.longest_ns(FAR * best, mesh.num_devices)

    def _may_be_better(self, balanced: Candidate) -> bool:
        """Whether a bound does not rule out the time-balanced stages; stages that fit are hardly ever faster."""
        bound_ns = 0 if self.best_score() is None else self.judge.bound_ns(balanced)
        if bound_ns < self._far_ns(balanced.mesh):
            return True
        self.ruled_out.append(RuledOut(candidate=balanced, bound_ns=bound_ns))
        return False

    def _ruled_out(self, candidate: Candidate) -> RuledOut | None:
        """The bound that rules the candidate out; None if it has to be simulated."""
        best = self.best_score()
        if best is None:
            return None
        bound_ns = self.judge.bound_ns(candidate)
        if self.score(candidate.mesh, bound_ns) >= best:
            return RuledOut(candidate=candidate, bound_ns=bound_ns)
        order = self.judge.order_bound(candidate)
        if order is not None and self.score(candidate.mesh, order.step_ns) >= HOPELESS * best:
            self.num_actions += order.num_actions
            return RuledOut(candidate=candidate, bound_ns=order.step_ns, of_order=True)
        return None

    def _learn(self, outline: Outline, step_ns: int) -> None:
        """Remember the smallest ratio of a simulated step to its estimate, for every group of similar outlines."""
        ratio = max(step_ns / max(outline.estimate_ns, 1), 1.0)
        for _, group in similar_groups(outline):
            self.ratios[group] = min(self.ratios.get(group, ratio), ratio)

    def explore_neighbours(self, actions: int) -> None:
        """Open the neighbours of the best outline regardless of their estimates, and repeat from any better outline. At
        last open outlines with one slice more and one fewer if the list lacks them. ``actions`` limits the total of
        simulated actions.
        """
        if any(any(evaluation.candidate.recompute) for evaluation in self.fitting):
            self.relieve()
        outlines_by_key = by_key(self.outlines)
        most_candidates, visited = len(self.evaluated) + self.budget.neighbours, set[object]()
        while self._affordable(most_candidates, actions):
            best = min(self.fitting, key=self.rank).candidate
            key = (best.mesh, len(best.slices), best.schedule, best.head_parts, any(best.recompute))
            if key in visited:
                for neighbour in self._adjacent_slicings(best, outlines_by_key):
                    self.open(neighbour)
                return
            visited.add(key)
            for group in [group for group in self.pruned if best.mesh in group]:
                self.pruned.remove(group)
                outlines_by_key = by_key(outlines_of(self.problem, group)) | outlines_by_key
            for keys in neighbours(best, outlines_by_key):
                around = [outline for key in keys for outline in outlines_by_key.get(key, ())]
                for neighbour in sorted(
                    around, key=lambda neighbour: self.score(neighbour.mesh, neighbour.estimate_ns)
                ):
                    if (
                        self._affordable(most_candidates, actions)
                        and neighbour.least_bytes <= self.problem.memory_limit_bytes
                    ):
                        self.open(neighbour)

    def _adjacent_slicings(self, best: Candidate, outlines_by_key: Mapping[Key, list[Outline]]) -> list[Outline]:
        """Outlines with one slice fewer and one more than the best; their estimates are taken to equal that of the
        best.
        """
        mesh, num_slices, rest = best.mesh, len(best.slices), (best.schedule, best.head_parts, any(best.recompute))
        same_kind = outlines_by_key.get((mesh.dp, mesh.tp, mesh.pp, mesh.microbatch, num_slices, *rest), [])
        if len(slice_counts(self.problem, mesh.pp)) == 1:
            return []
        most_slices = self.problem.sequence_length // self.problem.quantum
        counts = [count for count in (num_slices - 1, num_slices + 1) if 1 <= count <= most_slices]
        others = [replace(outline, num_slices=count) for count in counts for outline in same_kind]
        return [outline for outline in others if key_of(outline) not in outlines_by_key]

    def _affordable(self, candidates: int, actions: int) -> bool:
        """Whether another simulation is within the limits of candidates and of actions."""
        return len(self.evaluated) < candidates and self.num_actions < actions

    def judged(self, candidate: Candidate) -> Evaluation:
        """The candidate's evaluation: simulated once, then filed by whether it fits."""
        if candidate in self.evaluated:
            return self.evaluated[candidate]
        evaluation = self.judge.evaluate(candidate)
        self.evaluated[candidate] = evaluation
        self.num_actions += evaluation.num_actions
        self.reporter.judged(evaluation, self.file(evaluation))
        return evaluation

    def fits(self, evaluation: Evaluation) -> bool:
        """Whether every rank stays within the limit."""
        return max(evaluation.peak_bytes) <= self.problem.memory_limit_bytes

    def braid(self) -> None:
        """Open outlines with pairs by rising estimate, until an estimate is no better than the best score."""
        ranked, num_simulated = [evaluation.candidate for evaluation in sorted(self.fitting, key=self.rank)], 0
        for outline in braided_outlines(self.problem, self.outlines, ranked, self.best_score() or 0):
            best_score, num_evaluated_before = self.best_score() or 0, len(self.evaluated)
            if num_simulated == MOST_SIMULATED or self.score(outline.mesh, outline.estimate_ns) >= best_score:
                break
            self.open(outline)
            num_simulated += len(self.evaluated) > num_evaluated_before

    def improve(self) -> None:
        """Improve the best candidate of the best few kinds: this may change which kind is best."""
        for best in self._best_kinds():
            self._compare_zero(best)
        for best in [best for best in self._best_kinds() if any(best.candidate.recompute)][:VARIED_KINDS]:
            self._price_exposed(best)
        most_actions = self.num_actions + self.budget.moved_actions
        for best in self._best_kinds():
            self.unmoved[kind_of(best.candidate)] = best
            self._improve(best, most_actions)

    def _price_exposed(self, best: Evaluation) -> None:
        """Cut stages again with recomputation priced by its exposed share, as long as the step gets shorter."""
        for _ in range(MOST_PRICES if may_recompute(self.problem) else 0):
            exposed = self.judge.exposed_shares(best.candidate)
            cuts = recut(self.judge.proposer.memory_fit, best.candidate, exposed)
            evaluations = [self.judged(candidate) for candidate in cuts if self._ruled_out(candidate) is None]
            better = min(filter(self.fits, evaluations), key=self.rank, default=best)
            if self.rank(better) >= self.rank(best):
                return
            best = better

    def _compare_zero(self, evaluation: Evaluation) -> None:
        """Simulate and file the same candidate at the other degree of ZeRO. Estimates ignore how much of a reduction is
        hidden, and more of an all-reduce than of its two halves may be.
        """
        candidate = evaluation.candidate
        if len(zero_degrees(self.problem, candidate.mesh.dp)) == 1:
            return
        other = at_other_zero(candidate)
        other = self.judge.proposer.memory_fit.moved(other) or other
        if other not in self.evaluated and other not in self.compared:
            self.compared.add(other)
            self.file(self.judge.evaluate(other))

    def _best_kinds(self) -> list[Evaluation]:
        """The best evaluation of each of the best few kinds: mesh, schedule and number of slices."""
        return best_of_kinds(sorted(self.fitting, key=self.rank), self.budget.starts)

    def _improve(self, best: Evaluation, most_actions: int) -> None:
        """Move boundaries of the best candidate, largest steps first, as long as the simulated step gets shorter."""
        most_candidates = len(self.evaluated) + self.budget.moves
        for step in STEPS:
            previous = None
            while best is not previous:
                previous = best
                for move in moves(best.candidate, self.problem, step):
                    moved = move(best.candidate)
                    moved = None if moved is None else self.judge.proposer.memory_fit.moved(moved)
                    if moved is None:
                        continue
                    if len(self.evaluated) >= most_candidates or self.num_actions >= most_actions:
                        return
                    if self.score(moved.mesh, self.judge.bound_ns(moved)) >= self.rank(best)[0]:
                        continue
                    evaluation = self.judged(moved)
                    if self.fits(evaluation) and self.rank(evaluation) < self.rank(best):
                        best = evaluation

    def settle(self) -> None:
        """Search better orders for the best few kinds, and simulate the best in full until it stays the best.

        Boundaries were moved with quickly made orders; better orders may suit the unmoved boundaries.
        """
        settled: set[Candidate] = set()
        tried: set[Candidate] = set()
        for evaluation in self._best_kinds()[:VARIED_KINDS]:
            self._vary(evaluation, tried)
            unmoved = self.unmoved.get(kind_of(evaluation.candidate), evaluation)
            if unmoved.candidate not in tried and self._ruled_out(unmoved.candidate) is None:
                self._vary(unmoved, tried)
        while (best := min(self.fitting, key=self.rank)).candidate not in settled:
            settled.add(best.candidate)
            if not best.is_exact:
                self.fitting.remove(best)
                self.file(self.judge.evaluate(best.candidate, in_full=True))
            self._compare_zero(best)
            self._vary(best, tried)
            if not self.fitting:
                raise self.nothing_fits()

    def _vary(self, evaluation: Evaluation, tried: set[Candidate]) -> None:
        """Simulate other orders of its schedule, unless they were tried before."""
        candidate = evaluation.candidate
        tried.add(candidate)
        for other in other_orders(self.judge, self.problem, candidate):
            if other not in tried:
                tried.add(other)
                other_evaluation = self.judge.evaluate(other)
                if self.fits(other_evaluation) and other_evaluation.step_ns < evaluation.step_ns:
                    self.fitting.append(other_evaluation)

    def file(self, evaluation: Evaluation) -> bool:
        """Add it to the evaluations that fit or to those that do not; return whether it fits."""
        fits = self.fits(evaluation)
        (self.fitting if fits else self.too_large).append(evaluation)
        return fits

    def nothing_fits(self) -> NothingFitsError:
        """The error that names the candidate or outline closest to fitting."""
        limit_bytes = self.problem.memory_limit_bytes
        opened = [(limit_bytes + shortage.missing_bytes, shortage.candidate) for shortage in self.shortages]
        opened += [(max(evaluation.peak_bytes), evaluation.candidate) for evaluation in self.too_large]
        too_large = [outline for outline in self.outlines if outline.least_bytes > limit_bytes]
        needs = [num_bytes for num_bytes, _ in opened] + [outline.least_bytes for outline in too_large]
        least_bytes = min(needs, default=0)
        labels = [candidate.label for num_bytes, candidate in opened if num_bytes == least_bytes]
        labels += [outline.label for outline in too_large if outline.least_bytes == least_bytes]
        return NothingFitsError(least_bytes, min(labels, default=""), closest_of_kinds(opened))
