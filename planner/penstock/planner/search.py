"""The search: meshes and candidates in one queue by bound, the simulator judges, the bound ends it.

Best-first branch and bound: a mesh's bound opens it into candidates, a candidate's bound has it simulated, and the
search ends when the smallest bound left is no better than the best simulated step. A candidate's bound is proved, a
mesh's is an estimate. Budgets are counts, so equal inputs give equal plans. The best few's slice and stage boundaries
are then moved while the simulator agrees.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.core.bubble import Lost
from penstock.core.job import Objective
from penstock.planner.candidates import Candidate, Proposer, Shortage
from penstock.planner.problem import Mesh, Problem, meshes
from penstock.planner.schedules.zero_bubble import H1


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much the search may do, in counts. ``actions`` are compute actions simulated, over all candidates.

    Boundaries are moved from the best ``starts`` kinds of plan, up to ``moves`` times each, and together for as long as
    ``moved_actions`` last.
    """

    meshes: int = 24
    candidates: int = 160
    actions: int = 4_000_000
    moves: int = 60
    starts: int = 4
    moved_actions: int = 250_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What the simulator said of a candidate: the step, where the busiest rank's time goes, and bytes per rank."""

    candidate: Candidate
    step_ns: int
    compute_ns: int
    bubble_ns: int
    communication_ns: int
    reduction_ns: int
    optimizer_ns: int
    peak_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    num_actions: int
    """Compute actions that were simulated."""
    is_exact: bool = True
    """Whether a long step was simulated in full, or proved to repeat what was simulated."""
    bubble: Lost | None = None
    waiting: Lost | None = None
    """Over all ranks, as shares of the step."""


class Judge(Protocol):
    """What the search asks: bounds, and the simulation itself."""

    def mesh_bound_ns(self, mesh: Mesh) -> int:
        """Hardly any candidate of the mesh has a shorter step: an estimate."""
        ...

    def bound_ns(self, candidate: Candidate) -> int:
        """The candidate's step is no shorter: a proof."""
        ...

    def least_bytes(self, candidate: Candidate) -> int:
        """What the fullest rank needs at least, without simulating."""
        ...

    def leanest(self) -> Iterator[Candidate]:
        """Candidates that hold less than those proposed."""
        ...

    def evaluate(self, candidate: Candidate, *, in_full: bool = False) -> Evaluation:
        """Simulate it, where it repeats itself perhaps not ``in_full``."""
        ...


class Reporter:
    """Told what the search does; does nothing. Subclasses show progress."""

    def opened(self, mesh: Mesh, num_candidates: int) -> None:
        """A mesh was opened into candidates."""

    def no_room(self, shortage: Shortage) -> None:
        """A mesh has no partition that fits in memory."""

    def judged(self, evaluation: Evaluation, fits: bool) -> None:
        """A candidate was simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The best evaluation, all others that fit from best to worst, those that did not, and how the search ended."""

    best: Evaluation
    others: tuple[Evaluation, ...]
    too_large: tuple[Evaluation, ...]
    shortages: tuple[Shortage, ...]
    num_meshes: int
    num_judged: int
    exhausted: bool
    """Whether bounds ended the search, and not the budget."""


class NothingFitsError(Exception):
    """No candidate fits; the one that comes closest, ``label``, needs at least ``least_bytes`` on a rank."""

    def __init__(self, least_bytes: int, label: str) -> None:
        super().__init__(f"{label} needs {least_bytes} bytes")
        self.least_bytes = least_bytes
        self.label = label


def search(problem: Problem, judge: Judge, budget: Budget | None = None, reporter: Reporter | None = None) -> Result:
    """The best plan's evaluation; raises `NothingFitsError` where that is so.

    The problem has at least one mesh, and its pins were checked (`penstock.planner.pins`).
    """
    run = _Search(problem, judge, budget or Budget(), reporter or Reporter())
    run.explore()
    if not run.fitting:
        run.squeeze()
    if not run.fitting:
        raise run.nothing_fits()
    run.improve()
    run.settle()
    ranked = sorted(run.fitting, key=run.rank)
    return Result(
        best=ranked[0],
        others=tuple(ranked[1:]),
        too_large=tuple(run.too_large),
        shortages=tuple(run.shortages),
        num_meshes=run.num_meshes,
        num_judged=len(run.seen),
        exhausted=run.exhausted,
    )


@dataclass(slots=True)
class _Search:
    problem: Problem
    judge: Judge
    budget: Budget
    reporter: Reporter
    fitting: list[Evaluation] = field(default_factory=list)
    too_large: list[Evaluation] = field(default_factory=list)
    shortages: list[Shortage] = field(default_factory=list)
    seen: dict[Candidate, Evaluation] = field(default_factory=dict)
    num_meshes: int = 0
    num_actions: int = 0
    exhausted: bool = False

    def score(self, mesh: Mesh, nanoseconds: int) -> int:
        """What is minimised: time, or device time."""
        return nanoseconds * (mesh.num_devices if self.problem.objective is Objective.COST else 1)

    def rank(self, evaluation: Evaluation) -> tuple[int, int, str]:
        """Better first; equal scores by memory, then by label, so that the order never depends on chance."""
        mesh = evaluation.candidate.mesh
        return self.score(mesh, evaluation.step_ns), max(evaluation.peak_bytes), evaluation.candidate.label

    def best_score(self) -> int | None:
        """The smallest score that fits so far."""
        return min((self.rank(each)[0] for each in self.fitting), default=None)

    def explore(self) -> None:
        """Open and judge by rising bound until the bound or the budget ends it."""
        number = itertools.count()
        proposer = Proposer(self.problem)
        queue: list[tuple[int, int, Mesh | Candidate]] = [
            (self.score(mesh, self.judge.mesh_bound_ns(mesh)), next(number), mesh) for mesh in meshes(self.problem)
        ]
        heapq.heapify(queue)
        while queue:
            bound, _, node = heapq.heappop(queue)
            best = self.best_score()
            if best is not None and bound >= best:
                self.exhausted = True
                return
            if not self._affordable():
                return
            if isinstance(node, Candidate):
                self.judged(node)
                continue
            if self.num_meshes >= self.budget.meshes and self.fitting:
                return
            opened = [(self.score(node, self.judge.bound_ns(c)), next(number), c) for c in self._open(proposer, node)]
            for entry in opened:
                heapq.heappush(queue, entry)
            if opened and (best is None or min(opened)[0] < best):
                self.judged(min(opened)[2])  # an early incumbent lets the bound cut the rest
        self.exhausted = True

    def squeeze(self) -> None:
        """Judge what holds the least, since nothing that was proposed fits."""
        known, tried = {each.candidate.mesh for each in self.too_large}, set[Mesh]()
        for candidate in self.judge.leanest():
            if not self._affordable():
                break
            self.judged(candidate)
            tried.add(candidate.mesh)
        self.num_meshes += len(tried - known)
        self.shortages = [each for each in self.shortages if each.mesh not in tried]

    def _open(self, proposer: Proposer, mesh: Mesh) -> list[Candidate]:
        proposed = proposer.candidates(mesh)
        if isinstance(proposed, Shortage):
            self._turn_down(proposed)
            return []
        limit = self.problem.memory_limit_bytes
        least = [(candidate, self.judge.least_bytes(candidate)) for candidate in proposed]
        kept = [candidate for candidate, num_bytes in least if num_bytes <= limit]
        if not kept:
            missing = min(num_bytes for _, num_bytes in least) - limit
            self._turn_down(Shortage(mesh=mesh, stage=0, missing_bytes=missing))
            return []
        self.num_meshes += 1
        self.reporter.opened(mesh, len(kept))
        return kept

    def _turn_down(self, shortage: Shortage) -> None:
        self.shortages.append(shortage)
        self.reporter.no_room(shortage)

    def _affordable(self) -> bool:
        """Whether the budget allows another simulation; without a plan that fits the search goes on regardless."""
        within = len(self.seen) < self.budget.candidates and self.num_actions < self.budget.actions
        return within or not self.fitting

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

    def improve(self) -> None:
        """Improve the best candidate of each of the best few kinds: which kind is best may change by it."""
        kinds: dict[tuple[object, ...], Evaluation] = {}
        for each in sorted(self.fitting, key=self.rank):
            kinds.setdefault((each.candidate.mesh, each.candidate.schedule, len(each.candidate.slices)), each)
        most_actions = self.num_actions + self.budget.moved_actions
        for best in list(kinds.values())[: self.budget.starts]:
            self._improve(best, most_actions)

    def _improve(self, best: Evaluation, most_actions: int) -> None:
        """Move its boundaries, largest steps first, as long as the simulator finds it faster."""
        limit = len(self.seen) + self.budget.moves
        for step in STEPS:
            before = None
            while best is not before:
                before = best
                for move in moves(best.candidate, self.problem, step):
                    moved = move(best.candidate)
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
        """Simulate the best in full, and H1's order beside one of ``zb``, until it is still the best afterwards."""
        settled: set[Candidate] = set()
        while (best := min(self.fitting, key=self.rank)).candidate not in settled:
            settled.add(best.candidate)
            if not best.is_exact:
                self.fitting.remove(best)
                self.file(self.judge.evaluate(best.candidate, in_full=True))
            plain = with_h1(best.candidate)
            if plain not in settled and self.fits(found := self._exact(plain)):
                self.fitting.append(found)
                settled.add(plain)
            if not self.fitting:
                raise self.nothing_fits()

    def _exact(self, candidate: Candidate) -> Evaluation:
        found = self.judge.evaluate(candidate)
        return found if found.is_exact else self.judge.evaluate(candidate, in_full=True)

    def file(self, evaluation: Evaluation) -> bool:
        """Keep it among those that fit or those that do not, and say which."""
        fits = self.fits(evaluation)
        (self.fitting if fits else self.too_large).append(evaluation)
        return fits

    def nothing_fits(self) -> NothingFitsError:
        """How close the closest came."""
        limit = self.problem.memory_limit_bytes
        needs = [(limit + each.missing_bytes, each.mesh.label) for each in self.shortages]
        needs += [(max(each.peak_bytes), each.candidate.label) for each in self.too_large]
        return NothingFitsError(*min(needs))


def with_h1(candidate: Candidate) -> Candidate:
    """The candidate with H1's own order if it runs one of ``zb``'s, which were compared over few micro-batches only."""
    return replace(candidate, variant=H1) if candidate.schedule == "zb" else candidate


STEPS = (8, 4, 2, 1)
"""Quanta by which boundaries between slices are moved, one after the other."""

Move = Callable[[Candidate], Candidate | None]


def moves(candidate: Candidate, problem: Problem, step: int) -> Iterator[Move]:
    """Boundaries between slices by ``step`` quanta and, with the largest and the smallest step, between stages by a
    unit, both ways.
    """
    if not isinstance(problem.pinned.slices, tuple):
        for i, sign in itertools.product(range(len(candidate.slices) - 1), (-1, 1)):
            yield functools.partial(_move_slice, boundary=i, tokens=sign * step * problem.quantum)
    if step in (STEPS[0], STEPS[-1]) and problem.pinned.stages is None:
        for i, sign in itertools.product(range(len(candidate.stages) - 1), (-1, 1)):
            yield functools.partial(_move_stage, boundary=i, units=sign)


def _move_slice(candidate: Candidate, *, boundary: int, tokens: int) -> Candidate | None:
    slices = list(candidate.slices)
    slices[boundary] += tokens
    slices[boundary + 1] -= tokens
    return replace(candidate, slices=tuple(slices)) if min(slices) > 0 else None


def _move_stage(candidate: Candidate, *, boundary: int, units: int) -> Candidate | None:
    stages = [list(stage) for stage in candidate.stages]
    stages[boundary][1] += units
    stages[boundary + 1][0] += units
    if any(first >= stop for first, stop in stages):
        return None
    return replace(candidate, stages=tuple((first, stop) for first, stop in stages))
