"""The plan of a job by its objective, deadline and budget, and the frontier of time and money.

With `objective: time` and no budget there is one search, if its plan meets the deadline. Otherwise plans are made for
the whole hardware, by either objective, and for several sets of its devices (`penstock.planner.subsets`). These
searches do not depend on the limits. Of the plans within the limits, the objective chooses the best.

One search over devices of several kinds has two weaknesses: every rank may only use the memory of the smallest device,
and the fastest devices are used first, even if they are interrupted most often. So if a job may use fewer devices,
plans are always made for the kinds with more memory or with other rates of interruptions, too.

Three properties follow, even if a search misses its best plan:

- A plan for cost never costs more than the plan for time, which is one of those that it was chosen from.
- A later deadline never makes a plan for cost more expensive, since it only adds plans to choose from.
- A larger budget never makes a plan for time slower, for the same reason.

The frontier has the plans for which no other one is both as fast and as cheap.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.explanation import Explanation, Frontier, FrontierPoint
from penstock.core.job import JobSpec, Objective
from penstock.core.plan import Cost, Plan, RunTime
from penstock.core.units import format_amount, format_count, format_seconds
from penstock.planner.budget import Budget, usual_budget
from penstock.planner.decide import Decision, decide, decide_if_possible
from penstock.planner.judge import Reporter
from penstock.planner.pricing import cost_of, price_of_device, run_time_of
from penstock.planner.problem import Problem
from penstock.planner.replay import candidate_of
from penstock.planner.subsets import Hardware, Subset, neglected_kinds, problem_for, subsets

SUBSET_PART = 4
"""The search for a set of devices gets 1 / `SUBSET_PART` of a usual budget."""

DEADLINE, BUDGET = "spec.deadlineSeconds", "spec.budget"

ReporterOf = Callable[[str], Reporter | None]
"""Makes the reporter of a further search by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan, its decision and the problem that was decided, with the run's time and its cost if a price is known."""

    plan: Plan
    decision: Decision
    problem: Problem
    run_time: RunTime
    cost: Cost | None

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return self.run_time.seconds

    @property
    def money(self) -> float:
        """The cost of all steps; without a price no plan costs anything."""
        return self.cost.whole_job if self.cost else 0.0

    @property
    def label(self) -> str:
        """The plan's label."""
        return candidate_of(self.plan).label


def choose(
    spec: JobSpec,
    hardware: Hardware,
    reporter: Reporter | None = None,
    reporter_of: ReporterOf = lambda name: None,
    budget: Budget | None = None,
    *,
    frontier: bool = False,
) -> Choice:
    """The job's plan; with ``frontier`` its explanation has the frontier.

    Raises:
        UserError: nothing fits, the pins cannot be met, no plan that was found is within the deadline and the budget,
            or ``frontier`` is set and a price is missing.
    """
    if frontier:
        _require_prices(spec, hardware)
    searches = _Searches(spec, hardware, reporter, reporter_of, budget)
    choices = searches.for_objective()
    num_plain = len(choices)
    soonest = min(choice.seconds for choice in choices)
    is_late = soonest > (spec.deadline_seconds or math.inf)  # fewer spot devices may end sooner
    is_plain = spec.objective is Objective.TIME and spec.budget is None and not is_late
    if frontier or not is_plain:
        choices += searches.for_other_objective()
        choices += searches.for_subsets(choices)
    best = _best_within_limits(spec, choices[:num_plain] if is_plain else choices, hardware)
    return _with_frontier(best, frontier_of(choices, hardware)) if frontier else best


def _require_prices(spec: JobSpec, hardware: Hardware) -> None:
    prices = {spec.price_per_device_hour}
    if isinstance(hardware, ClusterSpec):
        kinds = hardware.kinds_of(spec.resources.ranks)
        prices = {price_of_device(hardware.device_kinds[kind], spec) for kind in kinds}
    if not all(prices):
        raise UserError(
            what="the frontier of time and money needs the price of every device",
            where="spec.pricePerDeviceHour",
            remedy="write a price above 0, or pricePerHour of each kind of device in the description of the cluster",
        )


class _Searches:
    """The searches of a choice."""

    def __init__(
        self,
        spec: JobSpec,
        hardware: Hardware,
        reporter: Reporter | None,
        reporter_of: ReporterOf,
        budget: Budget | None,
    ) -> None:
        self.spec, self.hardware, self.budget = spec, hardware, budget
        self.reporter, self.reporter_of = reporter, reporter_of

    def for_objective(self) -> list[Choice]:
        """The choice for the whole hardware by the job's objective, and those for kinds that one search neglects.

        Raises `UserError` if neither the whole hardware nor one of these has a plan.
        """
        problem = problem_for(self.spec, self.hardware)
        try:
            decision = decide(problem, self.budget, self.reporter)
        except UserError:
            if choices := self._for_neglected_kinds():
                return choices
            raise
        return [self._choice(decision.plan, decision, problem), *self._for_neglected_kinds()]

    def _for_neglected_kinds(self) -> list[Choice]:
        choices = (self._of_problem(subset, problem) for subset, problem in neglected_kinds(self.spec, self.hardware))
        return [choice for choice in choices if choice is not None]

    def for_other_objective(self) -> list[Choice]:
        """The choice for the whole hardware by the other objective, if it has a plan."""
        other = Objective.TIME if self.spec.objective is Objective.COST else Objective.COST
        problem = dataclasses.replace(problem_for(self.spec, self.hardware), objective=other, _divided={})
        decision = decide_if_possible(problem, self.budget, self.reporter_of(f"for {other.value}"))
        return [] if decision is None else [self._choice(decision.plan, decision, problem)]

    def for_subsets(self, known: Sequence[Choice]) -> list[Choice]:
        """The choice for each set of devices that has a plan.

        The set of all devices is left out if the plan for time in ``known`` uses all of them: that plan is its best.
        """
        ranks = self.spec.resources.ranks
        is_known = any(
            choice.problem.objective is Objective.TIME and choice.plan.num_ranks == ranks for choice in known
        )
        of_subsets = subsets(self.spec, self.hardware)
        choices = (self._of_subset(subset) for subset in of_subsets if not is_known or subset.num_devices < ranks)
        return [choice for choice in choices if choice is not None]

    def _of_subset(self, subset: Subset) -> Choice | None:
        number = subset.num_devices
        return self._of_problem(
            subset, subset.problem(Objective.TIME if number == subset.spec.resources.ranks else Objective.COST)
        )

    def _of_problem(self, subset: Subset, problem: Problem) -> Choice | None:
        budget = (self.budget or usual_budget(problem.num_devices)).part(SUBSET_PART)
        reporter = self.reporter_of(f"on {format_count(subset.num_devices, 'device')}")
        decision = decide_if_possible(problem, budget, reporter)
        plan = None if decision is None else subset.in_whole(decision.plan)
        return None if decision is None or plan is None else self._choice(plan, decision, problem)

    def _choice(self, plan: Plan, decision: Decision, problem: Problem) -> Choice:
        cluster = self.hardware if isinstance(self.hardware, ClusterSpec) else None
        run_time = run_time_of(plan, self.spec, cluster)
        assert run_time is not None, "a plan that was decided is predicted"
        cost = cost_of(plan, self.spec, cluster)
        return Choice(plan=plan, decision=decision, problem=problem, run_time=run_time, cost=cost)


def _rank(spec: JobSpec, choice: Choice) -> tuple[float, float]:
    """Sort key, best first: by the objective, then by the other quantity."""
    quantities = choice.seconds, choice.money
    return quantities if spec.objective is Objective.TIME else quantities[::-1]


def _best_within_limits(spec: JobSpec, choices: Sequence[Choice], hardware: Hardware) -> Choice:
    """The best choice within deadline and budget; raises `UserError` if there is none."""
    most_seconds, most_money = spec.deadline_seconds or math.inf, spec.budget or math.inf
    within = [choice for choice in choices if choice.seconds <= most_seconds and choice.money <= most_money]
    if not within:
        raise _refusal(spec, choices)
    best = min(within, key=lambda choice: _rank(spec, choice))
    return best if len(choices) == 1 else _with_reason(best, _reason(spec, best, len(choices), hardware))


def _refusal(spec: JobSpec, choices: Sequence[Choice]) -> UserError:
    """The error if no choice is within the limits.

    It names the least cost if all are above the budget, else the least time of those within the budget.
    """
    most_seconds, most_money = spec.deadline_seconds or math.inf, spec.budget or math.inf
    affordable = [choice for choice in choices if choice.money <= most_money]
    if not affordable:
        cheapest = min(choices, key=lambda choice: choice.money)
        return UserError(
            what=f"no plan that was found costs at most {format_amount(most_money)} for all steps: "
            f"the cheapest costs {format_amount(cheapest.money)}, {cheapest.label}",
            where=BUDGET,
            remedy=f"raise budget to {_at_least(cheapest.money)}, lower training.steps, or use cheaper devices",
        )
    fastest = min(affordable, key=lambda choice: choice.seconds)
    soonest = min(choices, key=lambda choice: choice.seconds)
    within = " within the budget" if len(affordable) < len(choices) else ""
    seconds = math.ceil(fastest.seconds)
    remedy = f"raise deadlineSeconds to {seconds}, lower training.steps, or use more or faster devices"
    if soonest.seconds <= most_seconds:
        amount = _cheapest_in_time(choices, most_seconds)
        remedy = f"{remedy}, or raise budget to {amount}, the cost of the cheapest plan that meets the deadline"
    return UserError(
        what=f"no plan that was found{within} ends all steps in {format_seconds(most_seconds)}: "
        f"the fastest{within} takes {format_seconds(fastest.seconds)}, {fastest.label}",
        where=DEADLINE,
        remedy=remedy,
    )


def _cheapest_in_time(choices: Sequence[Choice], most_seconds: float) -> str:
    return _at_least(min(choice.money for choice in choices if choice.seconds <= most_seconds))


def _at_least(amount: float) -> str:
    """The amount as a number for a manifest, rounded up to three digits or to hundredths, whichever is more exact."""
    digits = max(2, 2 - math.floor(math.log10(amount))) if amount > 0 else 2
    return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}"


def _reason(spec: JobSpec, best: Choice, num_plans: int, hardware: Hardware) -> str:
    limits = []
    if spec.deadline_seconds is not None:
        limits.append(f"ends all steps in {format_seconds(spec.deadline_seconds)}")
    if spec.budget is not None:
        limits.append(f"costs at most {format_amount(spec.budget)}")
    superlative = "fastest" if spec.objective is Objective.TIME else "cheapest"
    within = f" that {' and '.join(limits)}" if limits else ""
    devices = devices_text(best.plan, hardware)
    return f"of {num_plans} plans for several sets of devices, the {superlative}{within}: on {devices}"


def _with_reason(choice: Choice, reason: str) -> Choice:
    plan = dataclasses.replace(choice.plan, reasons=(*choice.plan.reasons, reason))
    return dataclasses.replace(choice, plan=plan)


def frontier_of(choices: Sequence[Choice], hardware: Hardware) -> Frontier:
    """The choices for which no other one is both as fast and as cheap, by rising time."""
    points: list[FrontierPoint] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.money)):
        if not points or choice.money < points[-1].cost:
            points.append(_point(choice, hardware))
    return Frontier(points=tuple(points), plans=len(choices))


def _point(choice: Choice, hardware: Hardware) -> FrontierPoint:
    plan, cost, speed = choice.plan, choice.cost, choice.plan.speed()
    assert plan.prediction is not None, "a plan that was decided is predicted"
    assert cost is not None, "the frontier has prices"
    return FrontierPoint(
        devices=devices_text(plan, hardware),
        num_devices=plan.num_ranks,
        mesh=plan.mesh.text,
        plan=choice.label,
        step_seconds=plan.prediction.step_seconds,
        run_seconds=choice.seconds,
        cost=cost.whole_job,
        cost_per_million_tokens=cost.per_million_tokens,
        tokens_per_second_per_device=speed.tokens_per_second_per_device if speed else 0.0,
    )


def devices_text(plan: Plan, hardware: Hardware) -> str:
    """The plan's devices by kind: ``8 x H100, 4 x A100``; their number if the hardware has no names."""
    if not isinstance(hardware, ClusterSpec):
        return format_count(plan.num_ranks, "device")
    devices = plan.devices or range(plan.num_ranks)
    kinds = hardware.kinds_of(1 + max(devices))
    numbers = Counter(kinds[device] for device in devices)
    return ", ".join(f"{numbers[kind]} x {hardware.device_kinds[kind].name}" for kind in sorted(numbers))


def _with_frontier(choice: Choice, frontier: Frontier) -> Choice:
    prediction = choice.plan.prediction
    assert prediction is not None, "a plan that was decided is predicted"
    explanation = dataclasses.replace(prediction.explanation or Explanation(), frontier=frontier)
    prediction = dataclasses.replace(prediction, explanation=explanation)
    return dataclasses.replace(choice, plan=dataclasses.replace(choice.plan, prediction=prediction))
