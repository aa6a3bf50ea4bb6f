"""The search: outlines by their estimate, candidates by their bound, and the simulator judges.

Every outline - a mesh, a number of slices, a schedule - has an estimate of its step and a bound of its bytes
(`penstock.planner.outlines`). Those that could fit are made into candidates by rising estimate, each of which fits its
rank by the bytes that the simulator counts, and is simulated unless a proved bound rules it out. The walk ends when the
estimates that are left, corrected by what was simulated so far, are `SLACK` above the best step. That is no proof.

Then the neighbours of the best outlines are tried, whatever their estimates: one slice more or fewer, half or twice as
many, the next mesh in every direction, every schedule; and again from whatever is better. At last the boundaries of the
best few kinds between slices and between stages are moved, as long as the simulator agrees.

The limit decides which outlines can fit, how stages are cut that do not fit as time alone would have them, and the
orders and estimates of schedules that are told their room. All else is looked at as it would be with another limit.

Meshes that leave devices unused, or whose tensor parallelism spans hosts, come after that: only those outlines are kept
whose estimates are below the best step by then (`penstock.planner.problem.later_meshes`). What is best without them is
never lost by them.

So do outlines whose ranks make again what they have no room to keep.

Replicas divide the state of the optimizer (ZeRO-1) unless the estimate of a step is shorter where they do not: that
needs less memory. The best few are simulated both ways.

Budgets are counts of simulated actions, so equal inputs give equal plans on any machine.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from penstock.planner.braiding import MOST_SIMULATED, braided_outlines
from penstock.planner.budget import Budget, usual_budget
from penstock.planner.candidate import Candidate, at_other_zero
from penstock.planner.judge import Evaluation, Judge, Reporter
from penstock.planner.moves import STEPS, Key, key_of, kind_of, moves, neighbours, relieving
from penstock.planner.outlines import Outline, Overview, outlines, outlines_of, owners_of_stages, slice_counts
from penstock.planner.problem import Mesh, Problem, later_meshes, zero_degrees
from penstock.planner.room import Shortage
from penstock.planner.schedules.zero_bubble import H1

SLACK = 1.05
"""An allowance for estimates above their steps. Those of few micro-batches over uneven stages are up to 7 % above."""


class Ending(enum.StrEnum):
    """Why a search looked no further."""

    EVERYTHING = "all that could fit were looked at"
    ESTIMATES = "by their estimates no others come near"
    BUDGET = "others were not looked at when the budget was spent"


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """A candidate that was not simulated: its step is no shorter than this bound, which another was by then.

    It is a bound of the order that was made for it if ``of_order``, else of all orders.
    """

    candidate: Candidate
    bound_ns: int
    of_order: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The best evaluation, all others that fit from best to worst, those that did not, and how the search ended."""

    best: Evaluation
    others: tuple[Evaluation, ...]
    too_large: tuple[Evaluation, ...]
    shortages: tuple[Shortage, ...]
    ruled_out: tuple[RuledOut, ...]
    num_outlines: int
    num_judged: int
    ending: Ending
    overview: Overview


class NothingFitsError(Exception):
    """No candidate fits; the one that comes closest, ``label``, needs at least ``least_bytes`` on a rank. Where no mesh
    can have the stages or the parts of the head that are pinned, there is none, and no label.
    """

    def __init__(self, least_bytes: int, label: str) -> None:
        super().__init__(f"{label} needs {least_bytes} bytes")
        self.least_bytes = least_bytes
        self.label = label


def search(problem: Problem, judge: Judge, budget: Budget | None = None, reporter: Reporter | None = None) -> Result:
    """The best plan's evaluation; raises `NothingFitsError` where that is so.

    The problem has at least one mesh, and its pins were checked (`penstock.planner.pins`).
    """
    budget = budget or usual_budget(problem.num_devices)
    run = _Search(problem, judge, budget, reporter or Reporter(), outlines(problem))
    run.explore(run.outlines, budget)
    if run.fitting:
        run.look_around(2 * budget.actions)
    best = run.best_score()
    run.explore_later()
    run.recompute()
    if not run.fitting:
        raise run.nothing_fits()
    if run.best_score() != best:
        run.look_around(run.num_actions + budget.actions)
    run.braid()
    run.improve()
    run.settle()
    ranked = sorted(run.fitting, key=run.rank)
    return Result(
        best=ranked[0],
        others=tuple(ranked[1:]),
        too_large=tuple(run.too_large),
        shortages=tuple(run.shortages),
        ruled_out=tuple(run.ruled_out),
        num_outlines=len(run.opened),
        num_judged=len(run.seen),
        ending=run.ending,
        overview=Overview.of(run.outlines, problem.memory_limit_bytes),
    )


VARIED_KINDS = 2
"""Of so many of the best kinds of plan better orders are looked for, since these may change which kind is best."""

SLIGHTLY_MORE = 1.05
"""Of an order that was made for its room, and holds so many times the limit at most, other stages are tried."""

MOST_LEANER = 3
"""So often more is made again of a candidate whose order holds more than was counted."""

AHEAD = (2, 4, 8)
"""Actions before their backwards at which recomputations are tried. More fill more waits, and hold more bytes."""

FAR = 1.02
"""Where stages balanced by time take at least so many times the best step, none are looked for that fit."""

HOPELESS = 1.1
"""A candidate whose order takes so many times the best step is not simulated: `settle` shortens orders by less."""

MOST_GROUPS_IN_TURN, IN_TURN = 16, 8
"""Groups of meshes that are tried one after the other as long as nothing fits, each with this part of the budget."""

PROMISING = 1.1
"""`later_meshes` have half of a budget, or a whole one if their least estimate is so many times below the best step."""

RELIEVED_PART = 12
"""Outlines that recompute have this part of a budget where others fit: each may take a second."""

MOST_ABOVE_LEAST = 1.5
"""Of their outlines those are kept whose estimates are at most so many times the least."""


@dataclass(slots=True)
class _Search:
    problem: Problem
    judge: Judge
    budget: Budget
    reporter: Reporter
    outlines: list[Outline]
    fitting: list[Evaluation] = field(default_factory=list)
    too_large: list[Evaluation] = field(default_factory=list)
    shortages: list[Shortage] = field(default_factory=list)
    seen: dict[Candidate, Evaluation] = field(default_factory=dict)
    ruled_out: list[RuledOut] = field(default_factory=list)
    opened: set[Outline] = field(default_factory=set)
    ratios: dict[object, float] = field(default_factory=dict)
    num_actions: int = 0
    ending: Ending = Ending.EVERYTHING
    pruned: list[list[Mesh]] = field(default_factory=list)
    """Groups of meshes of which ``outlines`` has only those that promised something."""
    unmoved: dict[tuple[object, ...], Evaluation] = field(default_factory=dict)
    """By their kind those whose boundaries were moved, as they were before."""
    compared: set[Candidate] = field(default_factory=set)
    """Those that were simulated for their degree of ZeRO alone."""

    def score(self, mesh: Mesh, nanoseconds: int) -> int:
        """What is minimised: time, or device time."""
        return self.problem.score(nanoseconds, mesh.num_devices)

    def rank(self, evaluation: Evaluation) -> tuple[int, int, str]:
        """Better first; equal scores by memory, then by label, so that the order never depends on chance."""
        mesh = evaluation.candidate.mesh
        return self.score(mesh, evaluation.step_ns), max(evaluation.peak_bytes), evaluation.candidate.label

    def best_score(self) -> int | None:
        """The smallest score that fits so far."""
        return min((self.score(each.candidate.mesh, each.step_ns) for each in self.fitting), default=None)

    def explore(self, among: list[Outline], budget: Budget) -> None:
        """Open outlines by what they should take, until what is left is far above the best, or the budget is spent."""
        limit, numbers = self.problem.memory_limit_bytes, itertools.count()
        roomy = [each for each in among if each.least_bytes <= limit]
        queue = [(self.score(each.mesh, each.estimate_ns), next(numbers), each) for each in roomy]
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
                    self.open_leanest(roomy, budget)
                return
            self.open(outline)

    def _end(self, ending: Ending) -> None:
        """Note why outlines were left, unless others were left for a weaker reason."""
        order = list(Ending)
        self.ending = max(self.ending, ending, key=order.index)

    def explore_later(self) -> None:
        """Open those outlines of `later_meshes` whose estimates promise a better step than the best.

        Where nothing fits so far, groups of them are tried in turn.
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
            least = min(self.score(each.mesh, each.estimate_ns) for each in promising)
            self._explore_more(promising, 1 if PROMISING * least <= best else 2)
        if self.pruned:
            self._end(Ending.ESTIMATES)

    def recompute(self) -> None:
        """Open outlines whose ranks make again what they have no room for, as long as they promise a better step."""
        relieved = [found for each in self.outlines if (found := each.relieved) is not None]
        if relieved:
            self._explore_more(relieved, RELIEVED_PART if self.fitting else IN_TURN)

    def _promising(self, best: int) -> list[Outline]:
        """Outlines of ``pruned`` meshes that may be better than ``best``, and are not far above the best among them."""
        least, limit = SLACK * best, self.problem.memory_limit_bytes
        found: list[Outline] = []

        def most_ns(mesh: Mesh) -> float:
            return self.problem.longest_ns(least, mesh.num_devices)

        for outline in outlines_of(self.problem, itertools.chain.from_iterable(self.pruned), most_ns):
            found.append(outline)
            if outline.least_bytes <= limit:
                least = min(least, MOST_ABOVE_LEAST * self.score(outline.mesh, outline.estimate_ns))
        return [each for each in found if self.score(each.mesh, each.estimate_ns) <= least]

    def _explore_more(self, among: list[Outline], part: int) -> None:
        """Open outlines with a ``part``-th of the budget besides what was spent."""
        self.outlines = [*self.outlines, *among]
        more = replace(
            self.budget,
            candidates=len(self.seen) + self.budget.candidates // part,
            opened=len(self.opened) + self.budget.opened // part,
            shortages=len(self.shortages) + self.budget.shortages // part,
            lean_shortages=self.budget.lean_shortages // part,
            actions=self.num_actions + self.budget.actions // part,
        )
        self.explore(among, more)

    def expected(self, outline: Outline) -> int:
        """Its estimate, a part as far off as the nearest of those that are most alike."""
        known = ((part, self.ratios[each]) for part, each in _alike(outline) if each in self.ratios)
        part, ratio = next(known, (0.0, 1.0))
        return round((1 + part * (ratio - 1)) * self.score(outline.mesh, outline.estimate_ns))

    def open_leanest(self, roomy: list[Outline], budget: Budget) -> None:
        """Open those that hold the least until some fit, since estimates led to none."""
        most = len(self.shortages) + budget.lean_shortages
        for outline in sorted(roomy, key=lambda each: each.least_bytes):
            if len(self.shortages) >= most or len(self.fitting) >= budget.lean_fits:
                return
            self.open(outline)

    def open(self, outline: Outline) -> None:
        """Judge the outline's candidates, or note their bounds where these rule them out."""
        if outline in self.opened:
            return
        self.opened.add(outline)
        num_candidates = 0
        for candidate in self.judge.proposer.candidates(outline, self._is_worth_room, self._far_ns):
            if isinstance(candidate, Shortage):
                self.shortages.append(candidate)
                self.reporter.no_room(candidate)
                continue
            num_candidates += 1
            out = self._ruled_out(candidate)
            if out is not None:
                self.ruled_out.append(out)
            is_cut = outline.mesh.pp == 1 and len(candidate.slices) > outline.num_slices
            step_ns = self._judged_or_relieved(candidate, outline) if out is None else out.bound_ns
            if (out is None or out.of_order) and not is_cut:
                self._learn(outline, step_ns)
        self.reporter.opened(outline.mesh, num_candidates)

    def _judged_or_relieved(self, candidate: Candidate, outline: Outline) -> int:
        """Its step. Where its order holds a little more than the limit, stages are judged as well of which the fullest
        rank has a unit less: what an order holds is counted before there are messages, which may take more than the
        room left for them. Ranks that may recompute make more again in place of that.
        """
        found = self.judged(candidate)
        if not self.fits(found) and outline.recomputes:
            self._judge_leaner(found)
        elif not self.fits(found) and max(found.peak_bytes) <= SLIGHTLY_MORE * self.problem.memory_limit_bytes:
            owners = owners_of_stages(self.problem, candidate.mesh, candidate.schedule)
            for move in relieving(candidate, self.problem, owners, found.peak_bytes):
                moved = self.judge.proposer.room.moved(move)
                if moved is not None and self._ruled_out(moved) is None:
                    self.judged(moved)
        return found.step_ns

    def _judge_leaner(self, found: Evaluation) -> None:
        """Judge it with as much more made again as ranks lacked, a few times."""
        lacking, candidate, limit = [0] * len(found.peak_bytes), found.candidate, self.problem.memory_limit_bytes
        for _ in range(MOST_LEANER):
            lacking = [more + max(peak - limit, 0) for more, peak in zip(lacking, found.peak_bytes, strict=True)]
            leaner = self.judge.proposer.room.leaner(candidate, lacking)
            if leaner is None or self._ruled_out(leaner) is not None:
                return
            found = self.judged(leaner)
            if self.fits(found):
                return

    def _far_ns(self, mesh: Mesh) -> float:
        """Steps on the mesh that take as long are far from the best."""
        best = self.best_score()
        return math.inf if best is None else self.problem.longest_ns(FAR * best, mesh.num_devices)

    def _is_worth_room(self, balanced: Candidate) -> bool:
        """Whether stages balanced by time, which are hardly ever slower than those that fit, are not ruled out."""
        bound_ns = self.judge.bound_ns(balanced) if self.fitting else 0
        if bound_ns < self._far_ns(balanced.mesh):
            return True
        self.ruled_out.append(RuledOut(candidate=balanced, bound_ns=bound_ns))
        return False

    def _ruled_out(self, candidate: Candidate) -> RuledOut | None:
        """Why the candidate need not be simulated, if so."""
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
        """Remember how far off the estimate was, if no other was less."""
        ratio = max(step_ns / max(outline.estimate_ns, 1), 1.0)
        for _, group in _alike(outline):
            self.ratios[group] = min(self.ratios.get(group, ratio), ratio)

    def look_around(self, actions: int) -> None:
        """Open the neighbours of the best outline, and of whatever turns out to be better, whatever their estimates; at
        last, where the list has them not, the same with a slice fewer and one more. ``actions`` is the budget of all.
        """
        known = _by_key(self.outlines)
        limit, visited = len(self.seen) + self.budget.neighbours, set[object]()
        while self._affordable(limit, actions):
            best = min(self.fitting, key=self.rank).candidate
            key = (best.mesh, len(best.slices), best.schedule, best.head_parts, any(best.recompute))
            if key in visited:
                for outline in self._between(best, known):
                    self.open(outline)
                return
            visited.add(key)
            for group in [each for each in self.pruned if best.mesh in each]:
                self.pruned.remove(group)
                known = _by_key(outlines_of(self.problem, group)) | known
            for keys in neighbours(best, known):
                around = [outline for key in keys for outline in known.get(key, ())]
                for outline in sorted(around, key=lambda each: self.score(each.mesh, each.estimate_ns)):
                    if self._affordable(limit, actions) and outline.least_bytes <= self.problem.memory_limit_bytes:
                        self.open(outline)

    def _between(self, best: Candidate, known: Mapping[Key, list[Outline]]) -> list[Outline]:
        """Outlines with a slice fewer and one more than the best; their estimates are not known to differ from its."""
        mesh, count, rest = best.mesh, len(best.slices), (best.schedule, best.head_parts, any(best.recompute))
        here = known.get((mesh.dp, mesh.tp, mesh.pp, mesh.microbatch, count, *rest), [])
        if len(slice_counts(self.problem, mesh.pp)) == 1:
            return []
        most = self.problem.sequence_length // self.problem.quantum
        counts = [each for each in (count - 1, count + 1) if 1 <= each <= most]
        others = [replace(outline, num_slices=each) for each in counts for outline in here]
        return [each for each in others if key_of(each) not in known]

    def _affordable(self, candidates: int, actions: int) -> bool:
        """Whether another simulation is within these counts."""
        return len(self.seen) < candidates and self.num_actions < actions

    def judged(self, candidate: Candidate) -> Evaluation:
        """The candidate's evaluation, simulated at most once, filed by whether it fits."""
        if candidate in self.seen:
            return self.seen[candidate]
        evaluation = self.judge.evaluate(candidate)
        self.seen[candidate] = evaluation
        self.num_actions += evaluation.num_actions
        self.reporter.judged(evaluation, self.file(evaluation))
        return evaluation

    def fits(self, evaluation: Evaluation) -> bool:
        """Whether every rank stays within the limit."""
        return max(evaluation.peak_bytes) <= self.problem.memory_limit_bytes

    def braid(self) -> None:
        """Open outlines with pairs by rising estimate, until that is no better than the best."""
        ranked, num_simulated = [each.candidate for each in sorted(self.fitting, key=self.rank)], 0
        for outline in braided_outlines(self.problem, self.outlines, ranked):
            best, before = self.best_score() or 0, len(self.seen)
            if num_simulated == MOST_SIMULATED or self.score(outline.mesh, outline.estimate_ns) >= best:
                break
            self.open(outline)
            num_simulated += len(self.seen) > before

    def improve(self) -> None:
        """Improve the best candidate of each of the best few kinds: which kind is best may change by it."""
        for best in self._best_kinds():
            self._compare_zero(best)
        most_actions = self.num_actions + self.budget.moved_actions
        for best in self._best_kinds():
            self.unmoved[kind_of(best.candidate)] = best
            self._improve(best, most_actions)

    def _compare_zero(self, evaluation: Evaluation) -> None:
        """File the same at the other degree of ZeRO: estimates do not know what of a reduction is hidden, which may be
        more of a sum than of its two halves.
        """
        candidate = evaluation.candidate
        if len(zero_degrees(self.problem, candidate.mesh.dp)) == 1:
            return
        other = at_other_zero(candidate)
        other = self.judge.proposer.room.moved(other) or other
        if other not in self.seen and other not in self.compared:
            self.compared.add(other)
            self.file(self.judge.evaluate(other))

    def _best_kinds(self) -> list[Evaluation]:
        """The best of each of the best few meshes, schedules and numbers of slices."""
        kinds: dict[tuple[object, ...], Evaluation] = {}
        for each in sorted(self.fitting, key=self.rank):
            kinds.setdefault(kind_of(each.candidate), each)
        return list(kinds.values())[: self.budget.starts]

    def _improve(self, best: Evaluation, most_actions: int) -> None:
        """Move its boundaries, largest steps first, as long as the simulator finds it faster."""
        limit = len(self.seen) + self.budget.moves
        for step in STEPS:
            before = None
            while best is not before:
                before = best
                for move in moves(best.candidate, self.problem, step):
                    moved = move(best.candidate)
                    moved = None if moved is None else self.judge.proposer.room.moved(moved)
                    if moved is None:
                        continue
                    if len(self.seen) >= limit or self.num_actions >= most_actions:
                        return
                    if self.score(moved.mesh, self.judge.bound_ns(moved)) >= self.rank(best)[0]:
                        continue
                    found = self.judged(moved)
                    if self.fits(found) and self.rank(found) < self.rank(best):
                        best = found

    def settle(self) -> None:
        """Look for better orders of the best few kinds, and simulate the best in full until it stays the best.

        Boundaries were moved for quick orders: better ones may suit those from before.
        """
        settled: set[Candidate] = set()
        tried: set[Candidate] = set()
        for each in self._best_kinds()[:VARIED_KINDS]:
            self._vary(each, tried)
            before = self.unmoved.get(kind_of(each.candidate), each)
            if before.candidate not in tried and self._ruled_out(before.candidate) is None:
                self._vary(before, tried)
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
        for other in (with_h1(candidate), self.judge.best_variant(candidate), *further_ahead(self.problem, candidate)):
            if other not in tried:
                tried.add(other)
                found = self.judge.evaluate(other)
                if self.fits(found) and found.step_ns < evaluation.step_ns:
                    self.fitting.append(found)

    def file(self, evaluation: Evaluation) -> bool:
        """Keep it among those that fit or those that do not, and say which."""
        fits = self.fits(evaluation)
        (self.fitting if fits else self.too_large).append(evaluation)
        return fits

    def nothing_fits(self) -> NothingFitsError:
        """How close the closest came."""
        limit = self.problem.memory_limit_bytes
        needs = [(limit + each.missing_bytes, each.candidate.label) for each in self.shortages]
        needs += [(max(each.peak_bytes), each.candidate.label) for each in self.too_large]
        needs += [(each.least_bytes, each.label) for each in self.outlines if each.least_bytes > limit]
        return NothingFitsError(*min(needs, default=(0, "")))


def _alike(outline: Outline) -> Iterator[tuple[float, object]]:
    """Groups of outlines whose estimates are off for the same reasons, the narrowest first, each with the part of it
    that is believed: of the same mesh, of the same division of the devices, and of any. Estimates of pipelines, which
    wait, say nothing of meshes without one, and those with a divided head nothing of a whole one.
    """
    mesh, kind = outline.mesh, (outline.schedule, outline.head_parts > 1, outline.recomputes)
    yield 1 / 2, (mesh, kind)
    yield 1 / 2, (mesh.dp, mesh.tp, mesh.pp, kind)
    yield 1 / 4 if mesh.pp > 1 else 0.0, kind


def further_ahead(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with its recomputations earlier before their backwards, where they run apart from these."""
    if any(candidate.recompute) and not problem.software.recomputes_on_demand:
        for ahead in AHEAD:
            yield replace(candidate, recompute_ahead=ahead)


def _by_key(outlines: Iterable[Outline]) -> dict[Key, list[Outline]]:
    by_key: dict[Key, list[Outline]] = {}
    for outline in outlines:
        by_key.setdefault(key_of(outline), []).append(outline)
    return by_key


def with_h1(candidate: Candidate) -> Candidate:
    """The candidate with H1's own order if it runs one of ``zb``'s, which were compared over few micro-batches only."""
    return replace(candidate, variant=H1) if candidate.schedule == "zb" else candidate
