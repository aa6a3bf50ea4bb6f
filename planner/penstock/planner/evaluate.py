"""The judge of the search: turns candidates into integer tables and simulates them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypedDict

import numpy as np

from penstock.core.errors import UserError
from penstock.core.layout import tied_stages
from penstock.core.program import Reduction
from penstock.core.schedule import CSV, ScheduleSpec
from penstock.planner.bucket_costs import buckets_of
from penstock.planner.candidate import Candidate
from penstock.planner.candidates import Proposer
from penstock.planner.compile import has_shared_gradients, recomputed_stages
from penstock.planner.device_order import Placement, devices_in_order
from penstock.planner.judge import Evaluation, OrderBound
from penstock.planner.launches import launched_shares
from penstock.planner.memory_fit import MemoryFit, enough_microbatches
from penstock.planner.nanoseconds import require_countable
from penstock.planner.order import FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT, Order
from penstock.planner.passes.reductions import reductions_of
from penstock.planner.problem import Mesh, Problem, parsed_schedule
from penstock.planner.recompute_windows import TracedStep, exposed_shares, hidden_in_waits
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.interleaved import INTERLEAVED
from penstock.planner.schedules.moved import moved_word
from penstock.planner.schedules.pipeline import pipeline_of, stages_by_rank
from penstock.planner.schedules.recomputed import MOST_STAGES_PER_RANK, with_refined_recomputation
from penstock.planner.schedules.recorded import record
from penstock.planner.schedules.registry import (
    BUILT_IN,
    REPEATING,
    SPLITTING,
    find,
    order_from_spec,
    recipe,
    stage_ranks,
)
from penstock.planner.schedules.v_shape import ZBV
from penstock.planner.schedules.variants import QUICK_FROM, Growing, Variants
from penstock.planner.schedules.zero_bubble import ZB
from penstock.planner.simulate import kernel
from penstock.planner.simulate.arrays import Linked, StepTimes, link_order, simulate_linked
from penstock.planner.simulate.bound import lower_bound_ns
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS, Costs, Nanoseconds
from penstock.planner.simulate.memory import Walk
from penstock.planner.simulate.periodic import extrapolate
from penstock.planner.stagecost import StageCosts, joined, stage_costs
from penstock.planner.tables import (
    EndCosts,
    MappedDevices,
    mapped_devices,
    remade_bytes,
    remainder_shape,
    rows,
    simulation_costs,
    stage_memory,
    stash_caps,
    stash_tables,
    static_bytes,
    unit_tables,
)

DEFAULT_RECEIVE_AHEAD = 4

VARIED: dict[object, Variants] = {"zb": ZB, "zbv": ZBV, "interleaved-zb": INTERLEAVED}
"""Built-in schedules that choose among several orders."""

MAKING = 4
"""Making an order from costs and simulating it takes about as long as this number of simulations."""

MOST_COMPARED_ACTIONS = 20_000
"""For longer steps the variants are not compared with each other."""

MOVED_TRIALS, MOVED_ACTIONS, FEWEST_TRIALS = 500, 50_000, 50
"""Most moves of single actions per candidate, and most actions that they may simulate. A step that allows fewer than
`FEWEST_TRIALS` moves keeps its order.
"""

MOST_SIMULATED_ACTIONS = 2_000_000
"""Longer steps that repeat are never simulated in full: their tables take hundreds of megabytes."""

MOST_KEPT = 3
"""Cached orders that were made from costs. An order is needed for its bound, its simulation and the plan; a long one
takes seconds to make and may hold 20 MB.
"""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The `Judge` of a problem: bounds from stage costs, evaluations from the simulator."""

    problem: Problem
    receive_ahead: int = DEFAULT_RECEIVE_AHEAD
    placed_by: Placement | None = None
    """Placement of ranks on devices; by default `devices_in_order`."""
    _passes: dict[tuple[object, ...], StageCosts] = field(default_factory=dict)
    _mapped_devices: dict[tuple[Mesh, tuple[int, ...]], MappedDevices] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], EndCosts] = field(default_factory=dict)
    _costs: dict[tuple[object, ...], Costs] = field(default_factory=dict)
    _bounds: dict[tuple[object, ...], int] = field(default_factory=dict)
    _best_variants: dict[Candidate, Candidate] = field(default_factory=dict)
    _largest_variants: dict[Candidate, Candidate] = field(default_factory=dict)
    _recent: dict[Candidate, Growing] = field(default_factory=dict)
    proposer: Proposer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "proposer", Proposer(self.problem, MemoryFit(self.problem, self.receive_ahead)))

    def limited(self, memory_limit_bytes: int) -> Simulated:
        """The judge of the same problem with another limit; shares all caches that do not depend on the limit."""
        problem = self.problem.limited(memory_limit_bytes)
        other = dataclasses.replace(self, problem=problem, _best_variants={}, _largest_variants={}, _recent={})
        object.__setattr__(other, "proposer", self.proposer.limited(problem))
        return other

    def placing(self, placement: Placement) -> Simulated:
        """The judge with another placement of ranks on devices."""
        other = dataclasses.replace(
            self,
            placed_by=placement,
            _mapped_devices={},
            _ends={},
            _costs={},
            _bounds={},
            _best_variants={},
            _largest_variants={},
            _recent={},
        )
        object.__setattr__(other, "proposer", self.proposer)
        return other

    def placement(self, mesh: Mesh) -> tuple[int, ...]:
        """The first device of every rank of the mesh, replica after replica; by default `devices_in_order`."""
        return devices_in_order(self.problem, mesh) if self.placed_by is None else self.placed_by(mesh)

    def problem_of(self, candidate: Candidate) -> Problem:
        """The problem with the candidate's number of parts of the head."""
        return self.problem.divided(candidate.head_parts)

    def bound_ns(self, candidate: Candidate) -> int:
        """Lower bound of the step: warm-up, busiest rank, cool-down. 0 for schedules that are not built in, and for
        pairs, since the time that they hide is unknown.
        """
        if candidate.schedule not in BUILT_IN or candidate.schedule == BRAIDED:
            return 0
        split = candidate.schedule in SPLITTING
        owners = owners_of(candidate)
        key = (*_boundaries(candidate), owners, split)
        if key not in self._bounds:
            self._bounds[key] = lower_bound_ns(
                self.costs(candidate, owners),
                candidate.mesh.num_microbatches,
                stage_ranks=owners,
                split=split,
                recompute=any(candidate.recompute),
                reductions=self._reductions(candidate, owners),
            )
        return self._bounds[key]

    def order_bound(self, candidate: Candidate) -> OrderBound | None:
        """The length of a long step's order by itself, without reductions and network cards.

        None if ranks slow each other down while they compute: orders are made as if all always did. None with a smaller
        last micro-batch: orders are made as if it were like the others. None with recomputation: orders are made as if
        that waited for the gradient.
        """
        is_long = candidate.num_actions > MOST_COMPARED_ACTIONS and candidate.schedule in VARIED
        is_regular = not candidate.mesh.remainder and not any(candidate.recompute)
        if not is_long or not is_regular or (self.stage_costs(candidate).slowdown_ppm > MILLION).any():
            return None
        growing = self._growing(self._with_variant(candidate))
        short = growing.first or candidate.mesh.num_microbatches
        num_made = candidate.num_actions * short // candidate.mesh.num_microbatches
        return OrderBound(step_ns=growing.length_ns, num_actions=(MAKING - 1) * num_made)

    def stage_costs(self, candidate: Candidate) -> StageCosts:
        """Nanoseconds of every pass, stage and slice."""
        mesh = candidate.mesh
        own = (mesh.remainder, candidate.remainder_slices)
        problem = self.problem_of(candidate)
        tables = unit_tables(problem, candidate)
        launched = launched_shares(tables, problem.model, candidate, owners_of(candidate))
        units = (mesh.tp, mesh.microbatch, candidate.head_parts, candidate.stages, candidate.slices, *own)
        key = (*units, *(share.tobytes() for share in launched))
        if key not in self._passes:
            of_tables = zip_longest(tables, launched)
            self._passes[key] = joined([stage_costs(t, problem.model, candidate.stages, s) for t, s in of_tables])
        return self._passes[key]

    def costs(self, candidate: Candidate, stage_ranks: tuple[int, ...]) -> Costs:
        """The simulator's tables; raises `UserError` for a step that exceeds 64 bits."""
        key = (*_boundaries(candidate), stage_ranks)
        if key not in self._costs:
            passes = self.stage_costs(candidate)
            where = (candidate.mesh, stage_ranks)
            if where not in self._mapped_devices:
                self._mapped_devices[where] = mapped_devices(self.problem, candidate.mesh, stage_ranks, self.placement)
            problem = self.problem_of(candidate)
            mapped, units = self._mapped_devices[where], unit_tables(problem, candidate)[0]
            ends = self._ends_of(problem, candidate, stage_ranks, mapped)
            costs = simulation_costs(problem, candidate, passes, stage_ranks, mapped, ends)
            buckets = buckets_of(problem, candidate, units, stage_ranks, mapped.devices)
            costs = dataclasses.replace(costs, buckets=buckets)
            require_countable(costs.most_ns(candidate.mesh.num_microbatches))
            self._costs[key] = costs
        return self._costs[key]

    def _ends_of(
        self, problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], mapped: MappedDevices
    ) -> EndCosts:
        key = (candidate.mesh, candidate.head_parts, candidate.stages, candidate.zero, stage_ranks)
        if key not in self._ends:
            self._ends[key] = EndCosts.of(problem, candidate, stage_ranks, mapped.devices)
        return self._ends[key]

    def exposed_shares(self, candidate: Candidate) -> tuple[float, ...]:
        """Per rank, the share of its recomputation that delays other ranks or the end of the step; empty if that runs
        on demand or the step is too long to be compared.
        """
        if not self._has_windows(candidate):
            return ()
        return exposed_shares(self._traced(candidate, self.order(self._with_variant(candidate))))

    def with_windows(self, candidate: Candidate) -> Candidate | None:
        """The candidate with its recomputations in waits of their ranks, as a recorded order; None if its step does not
        get shorter within the limit, or is too long to be compared.
        """
        if not self._has_windows(candidate) or isinstance(candidate.schedule, ScheduleSpec):
            return None
        direct = dataclasses.replace(self._with_variant(candidate), recompute_ahead=0)
        simulate, order = functools.partial(self._traced, direct), self.order(direct)
        always = np.array(static_bytes(self.problem_of(direct), direct, owners_of(direct), order))
        limit_bytes = self.problem.memory_limit_bytes - always
        starts = (order, *self._hiding_orders(direct, candidate.schedule))
        steps = [hidden_in_waits(start, simulate, limit_bytes) for start in starts]
        best = min(filter(None, steps), key=lambda step: step.makespan_ns, default=None)
        if best is None or best.makespan_ns >= simulate(order).makespan_ns:
            return None
        generator = find(candidate.schedule)
        recorded = ScheduleSpec(generator=generator.name, version=generator.version, text=record(best.order))
        return dataclasses.replace(direct, schedule=recorded, variant=None)

    def with_moved_actions(self, candidate: Candidate) -> Candidate | None:
        """The candidate with single actions moved within their ranks, as a recorded order; None if its step does not
        get shorter, if devices are equally fast, if it recomputes, if its schedule is not one of `VARIED`, or if the
        step is too long for enough moves.
        """
        num_trials = min(MOVED_TRIALS, MOVED_ACTIONS // candidate.num_actions)
        is_made = candidate.schedule in VARIED and not any(candidate.recompute)
        if not self.problem.slowness or not is_made or num_trials < FEWEST_TRIALS:
            return None
        generator, num_remainder_slices = find(str(candidate.schedule)), len(candidate.remainder_slices)
        inputs = self._inputs_with_costs(candidate, generator.name)
        pipeline = pipeline_of(inputs, stages_by_rank(owners_of(candidate), candidate.mesh.pp))

        def step_ns(order: Order) -> int:
            order = order.with_remainder(num_remainder_slices)
            linked = link_order(order, self.receive_ahead, self.problem.late_receives, width=kernel.REACHED)
            return self._times(candidate, order, linked).makespan_ns

        start = self._without_remainder(self.best_variant(candidate)).generate(candidate.mesh.num_microbatches)
        best_ns, word = moved_word(pipeline, pipeline.word(start), np.array(inputs.caps), step_ns, num_trials)
        if best_ns >= step_ns(start):
            return None
        recorded = ScheduleSpec(generator=generator.name, version=generator.version, text=record(pipeline.order(word)))
        return dataclasses.replace(candidate, schedule=recorded, variant=None)

    def _hiding_orders(self, candidate: Candidate, name: str) -> Iterator[Order]:
        """Other orders of a split backward: with R as an action of its own, and made as if R took no time."""
        is_splitting = name in SPLITTING and not candidate.recompute_inside
        if not is_splitting or find(name).per_rank(candidate.mesh.pp, len(candidate.stages)) > MOST_STAGES_PER_RANK:
            return
        recomputed, num_remainder_slices = recomputed_stages(candidate.recompute), len(candidate.remainder_slices)
        inputs = self._inputs_with_costs(candidate, name, hides_recomputation=True)
        pipeline = pipeline_of(inputs, stages_by_rank(owners_of(candidate), candidate.mesh.pp))
        remade = remade_bytes(self.problem_of(candidate), candidate)[:, : len(candidate.slices)]
        caps = np.array(inputs.caps) + remade.max(axis=1)[pipeline.owned].max(axis=1)
        recompute_ns = self._recompute_ns(candidate)
        kept = [self._without_remainder(candidate).generate(candidate.mesh.num_microbatches)]
        kept += [VARIED[name].order(inputs)] if name in VARIED else []
        for number, order in enumerate(kept):
            if number:
                yield order.with_remainder(num_remainder_slices).with_recomputation(recomputed)
            refined = with_refined_recomputation(pipeline, order, recomputed, recompute_ns, remade, caps)
            yield refined.with_remainder(num_remainder_slices)

    def _has_windows(self, candidate: Candidate) -> bool:
        is_separate = any(candidate.recompute) and not self.problem.software.recomputes_on_demand
        return is_separate and candidate.num_actions <= MOST_COMPARED_ACTIONS

    def _traced(self, candidate: Candidate, order: Order) -> TracedStep:
        """The step of the candidate in this order."""
        problem, width = self.problem_of(candidate), kernel.ARRIVED + 1
        linked = link_order(order, self.receive_ahead, self.problem.late_receives, width=width)
        times, memory = self._times(candidate, order, linked), stage_memory(problem, candidate)
        costs, remade = self.costs(candidate, owners_of(candidate)), remade_bytes(problem, candidate)
        remade_ns = costs.compute_ns[RECOMPUTE]
        remainder = remainder_shape(problem, candidate) if order.num_remainder_slices else None
        levels = Walk.of_linked(order, linked).levels_bytes(
            memory.slot_bytes,
            candidate.slices,
            remainder=remainder,
            prefix_by_slice=problem.prefix_by_slice(candidate.slices),
        )
        return TracedStep(
            order=order,
            linked=linked,
            makespan_ns=times.makespan_ns,
            levels=levels,
            remade_bytes=remade,
            remade_ns=remade_ns,
            inside_ns=np.zeros_like(remade_ns) if costs.inside_ns is None else costs.inside_ns,
        )

    def evaluate(self, candidate: Candidate, *, in_full: bool = False) -> Evaluation:
        """Simulate one step of the candidate. Long steps that repeat are extrapolated from shorter ones unless
        ``in_full``, and above `MOST_SIMULATED_ACTIONS` always.

        The evaluation's candidate names the variant that its generator chose.
        """
        varied = self._with_variant(candidate)
        evaluation = self._simulated(varied, in_full)
        return (
            evaluation
            if varied is candidate
            else dataclasses.replace(evaluation, num_actions=MAKING * evaluation.num_actions)
        )

    def _with_variant(self, candidate: Candidate) -> Candidate:
        """The candidate with the variant of its schedule that may use most memory (`Variants.largest`)."""
        if candidate.schedule not in VARIED or candidate.variant is not None:
            return candidate
        if candidate not in self._largest_variants:
            inputs = self.schedule_inputs(candidate, str(candidate.schedule))
            short = min(inputs.num_microbatches, 2 * enough_microbatches(candidate, self.receive_ahead))
            inputs = VARIED[candidate.schedule].largest(dataclasses.replace(inputs, num_microbatches=short))
            self._largest_variants[candidate] = dataclasses.replace(candidate, variant=inputs.variant)
        return self._largest_variants[candidate]

    def best_variant(self, candidate: Candidate) -> Candidate:
        """The candidate with its schedule's fastest variant, which takes the time of `Variants.best` to find; for a
        long step the order with the same target that is made with more effort.
        """
        if candidate.schedule not in VARIED:
            return candidate
        if candidate.num_actions > MOST_COMPARED_ACTIONS and candidate.variant is not None:
            return dataclasses.replace(candidate, variant=candidate.variant % QUICK_FROM)
        unnamed = dataclasses.replace(candidate, variant=None)
        if unnamed not in self._best_variants:
            inputs = self.schedule_inputs(unnamed, str(candidate.schedule))
            try:
                variant = VARIED[candidate.schedule].best(inputs).variant
            except UserError:
                variant = candidate.variant
            self._best_variants[unnamed] = dataclasses.replace(candidate, variant=variant)
        return self._best_variants[unnamed]

    def _simulated(self, candidate: Candidate, in_full: bool) -> Evaluation:
        growing = self._growing(candidate)
        repeats = growing.first is not None or candidate.schedule in REPEATING
        if not repeats or (in_full and candidate.num_actions <= MOST_SIMULATED_ACTIONS):
            order = growing.generate(candidate.mesh.num_microbatches)
            _check_shape(order, candidate)
            linked = link_order(order, self.receive_ahead, self.problem.late_receives, width=kernel.REACHED)
            return self._evaluation(candidate, order, linked, self._times(candidate, order, linked), is_exact=True)
        owners = owners_of(candidate)
        extrapolated = extrapolate(
            growing.generate,
            candidate.mesh.num_microbatches,
            self.costs(candidate, owners),
            receive_ahead=self.receive_ahead,
            late_receives=self.problem.late_receives,
            reductions=self._reductions(candidate, owners),
            first=growing.first,
            multiple=growing.period,
        )
        return self._evaluation(
            candidate, extrapolated.order, extrapolated.linked, extrapolated.times, is_exact=extrapolated.is_exact
        )

    def _growing(self, candidate: Candidate) -> Growing:
        """The orders of the candidate's schedule for any number of micro-batches; the last micro-batch is always as
        small as the candidate's.
        """
        growing, num_slices = self._without_remainder(candidate), len(candidate.remainder_slices)
        if not num_slices and not any(candidate.recompute):
            return growing
        return dataclasses.replace(
            growing,
            generate=lambda count: _recomputing(growing.generate(count).with_remainder(num_slices), candidate),
        )

    def _without_remainder(self, candidate: Candidate) -> Growing:
        """The orders as if all micro-batches were alike; those made from costs are cached."""
        if candidate.schedule not in BUILT_IN:
            return Growing(generate=lambda count: self.order(candidate))
        name = str(candidate.schedule)
        if name not in VARIED:
            inputs = self.schedule_inputs(candidate, name)
            return Growing(
                generate=lambda count: _as_run(
                    find(name).generate(dataclasses.replace(inputs, num_microbatches=count)), candidate
                )
            )
        if candidate not in self._recent:
            if len(self._recent) == MOST_KEPT:
                del self._recent[next(iter(self._recent))]
            self._recent[candidate] = VARIED[name].growing(self.schedule_inputs(candidate, name))
        return self._recent[candidate]

    def _evaluation(
        self, candidate: Candidate, order: Order, linked: Linked, times: StepTimes, *, is_exact: bool
    ) -> Evaluation:
        """``order`` may have fewer micro-batches, as long as a full step holds no more bytes at once."""
        busiest = int(times.compute_ns.argmax())
        stage_ranks = tuple(order.stage_ranks.tolist())
        problem = self.problem_of(candidate)
        memory, remainder = stage_memory(problem, candidate), remainder_shape(problem, candidate)
        slots = Walk.of_linked(order, linked).high_water_bytes(
            memory.slot_bytes,
            candidate.slices,
            remainder=remainder,
            prefix_by_slice=problem.prefix_by_slice(candidate.slices),
        )
        always = static_bytes(problem, candidate, stage_ranks, order)
        parts = {
            "compute_ns": int(times.compute_ns[busiest]),
            "communication_ns": int(times.communication_ns[busiest]),
            "reduction_ns": int(times.reduction_ns[busiest]),
            "optimizer_ns": int(times.optimizer_ns[busiest]),
        }
        return Evaluation(
            candidate=candidate,
            step_ns=times.makespan_ns,
            bubble_ns=times.makespan_ns - sum(parts.values()),
            peak_bytes=tuple(a + int(b) for a, b in zip(always, slots, strict=True)),
            slot_bytes=tuple(int(num_bytes) for num_bytes in slots),
            num_actions=order.num_actions,
            is_exact=is_exact,
            bubble=times.bubble,
            waiting=times.waiting,
            parts=times.parts,
            **parts,
        )

    def _times(self, candidate: Candidate, order: Order, linked: Linked) -> StepTimes:
        stage_ranks = tuple(order.stage_ranks.tolist())
        return simulate_linked(
            order,
            linked,
            self.costs(candidate, stage_ranks),
            receive_ahead=self.receive_ahead,
            reductions=self._reductions(candidate, stage_ranks),
        )

    def _reductions(self, candidate: Candidate, stage_ranks: tuple[int, ...]) -> tuple[Reduction, ...]:
        mesh, model = candidate.mesh, self.problem_of(candidate).model
        return reductions_of(
            stage_ranks,
            dp=mesh.dp > 1,
            tp=has_shared_gradients(model, self.problem.sharding(mesh.tp)),
            tie=tied_stages(model, candidate.stages),
        )

    def order(self, candidate: Candidate) -> Order:
        """The candidate's schedule as arrays; raises `UserError` if it was made for another shape."""
        return _recomputing(self._as_recorded(candidate), candidate)

    def _as_recorded(self, candidate: Candidate) -> Order:
        """The order of its recipe, without recomputation."""
        if isinstance(candidate.schedule, ScheduleSpec):
            order = order_from_spec(candidate.schedule, **_shape(candidate), num_stages=len(candidate.stages))
            order = order.with_remainder(len(candidate.remainder_slices))
        elif candidate.schedule in VARIED and candidate.variant is not None:
            order = self._without_remainder(candidate).generate(candidate.mesh.num_microbatches)
            order = order.with_remainder(len(candidate.remainder_slices))
        else:
            order = find(candidate.schedule).generate(self.schedule_inputs(candidate, candidate.schedule))
            order = order.with_remainder(len(candidate.remainder_slices))
        _check_shape(order, candidate)
        return _as_run(order, candidate)

    def spec(self, candidate: Candidate) -> ScheduleSpec:
        """The candidate's schedule as a recipe."""
        if isinstance(candidate.schedule, ScheduleSpec):
            return candidate.schedule
        return recipe(candidate.schedule, lambda: self._as_recorded(candidate))

    def schedule_inputs(self, candidate: Candidate, name: str) -> ScheduleInputs:
        """Inputs of the schedule's generator, as if all micro-batches were alike; costs and stash only if used."""
        generator = find(name)
        if not generator.uses_costs:
            per_rank = generator.per_rank(candidate.mesh.pp, len(candidate.stages))
            return ScheduleInputs(**_shape(candidate), stages_per_rank=per_rank)
        return self._inputs_with_costs(candidate, name)

    def _recompute_ns(self, candidate: Candidate) -> Nanoseconds:
        """[stages, slices]: the time of R, as if all micro-batches were alike."""
        costs = self.costs(candidate, owners_of(candidate))
        recompute_ns: Nanoseconds = costs.compute_ns[RECOMPUTE] * costs.slowdown_ppm[RECOMPUTE] // MILLION
        return recompute_ns[:, : len(candidate.slices)]

    def _inputs_with_costs(
        self, candidate: Candidate, name: str, *, hides_recomputation: bool = False
    ) -> ScheduleInputs:
        """Inputs with costs and stash; I takes the time of R as well, unless that is hidden."""
        num_ranks, generator, problem = candidate.mesh.pp, find(name), self.problem_of(candidate)
        per_rank = generator.per_rank(num_ranks, len(candidate.stages))
        owners = generator.stage_ranks(num_ranks, len(candidate.stages))
        alike = slice(len(candidate.slices))
        passes, costs = self.stage_costs(candidate).concurrent_ns[..., alike], self.costs(candidate, owners)
        if problem.slowness:
            slowed = (costs.compute_ns * costs.slowdown_ppm // MILLION)[..., alike]
            passes = slowed[[FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT]]
        recompute_ns = 0 if hides_recomputation else self._recompute_ns(candidate)
        transfers = costs.transfer_ns[..., alike]
        forward, exchanged, returned = stash_tables(problem, candidate)
        return ScheduleInputs(
            **_shape(candidate),
            stages_per_rank=per_rank,
            forward_ns=rows(passes[0]),
            input_ns=rows(passes[1] + recompute_ns),
            weight_ns=rows(passes[2]),
            send_forward_ns=rows(transfers[TO_NEXT]),
            send_backward_ns=rows(transfers[TO_PREVIOUS]),
            forward_stash=forward,
            input_stash=exchanged,
            weight_stash=returned,
            caps=stash_caps(problem, candidate, owners, self.receive_ahead),
            receive_ahead=self.receive_ahead,
            late_receives=self.problem.late_receives,
            variant=candidate.variant,
        )


def _as_run(order: Order, candidate: Candidate) -> Order:
    """The order as ranks run it: ranks of one shard run the actions of a pair one after the other."""
    return order if candidate.mesh.tp > 1 else order.unpaired()


def _recomputing(order: Order, candidate: Candidate) -> Order:
    """The order with the candidate's R, unless its stages recompute inside their backwards."""
    recomputed = recomputed_stages(candidate.recompute)
    return order.with_recomputation(recomputed, candidate.recompute_ahead, inside=candidate.recompute_inside)


def _boundaries(candidate: Candidate) -> tuple[object, ...]:
    """The candidate without its schedule."""
    slicing = (candidate.slices, candidate.remainder_slices)
    units = (candidate.head_parts, candidate.stages, candidate.recompute, candidate.zero)
    return candidate.mesh, *units, *slicing


def owners_of(candidate: Candidate) -> tuple[int, ...]:
    """The rank of every stage."""
    schedule = candidate.schedule
    if isinstance(schedule, str):
        return stage_ranks(schedule, candidate.mesh.pp, len(candidate.stages))
    if schedule.generator == CSV:
        return parsed_schedule(schedule.text).stage_ranks
    return stage_ranks(schedule.generator, candidate.mesh.pp, len(candidate.stages))


class _Shape(TypedDict):
    num_ranks: int
    num_microbatches: int
    num_slices: int


def _shape(candidate: Candidate) -> _Shape:
    mesh = candidate.mesh
    return _Shape(num_ranks=mesh.pp, num_microbatches=mesh.num_microbatches, num_slices=len(candidate.slices))


def _check_shape(order: Order, candidate: Candidate) -> None:
    expected = {"stages": len(candidate.stages), "ranks": candidate.mesh.pp}
    actual = {"stages": order.num_stages, "ranks": order.num_ranks}
    for name, number in expected.items():
        if actual[name] != number:
            raise UserError(
                what=f"the schedule has {actual[name]} {name}, the plan {number}",
                where="spec.parallelism.schedule",
                remedy="pin stages and pp that agree with the schedule",
            )
