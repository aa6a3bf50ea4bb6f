"""Estimated steps of outlines, in closed form: they rank thousands of outlines before any plan is made and simulated.

An outline is a mesh, a number of slices and a schedule. Its step is estimated from stages that are balanced by time and
slices of equal length. For stage j, let f, i, w be the seconds of F, I and W of one slice, t their sum, and c the
seconds of a message. There are K ranks and M micro-batches of S slices; a smaller last micro-batch counts as a
fraction. The step is M S times a period, plus a fill, plus an end.

The period is the busiest rank's t, or longer where messages are not hidden. A turn is one F and one backward of a rank
in steady state. A rank r that may hold n slices runs the backward of a micro-batch's last slice d = n - S + 1 turns
after its forward. In between that slice travels to the last rank and back, which takes q = sum of f + i (and of w where
backwards are not split) over the ranks from r on, plus c per hop both ways. If S is larger than d, the rank spends the
remaining S - d turns on slices that do not wait. So

    period >= (q + max(0, S - d) t) / max(S, d)

This holds from slice max(S, d) on, the first one that waits for an earlier slice to return. Under 1F1B d is K - r, so a
message costs time for any number of slices. Pipette (arXiv 2405.18093) calls this the hidden critical path. Schedules
that adapt to free memory have the largest n that fits. In a V, rank r holds a slice in two stages: in the first while
it passes the 2 K - r stages from there on, in the second while it passes the last r + 1. The sum is the same for all
ranks.

The fill is the busiest rank's idle time while the first slices arrive and the last leave: the sum over the other stages
of t under 1F1B and of f + i - w under ZB-H1 (arXiv 2401.10241), with messages both ways, and of the largest slices' t
under a flush. If memory allows W to fill the rest, a rank only waits for f of the stages before it. No step is shorter
than the busiest network card takes to send. The end is the reductions and the optimizer of the rank with most
parameters: over dp replicas an all-reduce of the gradients and an update of all elements, or with ZeRO-1 a
reduce-scatter, an update of a dp-th of them, and an all-gather of the weights. The reduce-scatter and the all-gather
each are one pass over the ring; an all-reduce is two. So in bf16, where weights are half as wide as gradients, ZeRO-1
is shorter and needs less memory. If one degree of ZeRO is better in both, there is no outline for the other. On the
host a rank with several stages sums the gradients of one while it works on another
(`penstock.planner.passes.reductions`), so only its longest sum counts, or only the sum of the last bucket.

The bytes are those of units of mean size that can be divided: rank r holds the state of its units and the activations
of m_r micro-batches of them, so the limit L must allow sum over r of (L - always_r) / (state + m_r held) units. The
least L that allows all units follows directly. A part of a divided head counts as the units that take as much, on the
rank where these are fewest. Real units are not divided, so plans need more; if attention and MLP differ much, a plan
may need less by a part of a unit.

If a rank needs more than the limit, its layers recompute just enough to fit, if any recomputation suffices
(`penstock.planner.recompute`); the step is longer by that work.

Estimates decide only the order of the search. Every plan that is chosen was simulated.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.core.buckets import MOST_BUCKETS
from penstock.core.schedule import ScheduleSpec
from penstock.core.units import NANOSECONDS_PER_SECOND
from penstock.planner.balancing import head_degrees, time_balanced_stages
from penstock.planner.candidate import label_of, optimizer_shards
from penstock.planner.device_order import first_replica_in_order, slowness_in_order
from penstock.planner.memory import optimizer_bytes_per_parameter, stepped_elements
from penstock.planner.outline_work import OutlineMemories, Relief, UnitWork, microbatch_capacity, stages_per_rank
from penstock.planner.problem import Mesh, Problem, imported_schedule, meshes, zero_degrees
from penstock.planner.schedules.registry import BUILT_IN, REPEATING, SEARCHED, SEARCHED_VIRTUAL, USUAL, find
from penstock.planner.simulate.periodic import enough_to_repeat
from penstock.planner.stagecost import (
    Integers,
    Slices,
    Stages,
    equal_slices,
    unit_counts,
)
from penstock.planner.tables import memory_of, messages_at_once, shards_seconds, tie_seconds
from penstock.planner.work import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A mesh with a number of slices, a schedule, parts of the head and a degree of ZeRO, with its estimated step and
    the least bytes that a rank needs. ``recomputes``: ranks recompute what exceeds the limit, by an R or inside their
    backwards (``recomputes_inside``).
    """

    mesh: Mesh
    num_slices: int
    schedule: str | ScheduleSpec
    estimate_ns: int
    least_bytes: int
    head_parts: int = 1
    zero: int = 0
    recomputes: bool = False
    recomputes_inside: bool = False
    relief: Callable[[bool], Relief | None] = field(default=lambda is_inside: None, compare=False, repr=False)
    """Recomputation that would reduce the bytes, by an R or inside backwards; gives None if ranks fit without it, or
    may not recompute.
    """

    @property
    def label(self) -> str:
        """Text for explanations."""
        parts, recomputes = self.head_parts, self.recomputes
        return label_of(self.mesh, self.num_slices, self.schedule, parts, recomputes=recomputes, zero=self.zero)

    @property
    def relieved(self) -> Outline | None:
        """The outline with recomputation of what exceeds the limit; None without a ``relief``, or if it has it."""
        return None if self.recomputes else self._relieved_by(self.relief(False))

    @property
    def relieved_inside(self) -> Outline | None:
        """The outline like `relieved`, but with recomputation inside backwards."""
        relieved = None if self.recomputes else self._relieved_by(self.relief(True))
        return None if relieved is None else replace(relieved, recomputes_inside=True)

    def _relieved_by(self, relief: Relief | None) -> Outline | None:
        if relief is None:
            return None
        return Outline(
            mesh=self.mesh,
            num_slices=self.num_slices,
            schedule=self.schedule,
            estimate_ns=self.estimate_ns + relief.recompute_ns,
            least_bytes=relief.least_bytes,
            head_parts=self.head_parts,
            zero=self.zero,
            recomputes=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """Summary of outlines: how many exceed the memory limit, the numbers of head parts that occur (ascending), and the
    least estimate of those with a whole head that could fit.
    """

    num_too_large: int
    head_parts: tuple[int, ...]
    whole_head_ns: int | None

    @classmethod
    def of(cls, among: Sequence[Outline], limit_bytes: int) -> Overview:
        """Summary of the outlines ``among``."""
        fitting = [outline for outline in among if outline.least_bytes <= limit_bytes]
        head_parts = tuple(sorted({outline.head_parts for outline in among}))
        whole_ns = min((outline.estimate_ns for outline in fitting if outline.head_parts == 1), default=None)
        if whole_ns is None and len(head_parts) > 1:
            whole_ns = _least_relieved_ns((outline for outline in among if outline.head_parts == 1), limit_bytes)
        return cls(num_too_large=len(among) - len(fitting), head_parts=head_parts, whole_head_ns=whole_ns)


def _least_relieved_ns(among: Iterable[Outline], limit_bytes: int) -> int | None:
    """Estimate, with recomputation, of the first outline that fits with it; None if none fits. Outlines are
    tried in the order of their estimates without recomputation.
    """
    by_estimate = sorted(among, key=lambda outline: outline.estimate_ns)
    relieved = (outline.relieved for outline in by_estimate)
    fitting = (outline for outline in relieved if outline is not None and outline.least_bytes <= limit_bytes)
    return next((outline.estimate_ns for outline in fitting), None)


MOST_ACTIONS_IN_FULL = 60_000
"""Longer steps that do not repeat are only searched if their schedule is pinned."""

NUM_SLICES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
"""Numbers of slices of the outlines if none is pinned; the search also tries the neighbours of the best."""


def schedules_for(problem: Problem, mesh: Mesh) -> tuple[str | ScheduleSpec, ...]:
    """Schedules that can run on the mesh with the job's pins and have at most as many stages as the model has units."""
    return tuple(
        schedule
        for schedule in _allowed_schedules(problem, mesh)
        if num_stages(problem, mesh, schedule) <= problem.model.num_units
    )


def _allowed_schedules(problem: Problem, mesh: Mesh) -> tuple[str | ScheduleSpec, ...]:
    pinned = problem.pinned
    if pinned.schedule is not None:
        return (pinned.schedule,)
    if mesh.pp == 1:
        return ("1f1b",)
    if pinned.stages is not None:
        return SEARCHED if len(pinned.stages) == mesh.pp else SEARCHED_VIRTUAL
    return (*SEARCHED, *SEARCHED_VIRTUAL)


def outlines(problem: Problem) -> list[Outline]:
    """Every outline of the meshes that are searched first, in a fixed order."""
    return list(outlines_of(problem, meshes(problem)))


def outlines_of(
    problem: Problem, among: Iterable[Mesh], most_ns: Callable[[Mesh], float] = lambda mesh: math.inf
) -> Iterator[Outline]:
    """Outlines of the meshes ``among`` whose estimate is at most ``most_ns`` of the mesh, in a fixed order.

    Stages are balanced once for all sizes of micro-batches, for the smallest one; for others they differ little.
    ``most_ns`` is called right before a mesh is estimated, so its result may decrease as outlines are consumed.
    """
    degrees: dict[tuple[int, int], tuple[int, ...]] = {}
    firsts: dict[tuple[int, int], Mesh] = {}
    by_work = sorted(among, key=lambda mesh: (mesh.tp, mesh.microbatch, mesh.pp, mesh.dp))
    for (tp, batch), group in itertools.groupby(by_work, key=lambda mesh: (mesh.tp, mesh.microbatch)):
        # A stage's replicas wait for the slowest, so with unequal devices the best stages depend on the number dp.
        for (pp, _), same in itertools.groupby(group, key=lambda mesh: (mesh.pp, mesh.dp if problem.slowness else 0)):
            pipelines = list(same)
            first = pipelines[0] if problem.slowness else firsts.setdefault((tp, pp), pipelines[0])
            if (tp, pp) not in degrees:
                degrees[tp, pp] = _degrees(problem, first)
            for parts in degrees[tp, pp]:
                divided = problem.divided(parts)
                make = functools.partial(UnitWork.of, divided, tp, batch, _all_slicings(problem))
                work = divided.kept((UnitWork, tp, batch), make)
                yield from _of_pipelines(divided, work, pipelines, first, most_ns)


def _degrees(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """Searched numbers of parts of the head; they hardly depend on the micro-batch, so one mesh stands for several."""
    owners = (owners_of_stages(problem, mesh, schedule) for schedule in _allowed_schedules(problem, mesh))
    return head_degrees(problem, mesh, _typical_slices(problem), dict.fromkeys(owners))


def _typical_slices(problem: Problem) -> Slices:
    """Slices for which stages are balanced for an estimate; stages for other numbers of slices differ little."""
    pinned, counts = problem.pinned.slices, _all_counts(problem)
    return pinned if isinstance(pinned, tuple) else equal_slices(problem.sequence_length, counts[len(counts) // 2])


def _all_counts(problem: Problem) -> tuple[int, ...]:
    return tuple(sorted({*slice_counts(problem, 1), *slice_counts(problem, 2)}))


def _all_slicings(problem: Problem) -> list[Slices]:
    """The pinned slicing, or equal slices of every number in question."""
    pinned, length = problem.pinned.slices, problem.sequence_length
    return [pinned if isinstance(pinned, tuple) else equal_slices(length, count) for count in _all_counts(problem)]


def slice_counts(problem: Problem, pp: int) -> tuple[int, ...]:
    """Numbers of slices that plans may have: the pinned one, else several; 1 for one rank, which waits for none."""
    pinned, imported = problem.pinned.slices, imported_schedule(problem.pinned)
    if isinstance(pinned, tuple):
        return (len(pinned),)
    if pinned is not None:
        return (pinned,)
    if imported is not None:
        return (imported.num_slices,)
    most_slices = problem.sequence_length // problem.quantum
    return (1,) if pp == 1 else tuple(count for count in NUM_SLICES if count <= most_slices)


def are_simulated_soon(
    problem: Problem, mesh: Mesh, counts: Sequence[int], schedule: str | ScheduleSpec
) -> tuple[bool, ...]:
    """For each number of slices whether the search can simulate it: the step soon repeats itself, or is short enough to
    be simulated in full.
    """
    if schedule in REPEATING or problem.pinned.schedule is not None:
        return (True,) * len(counts)
    per_microbatch, soon = 3 * num_stages(problem, mesh, schedule), list[bool]()
    for num_slices in counts:
        num_microbatches = mesh.num_microbatches
        if schedule in SEARCHED_VIRTUAL:
            num_microbatches = min(num_microbatches, 3 * enough_to_repeat(mesh.pp, num_slices))
        soon.append(per_microbatch * num_microbatches * num_slices <= MOST_ACTIONS_IN_FULL)
    return tuple(soon)


def _of_pipelines(
    problem: Problem,
    work: UnitWork,
    same: Sequence[Mesh],
    typical: Mesh,
    most_ns: Callable[[Mesh], float],
) -> Iterator[Outline]:
    """Outlines of meshes that differ only in the number of replicas; stages are balanced for ``typical``."""
    counts = slice_counts(problem, same[0].pp)
    places = np.searchsorted(work.counts, counts).tolist()
    owners = {schedule: owners_of_stages(problem, same[0], schedule) for schedule in schedules_for(problem, same[0])}
    if not owners:
        return
    slices = _typical_slices(problem)
    by_stages = {
        ranks: _StageTimes.of(problem, work, same[0], time_balanced_stages(problem, typical, slices, ranks), ranks)
        for ranks in dict.fromkeys(owners.values())
    }
    busy_ns = NANOSECONDS_PER_SECOND * min(times.busiest_seconds(same[0]) for times in by_stages.values())
    for mesh in same:
        longest_ns = most_ns(mesh)
        if mesh.num_by_work * busy_ns > longest_ns:
            continue
        hops = _hop_seconds(problem, work, mesh)
        card_seconds = mesh.num_by_work * work.counts * _card_seconds(problem, mesh, hops)
        capacities = {zero: microbatch_capacity(problem, work, mesh, zero) for zero in zero_degrees(problem, mesh.dp)}
        ends = {ranks: _useful_ends(times.ends(problem, mesh)) for ranks, times in by_stages.items()}
        launched = {ranks: times.launched(problem, mesh) for ranks, times in by_stages.items()}
        memories = OutlineMemories(problem, work, mesh)
        for schedule, ranks in owners.items():
            name = schedule if isinstance(schedule, str) else schedule.generator
            soon = are_simulated_soon(problem, mesh, counts, schedule)
            least_seconds = stages_per_rank(problem, mesh, schedule) * card_seconds
            for zero, end in ends[ranks].items():
                steps = _step_seconds(launched[ranks], mesh, name, hops, capacities[zero])
                steps = np.maximum(steps, least_seconds) + end.seconds + memories.pinned_seconds
                step_ns, least_bytes = steps * NANOSECONDS_PER_SECOND, memories.least_bytes(name, zero)
                relief = functools.partial(memories.relief, USUAL.get(name, name), zero)
                for place, num_slices, is_soon in zip(places, counts, soon, strict=True):
                    estimate_ns = round(float(step_ns[place]))
                    if is_soon and estimate_ns <= longest_ns:
                        yield Outline(
                            mesh=mesh,
                            num_slices=num_slices,
                            schedule=schedule,
                            estimate_ns=estimate_ns,
                            least_bytes=int(least_bytes[place]),
                            head_parts=problem.model.head_parts,
                            zero=zero,
                            relief=functools.partial(relief, place),
                        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """Seconds of a step's end, and bytes of the rank with most state."""

    seconds: float
    state_bytes: int


def _useful_ends(ends: Mapping[int, _End]) -> dict[int, _End]:
    """The ends of the degrees of ZeRO that give a shorter end or less state than the other degree. Outlines of both are
    otherwise equal. Shards of small stages have gaps, so sharded state may be larger.
    """
    if len(ends) == 1:
        return dict(ends)
    whole, sharded = ends[0], ends[1]
    kept_ends = {0: whole} if whole.seconds < sharded.seconds or whole.state_bytes <= sharded.state_bytes else {}
    if sharded.seconds < whole.seconds or sharded.state_bytes < whole.state_bytes:
        kept_ends[1] = sharded
    return kept_ends


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StageTimes:
    """Seconds [F I W, stages, slicings] of time-balanced stages: of all slices, and of the largest one. The largest
    slice is counted as if it were the longest one for every kind of unit. The rank of every stage is one of ``owners``.
    ``late_totals`` and ``late_largest`` are by how much launches take longer. ``num_parameters`` and ``shards_seconds``
    (`penstock.planner.tables.shards_seconds`) are those of each stage.
    """

    work: UnitWork
    stages: Stages
    owners: tuple[int, ...]
    totals: Floats
    largest: Floats
    late_totals: Floats
    late_largest: Floats
    num_parameters: Integers
    shards_seconds: Floats

    @classmethod
    def of(cls, problem: Problem, work: UnitWork, mesh: Mesh, stages: Stages, owners: tuple[int, ...]) -> _StageTimes:
        """Times of ``stages``; they hold for any number of replicas, unless devices differ in speed."""
        of_kinds, overhead = unit_counts(problem.model, stages), work.cost.action_overhead_seconds
        slowness = slowness_in_order(problem, mesh)[list(owners), None]
        waits, longest_waits = of_kinds @ work.waits, of_kinds @ work.longest_waits
        return cls(
            work=work,
            stages=stages,
            owners=owners,
            totals=slowness * (of_kinds @ work.sums - waits + overhead * work.counts) + waits,
            largest=slowness * (of_kinds @ work.largest - longest_waits + overhead) + longest_waits,
            late_totals=slowness * np.maximum(of_kinds @ (work.launches - work.sums), 0.0),
            late_largest=slowness * np.maximum(of_kinds @ (work.longest_launches - work.largest), 0.0),
            num_parameters=memory_of(problem, stages, mesh.microbatch, mesh.tp).num_parameters,
            shards_seconds=shards_seconds(problem, stages, mesh) if mesh.tp > 1 else np.zeros(len(stages)),
        )

    def launched(self, problem: Problem, mesh: Mesh) -> _StageTimes:
        """The times in which the actions of the mesh that have no CUDA graph take at least as long as their launches.
        All slices are taken to be alike, and nothing to be recomputed.
        """
        most_bytes, launched = self.work.cost.most_graph_bytes, np.ones(1)
        if not self.late_totals.any():
            return self
        if most_bytes is not None:
            graph_bytes = np.zeros((mesh.pp, len(self.work.counts)))
            np.add.at(graph_bytes, list(self.owners), unit_counts(problem.model, self.stages) @ self.work.graph_bytes())
            of_ranks = mesh.num_by_work * graph_bytes
            launched = np.maximum(1 - most_bytes / np.maximum(of_ranks, 1), 0) * (of_ranks > 0)
            launched = launched[list(self.owners)]
        totals, largest = self.totals + launched * self.late_totals, self.largest + launched * self.late_largest
        return replace(self, totals=totals, largest=largest)

    def busiest_seconds(self, mesh: Mesh) -> float:
        """Lower bound of the busiest rank's seconds for a micro-batch, with the best slicing for that."""
        per_rank = self.totals.sum(axis=(0, 1)) / mesh.pp
        if len(self.stages) == mesh.pp:
            per_rank = self.totals.sum(axis=0).max(axis=0)
        return float(per_rank.min())

    def ends(self, problem: Problem, mesh: Mesh) -> dict[int, _End]:
        """Reductions and the optimizer of the rank with most parameters, by degree of ZeRO that the mesh may have."""
        owners = np.array(self.owners)
        shards = float(np.bincount(owners, weights=self.shards_seconds).max())
        tie = tie_seconds(problem, self.stages, self.owners, mesh, first_replica_in_order(problem, mesh).tolist())
        ends = {}
        for zero in zero_degrees(problem, mesh.dp):
            stepped = stepped_elements(self.num_parameters, optimizer_shards(mesh, zero))
            per_rank = np.bincount(owners, weights=stepped).astype(np.int64)
            largest = int(per_rank.max())
            summed_last = largest if problem.late_receives else int(stepped.max())
            if problem.has_buckets(mesh):
                summed_last = -(-summed_last // MOST_BUCKETS)
            sums, state_bytes = self._over_replicas(problem, mesh, largest, summed_last, zero)
            update = self._optimizer_seconds(problem, mesh, per_rank)
            ends[zero] = _End(seconds=shards + tie + sums + update, state_bytes=state_bytes)
        return ends

    def _optimizer_seconds(self, problem: Problem, mesh: Mesh, per_rank: Integers) -> float:
        """The longest update of the elements of a rank, on devices of its speed."""
        if not problem.slowness:
            return self.work.cost.optimizer_seconds(int(per_rank.max()))
        ranks: set[tuple[float, int]] = set(
            zip(slowness_in_order(problem, mesh).tolist(), per_rank.tolist(), strict=True)
        )
        return max(slowness * self.work.cost.optimizer_seconds(stepped) for slowness, stepped in ranks)

    def _over_replicas(
        self, problem: Problem, mesh: Mesh, stepped: int, summed_last: int, zero: int
    ) -> tuple[float, int]:
        """Seconds of the sums over replicas, and bytes of the state, of a rank that steps ``stepped`` elements per
        replica. With ZeRO a replica receives its shard of the sums, steps it, and gathers the weights. The sum of
        ``summed_last`` elements is not hidden by compute; with ZeRO as many are gathered, not hidden either, before
        the step's compute.
        """
        cost, precision, replicas = self.work.cost, problem.precision, [replica * mesh.tp for replica in range(mesh.dp)]
        shards, per_gradient = optimizer_shards(mesh, zero), problem.software.gradient_type.num_bytes(precision)
        weights = stepped * shards * precision.compute_bytes
        sums = cost.gradient_sum_seconds(summed_last * shards * per_gradient, replicas, scattered=zero > 0)
        if zero:
            sums += cost.all_gather_seconds(summed_last * shards * precision.compute_bytes, replicas)
        per_stepped = shards * per_gradient + optimizer_bytes_per_parameter(precision, problem.moment_type)
        state_bytes = stepped * per_stepped + weights
        return sums, state_bytes


def _hop_seconds(problem: Problem, work: UnitWork, mesh: Mesh) -> Floats:
    """[ranks - 1, slicings]: seconds of the message of one slice between neighbours."""
    devices = first_replica_in_order(problem, mesh)
    latency, per_byte = work.cost.transfer(devices[:-1], devices[1:])
    per_byte = per_byte * messages_at_once(problem, mesh, devices[:-1], devices[1:])
    num_bytes = problem.message_bytes(mesh.tp, mesh.microbatch * problem.sequence_length / work.counts)
    seconds: Floats = latency[:, None] + per_byte[:, None] * num_bytes
    return seconds


def _card_seconds(problem: Problem, mesh: Mesh, hops: Floats) -> Floats:
    """[slicings]: seconds in which the busiest network card sends the messages of one slice. As in the
    simulation, messages of different replicas do not share a card.
    """
    if mesh.pp == 1:
        return np.zeros(hops.shape[1])
    devices = first_replica_in_order(problem, mesh)
    cards, nodes = problem.card_of(devices), problem.host_of(devices)
    leaves = nodes[:-1] != nodes[1:]
    sent = np.bincount(np.concatenate([cards[:-1][leaves], cards[1:][leaves]]), minlength=1)
    seconds: Floats = sent.max() * hops.max(axis=0)
    return seconds


def owners_of_stages(problem: Problem, mesh: Mesh, schedule: str | ScheduleSpec) -> tuple[int, ...]:
    """The rank of every stage."""
    imported = imported_schedule(problem.pinned)
    if imported is not None:
        return imported.stage_ranks
    name = schedule if isinstance(schedule, str) else schedule.generator
    return find(name).stage_ranks(mesh.pp, num_stages(problem, mesh, schedule))


def num_stages(problem: Problem, mesh: Mesh, schedule: str | ScheduleSpec) -> int:
    """Number of stages on all ranks of the mesh under the schedule."""
    imported = imported_schedule(problem.pinned)
    return mesh.pp * stages_per_rank(problem, mesh, schedule) if imported is None else imported.num_stages


def _step_seconds(times: _StageTimes, mesh: Mesh, schedule: str, hops: Floats, capacity: Floats) -> Floats:
    """[slicings]: seconds of a step without its end; ``capacity`` [ranks, 1] is the memory in micro-batches."""
    if schedule not in BUILT_IN:
        even: Floats = mesh.num_by_work * times.totals.sum(axis=(0, 1)) / mesh.pp
        return even
    if len(times.stages) > mesh.pp:
        return _virtual_seconds(times, mesh, schedule, hops, capacity)
    slices = times.work.counts
    f, i, w = times.totals / slices
    busy = f + i + w
    num_slices: Floats = mesh.num_by_work * slices.astype(np.float64)
    down = hops.sum(axis=0)
    seconds: Floats
    if schedule == "gpipe":
        seconds = num_slices * busy.max(axis=0) + _sum_of_others(times.largest.sum(axis=0), busy) + 2 * down
        return seconds
    ranks_on = np.arange(mesh.pp, 0, -1)[:, None] + np.zeros(len(slices))
    turns = ranks_on if schedule != "zb" else np.clip((capacity - 1) * slices + 1, 1, 2 * ranks_on)
    round_trip = _suffix_sums(busy if schedule == "1f1b" else f + i)
    round_trip[:-1] += 2 * _suffix_sums(hops)
    period = (round_trip + np.maximum(slices - turns, 0) * busy) / np.maximum(slices, turns)
    of_ranks = _steady_seconds(num_slices, busy, period, np.maximum(slices, turns))
    if schedule == "1f1b":
        seconds = of_ranks.max(axis=0) + _sum_of_others(busy, busy) + 2 * down
        return seconds
    earlier = np.concatenate([np.zeros((1, len(slices))), (f[:-1] + hops).cumsum(axis=0)])
    shortest = (of_ranks + earlier).max(axis=0)
    plain = np.maximum(of_ranks.max(axis=0) + _sum_of_others(f + i - w, busy) + 2 * down, shortest)
    share = np.clip(turns[0] / mesh.pp - 1, 0, 1) if schedule == "zb" else 0.0
    seconds = share * shortest + (1 - share) * plain
    return seconds


def _steady_seconds(num_slices: Floats, busy: Floats, period: Floats, turns: Floats) -> Floats:
    """[ranks, slicings]: work, and waits for messages; the first ``turns`` slices, one loop, do not wait."""
    seconds: Floats = num_slices * busy + np.maximum(period - busy, 0) * np.maximum(num_slices - turns, 0)
    return seconds


def _sum_of_others(parts: Floats, busy: Floats) -> Floats:
    """[slicings]: the sum of ``parts`` [ranks, slicings] over all ranks but the busiest."""
    rest: Floats = parts.sum(axis=0) - parts[busy.argmax(axis=0), np.arange(parts.shape[1])]
    return rest


def _suffix_sums(parts: Floats) -> Floats:
    """Sums over each row and all rows below it."""
    sums: Floats = parts[::-1].cumsum(axis=0)[::-1]
    return sums


def _virtual_seconds(times: _StageTimes, mesh: Mesh, schedule: str, hops: Floats, capacity: Floats) -> Floats:
    """Seconds of a step without its end, for several stages per rank: each holds a slice while it travels to the last
    stage and back.
    """
    slices, num_stages = times.work.counts, len(times.stages)
    owners = np.array(find(schedule).stage_ranks(mesh.pp, num_stages))
    f, i, w = times.totals / slices
    per_rank = num_stages // mesh.pp
    mean_hop = hops.sum(axis=0) / max(mesh.pp - 1, 1)
    messages = 2 * mean_hop * np.arange(num_stages - 1, -1, -1)[:, None]
    busy, under_way = np.zeros((2, mesh.pp, len(slices)))
    np.add.at(busy, owners, f + i + w)
    np.add.at(under_way, owners, _suffix_sums(f + i) + messages)
    period = under_way / np.maximum(per_rank * ((capacity - 1) * slices + 1), 1)
    num_slices: Floats = mesh.num_by_work * slices.astype(np.float64)
    seconds: Floats = _steady_seconds(num_slices, busy, period, capacity * slices).max(axis=0)
    first = f + i + w if schedule == "interleaved-1f1b" else f
    seconds += first[: mesh.pp - 1].sum(axis=0) + hops.sum(axis=0)
    return seconds
