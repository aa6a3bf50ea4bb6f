"""The planning process: it answers one request, with limits of memory and candidates; its parent limits its time.

python -m penstock.planner.worker < request.json > lines.jsonl
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import PenstockError, UserError
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, to_seconds
from penstock.planner.choice import choose
from penstock.planner.decide import best_plans
from penstock.planner.judge import Evaluation, Reporter
from penstock.planner.problem import Mesh, Problem
from penstock.planner.replanning import replan
from penstock.planner.replay import num_actions, simulated
from penstock.planner.subsets import problem_for
from penstock.planner.variations import same_plan_variations, searched_variations, with_variations
from penstock.planner.worker.protocol import SMALLER, Answer, Line, PlanningRequest, Progress

MOST_BYTES = 4 * 2**30
MOST_CANDIDATES = 5_000
"""Limit on simulated candidates, several times the search's own budget, which only applies once a plan fits. It is a
count, so that equal requests end alike on any machine.
"""

MOST_TIMELINE_ACTIONS = 4_000
REPORT_SECONDS = 0.25
POLL_SECONDS = 1.0
"""Interval at which the process checks that its parent is running."""

GARBAGE_THRESHOLD = 100_000
"""New objects between two garbage collections. A search makes millions of objects and hardly any cycles; with Python's
threshold of 700, collections take 8 to 9 % of its processor time.
"""

REAL_NUMBERS = "write sizes, speeds and times as real models and devices have them"


class Counter(Reporter):
    """Counts the work of a search, reports it to ``report``, and ends a search that simulates too many candidates."""

    def __init__(self, report: Callable[[Progress], None], most_candidates: int = MOST_CANDIDATES) -> None:
        self._report, self._most_candidates = report, most_candidates
        self._now = Progress()
        self._best_ns: int | None = None
        self.problem: Problem | None = None
        """The planning problem, for the speeds of steps."""

    def of_change(self, change: str) -> Counter:
        """A counter with the same limits for the separate search of a ``change``."""
        counter = Counter(self._report, self._most_candidates)
        counter._now, counter.problem = Progress(change=change), self.problem
        return counter

    def opened(self, mesh: Mesh, num_candidates: int) -> None:
        self._update(divisions=self._now.divisions + 1)

    def judged(self, evaluation: Evaluation, fits: bool) -> None:
        if self._now.candidates >= self._most_candidates:
            raise UserError(what=f"the search did not end within {self._most_candidates} candidates", remedy=SMALLER)
        better: dict[str, Any] = {}
        if fits and (self._best_ns is None or evaluation.step_ns < self._best_ns):
            self._best_ns = evaluation.step_ns
            better = self._as_best(evaluation)
        self._update(candidates=self._now.candidates + 1, **better)

    def _as_best(self, evaluation: Evaluation) -> dict[str, Any]:
        candidate, seconds = evaluation.candidate, to_seconds(evaluation.step_ns)
        speed = None if self.problem is None else candidate.speed(self.problem, seconds)
        return {"best": candidate.label, "best_step_seconds": seconds, "best_speed": speed}

    def _update(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        self._report(self._now)


def answer(request: PlanningRequest, reporter: Counter | None = None) -> Answer:
    """Plan in this process."""
    try:
        if request.plan is not None and request.timelines:
            return _replanned(request, request.plan, reporter)
        if request.plan is not None:
            return Answer(plan=request.plan, timeline=simulated(request.plan, _hardware(request)).timeline)
        return _planned(request, reporter)
    except RecursionError:
        return Answer(what="is nested too deeply to be planned", where="spec.parallelism", remedy=SMALLER)
    except UserError as mistake:
        return Answer(what=mistake.what, where=mistake.where, remedy=mistake.remedy)
    except MemoryError:
        traceback.print_exc()
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        allowed = "it may have" if limit == resource.RLIM_INFINITY else f"the {format_bytes(limit)} that it may have"
        return Answer(what=f"planning needs more memory than {allowed}", remedy=SMALLER)
    except PenstockError as error:
        return Answer(what=str(error), remedy=SMALLER)
    except (ValueError, ArithmeticError) as error:
        traceback.print_exc()
        return Answer(what=f"planning cannot compute with these numbers: {error}", remedy=REAL_NUMBERS)


def _replanned(request: PlanningRequest, plan: Plan, reporter: Counter | None) -> Answer:
    """The plans for a running one."""
    if request.profile is None:
        raise UserError(what="timelines correct a profile, and none is given", remedy="give a profile")

    def new_reporter(change: str) -> Counter | None:
        return reporter.of_change(change) if reporter is not None else None

    return Answer(plan=plan, replanning=replan(request.spec, request.profile, plan, request.timelines, new_reporter))


def _planned(request: PlanningRequest, reporter: Counter | None) -> Answer:
    """The best plan, and as many more as requested, each with its variations."""
    hardware = _hardware(request)
    if reporter is not None:
        reporter.problem = problem_for(request.spec, hardware)
    of_change = reporter.of_change if reporter is not None else lambda change: None
    choice = choose(request.spec, hardware, reporter, of_change, frontier=request.frontier)
    _, *others = best_plans(choice.problem, choice.decision, request.num_plans)
    best = choice.plan
    if request.what_if:
        variations = searched_variations(best, request.spec, hardware, of_change)
    else:
        variations = same_plan_variations(best, request.spec, hardware)
    others = [with_variations(plan, same_plan_variations(plan, request.spec, hardware)) for plan in others]
    best = with_variations(best, variations)
    return Answer(plan=best, timeline=_timeline(best, request), others=tuple(others))


def _timeline(plan: Plan, request: PlanningRequest) -> Timeline | None:
    return None if num_actions(plan) > MOST_TIMELINE_ACTIONS else simulated(plan, _hardware(request)).timeline


def _hardware(request: PlanningRequest) -> Profile | ClusterSpec:
    hardware = request.cluster or request.profile
    if hardware is None:
        raise UserError(what="neither a profile nor a cluster is given", remedy="give one of them")
    return hardware


def _progress_writer(clock: Callable[[], float]) -> Callable[[Progress], None]:
    """A function that writes progress, at most once per `REPORT_SECONDS`."""
    due_at = clock()

    def report(progress: Progress) -> None:
        nonlocal due_at
        if clock() >= due_at:
            due_at = clock() + REPORT_SECONDS
            _write(Line(progress=progress))

    return report


def _write(line: Line) -> None:
    sys.stdout.write(json.dumps(line.to_manifest()) + "\n")
    sys.stdout.flush()


def _end_with(parent: int) -> None:
    """End this process soon after ``parent`` has ended: a search may run for long without reporting progress.

    The kernel's own signal (prctl(2), PR_SET_PDEATHSIG) would come when the parent's starting thread ends.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def collect_garbage_seldom() -> None:
    """Let a process that plans and then ends spend little time on garbage collections."""
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


def main() -> None:
    """Answer the request on stdin."""
    collect_garbage_seldom()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = MOST_BYTES if allowed == resource.RLIM_INFINITY else min(MOST_BYTES, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    try:
        request = PlanningRequest.from_manifest(json.load(sys.stdin))
    except UserError as mistake:
        _write(Line(answer=Answer(what=mistake.what, where=mistake.where, remedy=mistake.remedy)))
        return
    _write(Line(answer=answer(request, Counter(_progress_writer(time.monotonic)))))


if __name__ == "__main__":
    main()
