"""A candidate's integer tables: times for the simulator, times and bytes for generators that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.layout import SlotKind
from penstock.core.schedule import Group
from penstock.core.units import to_nanoseconds
from penstock.planner.candidates import Candidate, in_flight_slices
from penstock.planner.memory import StageMemory
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, RECOMPUTE, WEIGHT_GRADIENT
from penstock.planner.problem import Mesh, Problem
from penstock.planner.schedules.inputs import StageTable
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS, Costs, Hosts, compute_table, hosts
from penstock.planner.stagecost import PASSES, UNIT_KINDS, Integers, StageCosts, prefixes, unit_counts

Placement = Callable[[Mesh], tuple[int, ...]]
"""The first device of every rank, replica after replica."""

NORM_BYTES = 16


def devices_in_order(mesh: Mesh) -> tuple[int, ...]:
    """Tensor-parallel peers adjacent, then a stage's replicas (they exchange the most bytes), then stages."""
    return tuple((rank * mesh.dp + replica) * mesh.tp for replica in range(mesh.dp) for rank in range(mesh.pp))


def stage_memories(problem: Problem, candidate: Candidate) -> list[StageMemory]:
    """The byte arithmetic of every stage."""
    return [
        StageMemory(
            model=problem.model,
            precision=problem.precision,
            first=first,
            stop=stop,
            batch=candidate.mesh.microbatch,
            tp=candidate.mesh.tp,
        )
        for first, stop in candidate.stages
    ]


def simulation_costs(
    problem: Problem, candidate: Candidate, passes: StageCosts, stage_ranks: tuple[int, ...], placement: Placement
) -> Costs:
    """Everything the simulator charges for; ``stage_ranks`` says which rank runs each stage."""
    mesh = candidate.mesh
    devices = placement(mesh)
    compute = compute_table(*passes.alone_ns)
    overhead = to_nanoseconds(problem.cost_of(mesh.tp).action_overhead_seconds)
    compute[BACKWARD] -= np.minimum(overhead, compute[BACKWARD])  # one action where I and W are two
    return Costs(
        compute_ns=compute,
        together_ppm=_together(passes),
        transfer_ns=transfer_table(problem, candidate, stage_ranks, devices),
        hosts=_hosts(problem, mesh, devices),
        reduce_ns=_reductions(problem, candidate, stage_ranks, devices),
        optimizer_ns=optimizer_ns(problem, candidate, stage_ranks),
    )


def _together(passes: StageCosts) -> Integers:
    table = np.full((len(KINDS), *passes.alone_ns.shape[1:]), MILLION, dtype=np.int64)
    table[FORWARD] = table[RECOMPUTE] = passes.slowdown_ppm[0]
    table[INPUT_GRADIENT], table[WEIGHT_GRADIENT] = passes.slowdown_ppm[1], passes.slowdown_ppm[2]
    alone, together = passes.alone_ns[1:].sum(axis=0), passes.together_ns[1:].sum(axis=0)
    table[BACKWARD] = np.maximum(MILLION * together // np.maximum(alone, 1), MILLION)
    return table


def transfer_table(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
) -> Integers:
    """[direction, stage, slice]: latency + bytes / bandwidth of every message, over the slowest replica's links."""
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    width = mesh.microbatch * problem.model.hidden * problem.precision.compute_bytes
    sizes = np.array(candidate.slices, dtype=np.int64) * width
    num_stages = len(stage_ranks)
    table = np.zeros((2, num_stages, len(sizes)), dtype=np.int64)
    for direction, shift in ((TO_NEXT, 1), (TO_PREVIOUS, -1)):
        for stage in range(num_stages):
            if not 0 <= stage + shift < num_stages:
                continue
            source, target = stage_ranks[stage], stage_ranks[stage + shift]
            latency, per_byte = cost.transfer(devices[source :: mesh.pp], devices[target :: mesh.pp])
            table[direction, stage] = np.rint((latency.max() + sizes * per_byte.max()) * 1e9)
    return table


def _hosts(problem: Problem, mesh: Mesh, devices: tuple[int, ...]) -> Hosts:
    """The hosts of the first replica, and how many replicas share them."""
    nodes = [device // problem.devices_per_node for device in devices]
    first = nodes[: mesh.pp]
    number = {node: index for index, node in enumerate(dict.fromkeys(first))}
    sharing = sum(nodes[i * mesh.pp : (i + 1) * mesh.pp] == first for i in range(mesh.dp))
    return hosts([number[node] for node in first], replicas=sharing)


def _reductions(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
) -> dict[Group, tuple[int, ...]]:
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    per_rank = np.zeros(mesh.pp, dtype=np.int64)
    for memory, rank in zip(stage_memories(problem, candidate), stage_ranks, strict=True):
        per_rank[rank] += memory.gradient_bytes
    peers = [[devices[replica * mesh.pp + rank] for replica in range(mesh.dp)] for rank in range(mesh.pp)]
    shared = problem.model.vocab * problem.model.hidden * problem.precision.accumulate_bytes // mesh.tp
    ends = (devices[stage_ranks[0]], devices[stage_ranks[-1]])
    seconds = {
        Group.DP: [cost.all_reduce_seconds(int(n), peer) for n, peer in zip(per_rank, peers, strict=True)],
        Group.TIE: [cost.all_reduce_seconds(shared, ends)] * mesh.pp,
        Group.NORM: [cost.all_reduce_seconds(NORM_BYTES, devices)] * mesh.pp,
    }
    return {group: tuple(to_nanoseconds(each) for each in row) for group, row in seconds.items()}


def optimizer_ns(problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Every rank's optimizer step."""
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    elements = np.zeros(mesh.pp, dtype=np.int64)
    for memory, rank in zip(stage_memories(problem, candidate), stage_ranks, strict=True):
        elements[rank] += memory.gradient_bytes // problem.precision.accumulate_bytes
    return tuple(to_nanoseconds(cost.optimizer_seconds(int(count))) for count in elements)


def static_bytes(problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Per rank what is always there: the process, parameters and their state, and the largest transient."""
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    held = np.full(mesh.pp, cost.constant_bytes, dtype=np.int64)
    transient = np.zeros(mesh.pp, dtype=np.int64)
    largest = unit_transients(problem, mesh, candidate.slices)
    needed = np.where(unit_counts(problem.model, candidate.stages) > 0, largest, 0).max(axis=1)
    for stage, memory in enumerate(stage_memories(problem, candidate)):
        rank = stage_ranks[stage]
        held[rank] += memory.state_bytes
        transient[rank] = max(transient[rank], needed[stage])
    return tuple(int(each) for each in held + transient)


def unit_transients(problem: Problem, mesh: Mesh, slices: Sequence[int]) -> Integers:
    """[unit kinds]: the most bytes any pass of each unit takes beyond its slots, over all slices."""
    cost, before = problem.cost_of(mesh.tp), prefixes(slices).tolist()
    return np.array(
        [
            max(
                cost.transient_bytes(unit, kind, mesh.microbatch, length, prefix)
                for kind in PASSES
                for length, prefix in set(zip(slices, before, strict=True))
            )
            for unit in UNIT_KINDS
        ],
        dtype=np.int64,
    )


def least_bytes(problem: Problem, candidate: Candidate, schedule: str) -> int:
    """Bytes that the fullest rank needs at least: what is always there and the activations that ``schedule`` keeps.

    Whole micro-batches count in full, the slices beyond them as the smallest one. One stage per rank.
    """
    num_slices = len(candidate.slices)
    always = np.array(static_bytes(problem, candidate, tuple(range(candidate.mesh.pp))))
    held = np.array(in_flight_slices(candidate.mesh, num_slices, schedule))
    counts = unit_counts(problem.model, candidate.stages)
    per_slice = counts @ _held_bytes(problem, candidate.mesh, candidate.slices)
    needed = always + held // num_slices * per_slice.sum(axis=1) + held % num_slices * per_slice.min(axis=1)
    return int(needed.max())


def _held_bytes(problem: Problem, mesh: Mesh, slices: tuple[int, ...]) -> Integers:
    """[unit kinds, slices]: what one unit keeps from F on. The output that a stage sends is left out everywhere."""
    units = {unit.kind: unit.index for unit in problem.model.units}
    table = np.zeros((len(UNIT_KINDS), len(slices)), dtype=np.int64)
    for row, kind in enumerate(UNIT_KINDS):
        memory = StageMemory(
            model=problem.model,
            precision=problem.precision,
            first=units[kind],
            stop=units[kind] + 1,
            batch=mesh.microbatch,
            tp=mesh.tp,
        )
        sizes = {n: sum(memory.slot_bytes(slot, n) for slot in _HELD) for n in set(slices)}
        table[row] = [sizes[n] for n in slices]
    return table


_HELD = (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS)


def stash_tables(problem: Problem, candidate: Candidate) -> tuple[StageTable, StageTable, StageTable]:
    """Bytes by which F, I and W change what a rank holds: x, a, l and their tokens' keys and values come with F;
    I gives back x, a, keys and values and makes w; W gives back l and w.
    """
    taken, exchanged, returned = [], [], []
    for memory in stage_memories(problem, candidate):
        x, a, kv, linear, gradients = (
            np.array([memory.slot_bytes(slot, tokens) for tokens in candidate.slices])
            for slot in (
                SlotKind.INPUT,
                SlotKind.ACTIVATIONS,
                SlotKind.KEYS_VALUES,
                SlotKind.LINEAR_INPUTS,
                SlotKind.OUTPUT_GRADIENTS,
            )
        )
        taken.append(x + a + kv + linear)
        exchanged.append(gradients - x - a - kv)
        returned.append(-linear - gradients)
    return rows(np.array(taken)), rows(np.array(exchanged)), rows(np.array(returned))


def stash_caps(problem: Problem, candidate: Candidate, receive_ahead: int) -> tuple[int, ...]:
    """What each rank may hold of those: the limit less what is always there and room for messages."""
    ranks = tuple(range(candidate.mesh.pp))
    longest = max(candidate.slices)
    always = static_bytes(problem, candidate, ranks)
    return tuple(
        max(
            problem.memory_limit_bytes
            - always[rank]
            - memory.slot_bytes(SlotKind.KEYS_VALUES_GRADIENTS, problem.sequence_length)
            - (2 * receive_ahead + 2) * memory.slot_bytes(SlotKind.INPUT, longest),
            0,
        )
        for rank, memory in enumerate(stage_memories(problem, candidate))
    )


def rows(table: Integers) -> StageTable:
    """A [stage, slice] array as tuples of plain integers."""
    return tuple(tuple(int(value) for value in row) for row in table)
