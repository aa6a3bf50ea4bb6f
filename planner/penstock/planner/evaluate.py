"""The judge of the search: candidates turned into integer tables and simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from penstock.core.program import Reduction, SlotSizes
from penstock.core.schedule import Group, ScheduleSpec
from penstock.planner.candidates import Candidate
from penstock.planner.order import Order
from penstock.planner.problem import Mesh, Problem
from penstock.planner.realise import tied_ranks
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.registry import BUILT_IN, find, order_from_spec, to_spec
from penstock.planner.search import Evaluation
from penstock.planner.simulate.arrays import StepTimes, simulate_arrays
from penstock.planner.simulate.costs import TO_NEXT, TO_PREVIOUS, Costs
from penstock.planner.simulate.memory import high_water_bytes
from penstock.planner.stagecost import StageCosts, stage_costs
from penstock.planner.tables import (
    Placement,
    devices_in_order,
    least_bytes,
    optimizer_ns,
    rows,
    simulation_costs,
    stage_memories,
    stash_caps,
    stash_tables,
    static_bytes,
    transfer_table,
)

DEFAULT_RECEIVE_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Simulated:
    """The `Judge` of a problem: bounds from stage costs, evaluations from the simulator."""

    problem: Problem
    receive_ahead: int = DEFAULT_RECEIVE_AHEAD
    placement: Placement = devices_in_order
    _costs: dict[tuple[object, ...], StageCosts] = field(default_factory=dict)
    _floor_table: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def mesh_bound_ns(self, mesh: Mesh) -> int:
        """The model's work spread perfectly, and the fill that no order avoids, (K-1) F / S of a stage.

        Taken at the best of a few equal slicings, so an optimistic estimate rather than a proof.
        """
        floors = (work * mesh.num_microbatches + (mesh.pp - 1) * fill for work, fill in self._floors(mesh))
        return min(floors) // mesh.pp

    def _floors(self, mesh: Mesh) -> list[tuple[int, int]]:
        """For a few equal slicings, the model's nanoseconds on one micro-batch and its F of the first slice."""
        key = (mesh.tp, mesh.microbatch)
        if key not in self._floor_table:
            problem, whole = self.problem, ((0, self.problem.model.num_units),)
            cost, found = problem.cost_of(mesh.tp), []
            for count in (1, 4, 16):
                slices = (max(problem.sequence_length // count, 1),) * count
                alone = stage_costs(cost, problem.model, whole, slices, mesh.microbatch).alone_ns
                found.append((int(alone.sum()), int(alone[0, 0, 0])))
            self._floor_table[key] = found
        return self._floor_table[key]

    def bound_ns(self, candidate: Candidate) -> int:
        """Fill, busiest rank, drain: the first slice comes down, the work is done, slice 0's gradient goes back up."""
        alone = self.stage_costs(candidate).alone_ns
        work = candidate.mesh.num_microbatches * alone.sum(axis=(0, 2))
        fill, drain = alone[0, :, 0], alone[1, :, 0]
        before = np.cumsum(fill) - fill + np.cumsum(drain) - drain
        ranks = tuple(range(candidate.mesh.pp))
        return int((work + before).max()) + min(optimizer_ns(self.problem, candidate, ranks))

    def least_bytes(self, candidate: Candidate) -> int:
        """What the fullest rank needs at least; schedules that are not built in only tell when simulated."""
        if candidate.schedule not in BUILT_IN:
            return 0
        return least_bytes(self.problem, candidate, str(candidate.schedule))

    def num_actions(self, candidate: Candidate) -> int:
        """F, I and W of every slice on every stage."""
        return 3 * len(candidate.stages) * candidate.mesh.num_microbatches * len(candidate.slices)

    def stage_costs(self, candidate: Candidate) -> StageCosts:
        """Nanoseconds of every pass, stage and slice."""
        mesh = candidate.mesh
        key = (mesh.tp, mesh.microbatch, candidate.stages, candidate.slices)
        if key not in self._costs:
            cost = self.problem.cost_of(mesh.tp)
            self._costs[key] = stage_costs(
                cost, self.problem.model, candidate.stages, candidate.slices, mesh.microbatch
            )
        return self._costs[key]

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Simulate one step of the candidate."""
        order = self.order(candidate)
        times = self.times(candidate, order)
        busiest = int(times.compute_ns.argmax())
        stage_ranks = tuple(order.stage_ranks.tolist())
        slots = high_water_bytes(order, self._sizes(candidate), candidate.slices, self.receive_ahead)
        always = static_bytes(self.problem, candidate, stage_ranks)
        return Evaluation(
            candidate=candidate,
            step_ns=times.makespan_ns,
            compute_ns=int(times.compute_ns[busiest]),
            bubble_ns=int(times.bubble_ns[busiest]),
            communication_ns=int(times.communication_ns[busiest]),
            reduction_ns=int(times.reduction_ns[busiest]),
            optimizer_ns=int(times.optimizer_ns[busiest]),
            peak_bytes=tuple(a + int(b) for a, b in zip(always, slots, strict=True)),
            slot_bytes=tuple(int(each) for each in slots),
            num_actions=order.num_actions,
        )

    def times(self, candidate: Candidate, order: Order, *, traced: bool = False) -> StepTimes:
        """The simulated step of an order of this candidate."""
        stage_ranks = tuple(order.stage_ranks.tolist())
        return simulate_arrays(
            order,
            self.costs(candidate, stage_ranks),
            receive_ahead=self.receive_ahead,
            reductions=self._reductions(candidate, stage_ranks),
            traced=traced,
        )

    def costs(self, candidate: Candidate, stage_ranks: tuple[int, ...]) -> Costs:
        """The simulator's tables."""
        return simulation_costs(self.problem, candidate, self.stage_costs(candidate), stage_ranks, self.placement)

    def _reductions(self, candidate: Candidate, stage_ranks: tuple[int, ...]) -> tuple[Reduction, ...]:
        everyone = tuple(range(candidate.mesh.pp))
        found = [Reduction(Group.NORM, everyone)]
        if candidate.mesh.dp > 1:
            found.insert(0, Reduction(Group.DP, everyone))
        tie = tied_ranks(self.problem.model, candidate.stages, stage_ranks)
        if tie is not None:
            found.insert(0, Reduction(Group.TIE, tuple(sorted(tie))))
        return tuple(found)

    def _sizes(self, candidate: Candidate) -> SlotSizes:
        memories = stage_memories(self.problem, candidate)
        return lambda kind, stage, tokens: memories[stage].slot_bytes(kind, tokens)

    def order(self, candidate: Candidate) -> Order:
        """The candidate's schedule as arrays."""
        if isinstance(candidate.schedule, ScheduleSpec):
            return order_from_spec(candidate.schedule, **_shape(candidate))
        return find(candidate.schedule).generate(self.schedule_inputs(candidate, candidate.schedule))

    def spec(self, candidate: Candidate) -> ScheduleSpec:
        """The candidate's schedule as a recipe."""
        if isinstance(candidate.schedule, ScheduleSpec):
            return candidate.schedule
        return to_spec(candidate.schedule, self.schedule_inputs(candidate, candidate.schedule))

    def schedule_inputs(self, candidate: Candidate, name: str) -> ScheduleInputs:
        """What the generator is given; costs and stash only where it uses them."""
        if not find(name).uses_costs:
            return ScheduleInputs(**_shape(candidate))
        ranks = tuple(range(candidate.mesh.pp))
        passes = self.stage_costs(candidate).together_ns
        transfers = transfer_table(self.problem, candidate, ranks, self.placement(candidate.mesh))
        forward, exchanged, returned = stash_tables(self.problem, candidate)
        return ScheduleInputs(
            **_shape(candidate),
            forward_ns=rows(passes[0]),
            input_ns=rows(passes[1]),
            weight_ns=rows(passes[2]),
            send_forward_ns=rows(transfers[TO_NEXT]),
            send_backward_ns=rows(transfers[TO_PREVIOUS]),
            forward_stash=forward,
            input_stash=exchanged,
            weight_stash=returned,
            caps=stash_caps(self.problem, candidate, self.receive_ahead),
            receive_ahead=self.receive_ahead,
        )


class _Shape(TypedDict):
    num_ranks: int
    num_microbatches: int
    num_slices: int


def _shape(candidate: Candidate) -> _Shape:
    mesh = candidate.mesh
    return _Shape(num_ranks=mesh.pp, num_microbatches=mesh.num_microbatches, num_slices=len(candidate.slices))
