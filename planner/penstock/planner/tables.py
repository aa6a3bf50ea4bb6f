"""A candidate's integer tables: times for the simulator, times and bytes for generators that use them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.cluster import PENSTOCK, Transfers
from penstock.core.layout import NUM_STATISTICS, REMADE_SLOTS, SlotKind
from penstock.core.model import UnitKind
from penstock.core.moments import MomentType
from penstock.core.remaking import Remakes, remade_of
from penstock.core.schedule import Group, Kind
from penstock.planner.candidate import Candidate
from penstock.planner.device_order import Placement, slowed, slowness_of_ranks
from penstock.planner.lowering import Transients
from penstock.planner.memory import StageMemory, widened_bytes
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, RECOMPUTE, WEIGHT_GRADIENT, Order
from penstock.planner.pair_costs import collectives_of
from penstock.planner.problem import Mesh, Problem
from penstock.planner.remake import remake_until_ns
from penstock.planner.schedules.inputs import StageTable
from penstock.planner.shared_memory import prefix_table, scratch_table, split_scratch_table
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS, Costs, Hosts, compute_table, hosts
from penstock.planner.simulate.memory import Shape
from penstock.planner.stagecost import (
    UNIT_KINDS,
    Integers,
    StageCosts,
    Stages,
    UnitTable,
    collective_seconds,
    first_like,
    prefixes,
    unit_counts,
)
from penstock.planner.work import Floats, head_rows

Flags = npt.NDArray[np.bool_]

NORM_BYTES = 16


def stage_memory(problem: Problem, candidate: Candidate) -> StageMemory:
    """The byte arithmetic of its stages."""
    mesh, shards = candidate.mesh, candidate.optimizer_shards
    has_buckets = problem.has_buckets(mesh)
    return memory_of(problem, candidate.stages, mesh.microbatch, mesh.tp, candidate.recompute, shards, has_buckets)


def remainder_shape(problem: Problem, candidate: Candidate) -> Shape | None:
    """The slots and slices of its smaller last micro-batch, if it has one."""
    mesh = candidate.mesh
    if not mesh.remainder:
        return None
    memory = memory_of(problem, candidate.stages, mesh.remainder, mesh.tp, candidate.recompute)
    return memory.slot_bytes, candidate.remainder_slices


def remade_bytes(problem: Problem, candidate: Candidate) -> Integers:
    """[stages, columns]: the bytes that an R makes."""
    remainder = remainder_shape(problem, candidate)
    shapes = [(stage_memory(problem, candidate).slot_bytes, candidate.slices), *([remainder] if remainder else [])]
    sizes = [sum(slot_bytes(slot, lengths) for slot in REMADE_SLOTS.values()) for slot_bytes, lengths in shapes]
    return np.concatenate(sizes, axis=1)


def memory_of(
    problem: Problem,
    stages: Stages,
    batch: int,
    tp: int,
    recompute: tuple[Remakes, ...] = (),
    optimizer_shards: int = 1,
    has_buckets: bool = False,
) -> StageMemory:
    """The byte arithmetic of these stages for micro-batches of ``batch`` sequences; the same object for recent ones."""
    return _memory_of(
        model=problem.model,
        precision=problem.precision,
        stages=stages,
        batch=batch,
        sharding=problem.sharding(tp),
        software=problem.software,
        sequence_length=problem.sequence_length,
        recompute=recompute,
        optimizer_shards=optimizer_shards,
        has_buckets=has_buckets and optimizer_shards > 1,
        moment_type=problem.moment_type,
    )


_memory_of = functools.lru_cache(maxsize=16)(StageMemory)
"""The cache suffices for one candidate, with everything kept and with everything recomputed, at both degrees of ZeRO,
and for stages of one unit.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MappedDevices:
    """Devices of the ranks of a mesh, and the two fields of `Costs` that depend only on them."""

    devices: tuple[int, ...]
    card_ppm: Integers
    hosts: Hosts


def mapped_devices(problem: Problem, mesh: Mesh, stage_ranks: tuple[int, ...], placement: Placement) -> MappedDevices:
    """The `MappedDevices` of a mesh with this placement. ``stage_ranks`` is the rank of each stage."""
    devices = placement(mesh)
    return MappedDevices(
        devices=devices,
        card_ppm=card_table(problem, mesh, stage_ranks, devices),
        hosts=_hosts(problem, mesh, devices),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EndCosts:
    """The fields of `Costs` with the times of reductions, the optimizer and gathers, which do not depend on slices."""

    reduce_ns: dict[Group, tuple[int, ...]]
    optimizer_ns: tuple[int, ...]
    gather_ns: tuple[int, ...]

    @classmethod
    def of(
        cls, problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
    ) -> EndCosts:
        """The times for ranks whose first devices are ``devices``."""
        return cls(
            reduce_ns=_reductions(problem, candidate, stage_ranks, devices),
            optimizer_ns=optimizer_ns(problem, candidate, stage_ranks, devices),
            gather_ns=_gathers(problem, candidate, stage_ranks, devices),
        )


def simulation_costs(
    problem: Problem,
    candidate: Candidate,
    passes: StageCosts,
    stage_ranks: tuple[int, ...],
    mapped: MappedDevices,
    ends: EndCosts,
) -> Costs:
    """The simulator's tables for the candidate; ``stage_ranks`` is the rank of each stage."""
    mesh, devices = candidate.mesh, mapped.devices
    compute = compute_table(*passes.alone_ns)
    overhead = int(whole_nanoseconds(problem.cost_of(mesh.tp).action_overhead_seconds))
    compute[BACKWARD] -= np.minimum(overhead + passes.saved_ns, compute[BACKWARD])  # one action where I and W are two
    remade = recomputation_ns(problem, candidate) if any(candidate.recompute) else ()
    if (passes.launch_factor > 1).any():
        remade = tuple(map(slowed, remade, passes.launch_factor))
    compute[RECOMPUTE], inside = 0, None
    if remade:
        recompute_ns = np.stack([until[-1] for until in remade])
        if problem.software.recomputes_on_demand:
            compute[[INPUT_GRADIENT, BACKWARD]] += recompute_ns
            remade = tuple(np.zeros_like(until) for until in remade)
        else:
            compute[RECOMPUTE] = recompute_ns + overhead * (np.array(list(map(bool, candidate.recompute)))[:, None])
            inside = recompute_ns
    if problem.slowness:
        slowness = slowness_of_ranks(problem, mesh, devices)[list(stage_ranks)][:, None]
        waits = np.minimum(_waits_for_shards(problem, candidate), compute)
        compute = slowed(compute - waits, slowness) + waits
        inside = None if inside is None else slowed(inside, slowness)
        remade = tuple(map(slowed, remade, slowness))
    transfers = transfer_table(problem, candidate, stage_ranks, devices)
    if problem.software.transfers is Transfers.EXCHANGED:
        compute, transfers = _exchanged(compute, transfers)
    return Costs(
        compute_ns=compute,
        slowdown_ppm=_slowdown_table(passes),
        transfer_ns=transfers,
        card_ppm=mapped.card_ppm,
        hosts=mapped.hosts,
        reduce_ns=ends.reduce_ns,
        optimizer_ns=ends.optimizer_ns,
        gather_ns=ends.gather_ns,
        remade_ns=remade,
        inside_ns=inside,
        is_blocking=problem.software.transfers is Transfers.BLOCKING,
        has_barrier=problem.software.optimizer_barrier,
        num_remainder_slices=len(candidate.remainder_slices),
        collectives=collectives_of(problem, candidate),
    )


def _waits_for_shards(problem: Problem, candidate: Candidate) -> Integers:
    """[kind, stage, slice]: time of collectives inside compute actions, which no slow device lengthens; 0 for R."""
    counts = unit_counts(problem.model, candidate.stages)
    if candidate.mesh.tp == 1:
        return np.zeros(1, dtype=np.int64)
    of_units = [
        collective_seconds(table.cost, table.batch, np.array(table.slices, dtype=float), prefixes(table.slices) * 1.0)
        for table in unit_tables(problem, candidate)
    ]
    waits = compute_table(*whole_nanoseconds(counts @ np.concatenate(of_units, axis=2)))
    waits[RECOMPUTE] = 0
    return waits


def recomputation_ns(problem: Problem, candidate: Candidate) -> tuple[Integers, ...]:
    """`Costs.remade_ns` of every stage."""
    cost, mesh = problem.cost_of(candidate.mesh.tp), candidate.mesh
    shapes = [(candidate.slices, mesh.microbatch)]
    if mesh.remainder:
        shapes.append((candidate.remainder_slices, mesh.remainder))

    @functools.cache
    def until_ns(stage: tuple[int, int], remakes: Remakes) -> Integers:
        remade = remade_of(problem.model, stage, remakes)
        return np.concatenate([remake_until_ns(cost, problem.model, stage, *shape, remade) for shape in shapes], axis=1)

    stages = [first_like(problem.model, stage) for stage in candidate.stages]
    return tuple(until_ns(*pair) for pair in zip(stages, candidate.recompute, strict=True))


def _exchanged(compute: Integers, transfers: Integers) -> tuple[Integers, Integers]:
    """Both tables if ranks wait for exchanges: a message is a part of the action that sends it, and the message that
    is received meanwhile takes no time of its own.
    """
    compute[FORWARD] += transfers[TO_NEXT]
    compute[[INPUT_GRADIENT, BACKWARD]] += transfers[TO_PREVIOUS]
    return compute, np.zeros_like(transfers)


def _slowdown_table(passes: StageCosts) -> Integers:
    table = np.full((len(KINDS), *passes.alone_ns.shape[1:]), MILLION, dtype=np.int64)
    table[FORWARD] = table[RECOMPUTE] = passes.slowdown_ppm[0]
    table[INPUT_GRADIENT], table[WEIGHT_GRADIENT] = passes.slowdown_ppm[1], passes.slowdown_ppm[2]
    alone, concurrent = passes.alone_ns[1:].sum(axis=0), passes.concurrent_ns[1:].sum(axis=0)
    table[BACKWARD] = np.maximum(MILLION * concurrent // np.maximum(alone, 1), MILLION)
    return table


def transfer_table(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
) -> Integers:
    """[direction, stage, slice]: latency + bytes / bandwidth of every message, over the slowest replica's links."""
    mesh = candidate.mesh
    down, up = boundary_bytes(problem, candidate)
    of_stages = np.reshape(devices, (mesh.dp, mesh.pp))[:, list(stage_ranks)]
    earlier, later = of_stages[:, :-1], of_stages[:, 1:]
    table = np.zeros((2, len(stage_ranks), down.shape[1]), dtype=np.int64)
    table[TO_NEXT, :-1] = _slowest(problem, mesh, earlier, later, down)
    table[TO_PREVIOUS, 1:] = _slowest(problem, mesh, later, earlier, up)
    return table


def boundary_bytes(problem: Problem, candidate: Candidate) -> tuple[Floats, Floats]:
    """[stages - 1, slices], to the next stage and back: a message of one shard.

    Between two parts of the head go normed, the addend of its gradient and statistics of every token, and back one
    hidden state and statistics.
    """
    mesh, model = candidate.mesh, problem.model
    tokens = [mesh.microbatch * length for length in candidate.slices]
    tokens += [mesh.remainder * length for length in candidate.remainder_slices]
    counts = np.array(tokens, dtype=np.float64)
    hidden = problem.message_bytes(mesh.tp, counts)
    statistics = NUM_STATISTICS * problem.precision.accumulate_bytes * counts
    firsts = np.array([first for first, _ in candidate.stages[1:]], dtype=np.int64)[:, None]
    is_inside = firsts > model.num_units - model.head_parts
    down = np.where(is_inside, 2 * hidden + statistics, hidden)
    up = np.where(is_inside, hidden + statistics, hidden)
    return down, up


def _slowest(problem: Problem, mesh: Mesh, source: Integers, target: Integers, sizes: Floats) -> Integers:
    """[stages, slices] from devices [replicas, stages] and ``sizes`` [stages, slices]: replicas go in step, so the
    slowest message counts.
    """
    latency, per_byte = problem.cost_of(mesh.tp).transfer(source, target)
    per_byte = per_byte * messages_at_once(problem, mesh, source, target)
    seconds = (latency[..., None] + per_byte[..., None] * sizes).max(axis=0)
    return whole_nanoseconds(seconds)


def messages_at_once(problem: Problem, mesh: Mesh, source: npt.ArrayLike, target: npt.ArrayLike) -> Integers:
    """Number of messages on the network card of a rank's first device when all its shards send, elementwise; 1 inside
    a host, where every device has a card of its own.

    Without sequence parallelism other stacks than penstock's are taken to send one hidden state by one card: a part
    from each shard, joined by those that receive them (Narayanan et al., arXiv 2104.04473, section 4.1).
    """
    if mesh.tp == 1 or (problem.software != PENSTOCK and not problem.sequence_parallel):
        return np.ones((), dtype=np.int64)
    cards = problem.card_of(np.arange(mesh.tp))
    return np.where(problem.host_of(source) != problem.host_of(target), np.count_nonzero(cards == cards[0]), 1)


def card_table(problem: Problem, mesh: Mesh, stage_ranks: tuple[int, ...], devices: tuple[int, ...]) -> Integers:
    """[sender's or receiver's, direction, stage]: the part of its cards that a message takes by itself, in millionths.

    A card's speed is not described. It is taken as that of its fastest link, out or in, to any other device of the
    ranks. A host's card reaches the devices of other hosts, a device's own card those of its host.
    """
    first = np.array(devices[: mesh.pp])
    _, per_byte = problem.cost_of(mesh.tp).transfer(first[:, None], first)
    hosts_of = problem.host_of(first)
    same_host = hosts_of[:, None] == hosts_of
    owners = np.array(stage_ranks)
    table = np.full((2, 2, len(owners)), MILLION, dtype=np.int64)
    for side, fastest in enumerate((_fastest(per_byte, same_host), _fastest(per_byte.T, same_host).T)):
        part = np.ones_like(per_byte)
        np.divide(fastest, per_byte, out=part, where=per_byte > fastest)
        needed = np.maximum(np.rint(MILLION * part).astype(np.int64), 1)
        table[side, TO_NEXT, :-1] = needed[owners[:-1], owners[1:]]
        table[side, TO_PREVIOUS, 1:] = needed[owners[1:], owners[:-1]]
    return table


def _fastest(per_byte: Floats, same_host: Flags) -> Floats:
    """[from, to]: seconds per byte of the fastest link of the card that the link between both devices uses.

    Infinite on the diagonal, where there is no link.
    """
    itself = np.eye(len(per_byte), dtype=bool)
    inside = np.where(same_host & ~itself, per_byte, np.inf).min(axis=1, keepdims=True)
    outside = np.where(same_host, np.inf, per_byte).min(axis=1, keepdims=True)
    of_host = np.where(same_host, outside.T, np.inf).min(axis=1, keepdims=True)
    return np.where(itself, np.inf, np.where(same_host, inside, of_host))


def _hosts(problem: Problem, mesh: Mesh, devices: tuple[int, ...]) -> Hosts:
    """The hosts and network cards of the first replica, and how many replicas share these cards."""
    nodes, cards = problem.host_of(devices).tolist(), problem.card_of(devices).tolist()
    sharing = sum(cards[i * mesh.pp : (i + 1) * mesh.pp] == cards[: mesh.pp] for i in range(mesh.dp))
    return hosts(_numbered(nodes[: mesh.pp]), sharing, _numbered(cards[: mesh.pp]))


def _numbered(names: Sequence[int]) -> list[int]:
    """Each name's place among the distinct ones, in the order in which they appear."""
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return [places[name] for name in names]


def _reductions(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
) -> dict[Group, tuple[int, ...]]:
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    gradients = stage_memory(problem, candidate).gradient_bytes.tolist()
    is_scattered = candidate.optimizer_shards > 1
    seconds = {
        Group.DP: [
            cost.gradient_sum_seconds(num_bytes, devices[rank :: mesh.pp], scattered=is_scattered)
            for rank, num_bytes in zip(stage_ranks, gradients, strict=True)
        ],
        Group.TIE: [tie_seconds(problem, candidate.stages, stage_ranks, mesh, devices)] * mesh.pp,
        Group.NORM: [cost.all_reduce_seconds(NORM_BYTES, devices)] * mesh.pp,
    }
    if mesh.tp > 1:
        seconds[Group.TP] = shards_seconds(problem, candidate.stages, mesh).tolist()
    return {group: tuple(whole_nanoseconds(row).tolist()) for group, row in seconds.items()}


def _gathers(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[int, ...]:
    """`Costs.gather_ns`."""
    if candidate.optimizer_shards == 1:
        return ()
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    weights = stage_memory(problem, candidate).weight_bytes.tolist()
    seconds = [
        cost.all_gather_seconds(num_bytes, devices[rank :: mesh.pp])
        for rank, num_bytes in zip(stage_ranks, weights, strict=True)
    ]
    return tuple(whole_nanoseconds(seconds).tolist())


def tie_seconds(
    problem: Problem, stages: Stages, stage_ranks: Sequence[int], mesh: Mesh, devices: Sequence[int]
) -> float:
    """Seconds of the sums of a tied matrix's gradients over its two copies, on the ``devices`` of the first stage and
    of those with parts of the head, one after the other; nothing where one rank holds both.
    """
    if not problem.model.tied:
        return 0.0
    model, cost = problem.model, problem.cost_of(mesh.tp)
    parts = unit_counts(model, stages)[:, UNIT_KINDS.index(UnitKind.HEAD)]
    of_part = head_rows(model, problem.sharding(mesh.tp)) * model.hidden
    of_part *= problem.software.gradient_type.num_bytes(problem.precision)
    counts = np.bincount(stage_ranks, weights=parts).astype(np.int64)
    counts[stage_ranks[0]] = 0
    others = np.flatnonzero(counts)
    first, peers = int(devices[stage_ranks[0]]), np.asarray(devices)[others]
    is_near = problem.host_of(peers) == problem.host_of(first)
    columns = (column.tolist() for column in (counts[others], is_near, *cost.transfer(first, peers)))
    alike: dict[tuple[int, bool, float, float], list[int]] = {}
    for *links, peer in zip(*columns, peers.tolist(), strict=True):
        alike.setdefault((links[0], links[1], links[2], links[3]), []).append(peer)
    seconds: float = sum(
        len(own) * cost.all_reduce_seconds(links[0] * of_part, (first, own[0])) for links, own in sorted(alike.items())
    )
    return seconds


def shards_seconds(problem: Problem, stages: Stages, mesh: Mesh) -> Floats:
    """[stages]: seconds of the sums over shards at a step's end, of gradients of which each has only an addend.

    Gradients of parameters on all shards are summed over all, those of key/value heads over the shards that hold them.
    """
    memory, cost = memory_of(problem, stages, mesh.microbatch, mesh.tp), problem.cost_of(mesh.tp)
    seconds: Floats = np.zeros(len(stages))
    for group_size, sizes in (
        (mesh.tp, memory.shared_gradient_bytes),
        (problem.model.kv_copies(mesh.tp), memory.copied_gradient_bytes),
    ):
        distinct, places = np.unique(sizes, return_inverse=True)
        of_sizes = [cost.all_reduce_seconds(size, range(group_size)) if size else 0.0 for size in distinct.tolist()]
        seconds += np.array(of_sizes)[places]
    return seconds


def optimizer_ns(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], devices: Sequence[int]
) -> tuple[int, ...]:
    """Every rank's optimizer step."""
    mesh, cost = candidate.mesh, problem.cost_of(candidate.mesh.tp)
    elements = _per_rank(stage_memory(problem, candidate).stepped_elements, stage_ranks, mesh.pp)
    seconds = np.array([cost.optimizer_seconds(count) for count in elements.tolist()])
    return tuple(whole_nanoseconds(seconds * slowness_of_ranks(problem, mesh, devices)).tolist())


def _per_rank(values: Integers, stage_ranks: Sequence[int], num_ranks: int) -> Integers:
    """[ranks, ...]: the sum over each rank's stages."""
    sums = np.zeros((num_ranks, *values.shape[1:]), dtype=np.int64)
    np.add.at(sums, list(stage_ranks), values)
    return sums


def _largest_per_rank(values: Integers, stage_ranks: Sequence[int], num_ranks: int) -> Integers:
    """[ranks]: the largest over each rank's stages."""
    largest = np.zeros(num_ranks, dtype=np.int64)
    np.maximum.at(largest, list(stage_ranks), values)
    return largest


def static_bytes(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], order: Order | None = None
) -> tuple[int, ...]:
    """Bytes that each rank always holds: the process, parameters and their state, and the largest transient.

    If the ``order`` has pairs, also the largest transient of a stage whose actions are the second of a pair.
    """
    needed = _stage_transients(problem, candidate).max(axis=(1, 2))
    transient = _largest_per_rank(needed, stage_ranks, candidate.mesh.pp)
    if order is not None and order.joined is not None:
        second = np.zeros_like(transient)
        stages = order.stages[order.firsts + 1]
        np.maximum.at(second, np.array(stage_ranks)[stages], needed[stages])
        transient += second
    return tuple((resident_bytes(problem, candidate, stage_ranks, order) + transient).tolist())


def resident_bytes(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], order: Order | None = None
) -> Integers:
    """[ranks]: `static_bytes` without the transients.

    They include buffers: for gradients of a stage that shards sum, for gradients that replicas on the host exchange,
    for widened moments, for results that backwards without an R recompute inside (none without an ``order``), and for
    the copy of the prefix if slices have their own keys and values.
    """
    memory, mesh = stage_memory(problem, candidate), candidate.mesh
    held = _per_rank(memory.state_bytes, stage_ranks, mesh.pp)
    if mesh.dp > 1:
        shards = _largest_per_rank(memory.largest_shards, stage_ranks, mesh.pp)
        held += memory.summing_bytes(shards, mesh.dp, problem.gradient_reduction_type, is_cuda=problem.late_receives)
    if problem.moment_type is not MomentType.FP32:
        largest = _largest_per_rank(memory.stepped_elements, stage_ranks, mesh.pp)
        held += widened_bytes(problem.precision, largest, is_cuda=problem.num_places is not None)
    packed = _largest_per_rank(memory.packed_gradient_bytes, stage_ranks, mesh.pp)
    if any(candidate.recompute):
        held += _largest_per_rank(scratch_table(problem, candidate, order), stage_ranks, mesh.pp)
    if problem.prefix_by_slice(candidate.slices):
        held += _largest_per_rank(prefix_table(problem, candidate), stage_ranks, mesh.pp)
    return held + packed + problem.cost_of(mesh.tp).constant_bytes


def action_transients(problem: Problem, candidate: Candidate) -> Transients:
    """Bytes that each compute action takes beyond its slots. B runs I and then W, and R needs as much as F."""
    forward, gradient, weight = _stage_transients(problem, candidate).transpose(1, 0, 2)
    tables = {
        Kind.F: forward,
        Kind.R: forward,
        Kind.I: gradient,
        Kind.W: weight,
        Kind.B: np.maximum(gradient, weight),
    }
    return {(kind, *place): int(size) for kind, table in tables.items() for place, size in np.ndenumerate(table)}


def unit_tables(problem: Problem, candidate: Candidate) -> list[UnitTable]:
    """The costs of units for the slices of a micro-batch, and then for those of a smaller last one."""
    mesh = candidate.mesh
    tables = [problem.units(mesh.tp, mesh.microbatch, candidate.slices)]
    if mesh.remainder:
        tables.append(problem.units(mesh.tp, mesh.remainder, candidate.remainder_slices))
    return tables


def _stage_transients(problem: Problem, candidate: Candidate) -> Integers:
    """[stages, F I W, columns]: most bytes that one unit of the stage takes beyond its slots; units run in sequence."""
    of_units = np.concatenate([table.transient_bytes for table in unit_tables(problem, candidate)], axis=2)
    owned = unit_counts(problem.model, candidate.stages) > 0
    largest: Integers = np.where(owned[:, :, None, None], of_units, 0).max(axis=1)
    return largest


def stash_tables(problem: Problem, candidate: Candidate) -> tuple[StageTable, StageTable, StageTable]:
    """Changes in a rank's bytes by F, I and W. F adds x, a, l and the keys and values of its tokens. I frees x, a, keys
    and values, and adds w. W frees l and w. Buffers that are recomputed for I and W count from I on.
    """
    memory = stage_memory(problem, candidate)
    until_input = memory.total_slot_bytes(_UNTIL_INPUT_GRADIENT, candidate.slices)
    linear = memory.slot_bytes(SlotKind.LINEAR_INPUTS, candidate.slices)
    remade = memory.slot_bytes(SlotKind.REMADE_LINEAR_INPUTS, candidate.slices)
    gradients = memory.slot_bytes(SlotKind.OUTPUT_GRADIENTS, candidate.slices)
    return (
        rows(until_input + linear),
        rows(gradients + remade - until_input),
        rows(-linear - remade - gradients),
    )


_UNTIL_INPUT_GRADIENT = (SlotKind.INPUT, SlotKind.ACTIVATIONS, SlotKind.KEYS_VALUES)


def stash_caps(
    problem: Problem, candidate: Candidate, stage_ranks: tuple[int, ...], receive_ahead: int
) -> tuple[int, ...]:
    """Bytes of `stash_tables` that each rank may hold: the limit minus the bytes that it always holds, those of
    messages, and the recomputed buffers of an I.
    """
    memory = stage_memory(problem, candidate)
    always = np.array(static_bytes(problem, candidate, stage_ranks))
    gradients = memory.slot_bytes(SlotKind.KEYS_VALUES_GRADIENTS, [problem.sequence_length])[:, 0]
    messages = (2 * receive_ahead + 2) * memory.slot_bytes(SlotKind.INPUT, candidate.slices).max(axis=1)
    remade = memory.slot_bytes(SlotKind.REMADE_LINEAR_INPUTS, candidate.slices).max(axis=1)
    if candidate.recompute_inside and any(candidate.recompute):
        remade += split_scratch_table(problem, candidate) - scratch_table(problem, candidate)
    else:
        remade += memory.slot_bytes(SlotKind.REMADE_ACTIVATIONS, candidate.slices).max(axis=1)
    always += _largest_per_rank(remade, stage_ranks, candidate.mesh.pp)
    free_bytes = problem.memory_limit_bytes - always - _per_rank(gradients + messages, stage_ranks, candidate.mesh.pp)
    return tuple(np.maximum(free_bytes, 0).tolist())


def rows(table: npt.NDArray[np.int64]) -> StageTable:
    """A [stage, slice] array as tuples of plain integers."""
    return tuple(map(tuple, table.tolist()))
