"""Durations as integer tables, so that equal inputs give equal times on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.core.schedule import Group, Part
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, RECOMPUTE, WEIGHT_GRADIENT
from penstock.planner.simulate.pairs import Collectives

Nanoseconds = npt.NDArray[np.int64]

MILLION = 1_000_000

MOST_NS = 10**12
"""The longest action or message. The kernel counts work in millionths of a nanosecond, so longer ones would exceed 64
bits.
"""

TO_NEXT, TO_PREVIOUS = 0, 1
"""The directions of messages: a stage's output, and the gradient of its input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Hosts of a pipeline's ranks, and the network cards that their messages share.

    ``host_of`` numbers every rank's host. A message between ranks of one host uses their ``local_cards``, between hosts
    their ``network_cards``: the sender's outwards and the receiver's inwards, -1 for none. ``replicas`` is the number
    of pipelines in lockstep whose corresponding ranks share these hosts (data parallelism within a host).
    """

    host_of: tuple[int, ...]
    local_cards: tuple[int, ...]
    network_cards: tuple[int, ...]
    replicas: int = 1


def hosts(host_of: Sequence[int], replicas: int = 1, network_cards: Sequence[int] | None = None) -> Hosts:
    """Hosts with one network card each, unless ``network_cards`` numbers every rank's. Inside a host every rank has its
    own card.
    """
    cards = tuple(host_of if network_cards is None else network_cards)
    num_cards = 1 + max(cards)
    return Hosts(
        host_of=tuple(host_of),
        local_cards=tuple(num_cards + rank for rank in range(len(host_of))),
        network_cards=cards,
        replicas=replicas,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionCosts:
    """Nanoseconds of a rank for each transport instruction, without waiting."""

    post_ns: int = 0
    wait_receive_ns: int = 0
    send_ns: int = 0
    wait_send_ns: int = 0

    @property
    def as_tuple(self) -> tuple[int, int, int, int]:
        """The fields in their order."""
        return (self.post_ns, self.wait_receive_ns, self.send_ns, self.wait_send_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A bucket of a stage's gradients and parameters (`penstock.core.buckets`): of units ``part``.

    ``done_ppm`` is the part that its units and those behind them are of a B, of a W and of an F, in millionths.
    ``reduce_ns`` has its time in a reduction, by group of peers, and ``gather_ns`` that in a gather.
    """

    part: Part
    done_ppm: tuple[int, int, int]
    reduce_ns: Mapping[Group, int]
    gather_ns: int = 0

    def done_ns(self, kind: int, whole_ns: int) -> int:
        """The part of ``whole_ns``, the time of a B, W or F, that the bucket's units and those behind them take."""
        return whole_ns * self.done_ppm[(BACKWARD, WEIGHT_GRADIENT, FORWARD).index(kind)] // MILLION


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costs:
    """Costs of all instructions of a Program.

    Tables have a column for every slice of a micro-batch, followed by ``num_remainder_slices`` columns for a smaller
    last micro-batch (`penstock.planner.order.Order.columns`).

    ``compute_ns`` [kind (`order.KINDS`), stage, slice] is the time of an action alone on its host, including its fixed
    overhead; ``slowdown_ppm``, of the same shape, is the factor, in millionths, while all ranks of the host compute (in
    between, linear in their number). ``transfer_ns`` [direction, stage, slice] is latency plus bytes over bandwidth of
    the message that the stage sends on otherwise idle cards, and ``card_ppm`` [sender's or receiver's, direction,
    stage] the part of each card that it then uses, in millionths. ``reduce_ns`` has, per group, every rank's time in
    one reduction; for groups of peers (dp, tp) every stage's, as a whole. ``buckets`` has those of every stage, in the
    order in which backward completes them, none for a stage that is only reduced as a whole.

    ``optimizer_ns`` is every rank's time in STEP, and ``gather_ns`` every stage's time in which replicas gather their
    stepped shards, as a whole; empty if each replica steps everything. ``remade_ns`` has for every stage [units + 1,
    slices] the time in which R recomputes the first n units (n = 0, 1, ...), without its fixed overhead; it may be
    empty if no R is for a part. ``inside_ns`` [stages, slices] is the time that a B or I of a slice without an R takes
    for recomputing it inside; None if no stage recomputes.

    ``is_blocking``: ranks do not compute while they send or receive. Without ``has_barrier`` ranks begin the next step
    as soon as they are done with this one (`penstock.planner.simulate.arrays`). ``collectives`` gives the collectives
    over shards that a pair of actions hides; None if a rank has one shard.
    """

    compute_ns: Nanoseconds
    slowdown_ppm: Nanoseconds
    transfer_ns: Nanoseconds
    card_ppm: Nanoseconds
    hosts: Hosts
    instructions: InstructionCosts = InstructionCosts()
    reduce_ns: Mapping[Group, tuple[int, ...]] = field(default_factory=dict)
    buckets: tuple[tuple[Bucket, ...], ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    gather_ns: tuple[int, ...] = ()
    remade_ns: tuple[Nanoseconds, ...] = ()
    inside_ns: Nanoseconds | None = None
    is_blocking: bool = False
    has_barrier: bool = True
    num_remainder_slices: int = 0
    collectives: Collectives | None = None

    def __post_init__(self) -> None:
        shape = self.compute_ns.shape
        if shape[0] != len(KINDS) or self.slowdown_ppm.shape != shape or self.transfer_ns.shape != (2, *shape[1:]):
            raise ValueError("cost tables disagree about their shape")
        if self.card_ppm.shape != (2, *self.transfer_ns.shape[:2]):
            raise ValueError("the parts of cards disagree with the messages about their shape")
        if not 1 <= self.card_ppm.min() <= self.card_ppm.max() <= MILLION:
            raise ValueError("a message takes none of its card, or more than all")
        if min(self.compute_ns.min(), self.transfer_ns.min()) < 0 or self.slowdown_ppm.min() < 1:
            raise UserError(what="holds a negative time or factor", where="costs", remedy="measure again")
        if max(self.compute_ns.max(), self.transfer_ns.max()) > MOST_NS:
            raise UserError(what="holds a time of over 1,000 seconds", where="costs", remedy="plan with more devices")

    @property
    def num_slices(self) -> int:
        """Number of slices of a micro-batch, except a smaller last one."""
        return int(self.compute_ns.shape[2]) - self.num_remainder_slices

    def counts(self, num_microbatches: int) -> Nanoseconds:
        """[columns]: the number of slices with each column in a step of ``num_microbatches`` micro-batches."""
        counts = np.full(self.compute_ns.shape[2], num_microbatches, dtype=np.int64)
        if self.num_remainder_slices:
            counts -= 1
            counts[self.num_slices :] = 1
        return counts

    def most_ns(self, num_microbatches: int) -> float:
        """Upper bound of a step, with everything one after another; a float, since it may exceed 64 bits."""
        counts = self.counts(num_microbatches).astype(np.float64)
        work_ns = self.compute_ns.sum(axis=0) + (0 if self.inside_ns is None else self.inside_ns)
        actions = (work_ns @ counts) * self.slowdown_ppm.max() / MILLION
        summed = sum(sum(durations) for group, durations in self.reduce_ns.items() if group.is_of_peers)
        summed += sum(self.gather_ns)
        summed += sum(bucket.gather_ns + sum(bucket.reduce_ns.values()) for own in self.buckets for bucket in own)
        ends = summed + sum(max(durations, default=0) for durations in (*self.reduce_ns.values(), self.optimizer_ns))
        return float(actions.sum() + (self.transfer_ns @ counts).sum()) + ends

    def part_ns(self, stage: int, slice_: int, first: int, stop: int) -> int:
        """Time of an R of units [first, stop) of a stage; raises `UserError` for more units than keep anything."""
        until_ns = self.remade_ns[stage][:, slice_]
        if stop >= len(until_ns):
            raise UserError(
                what=f"recomputes {stop} units of stage {stage}, of which {len(until_ns) - 1} keep anything",
                where="schedule",
                remedy="pin the stages that the schedule was written for",
            )
        return int(self.compute_ns[RECOMPUTE, stage, slice_] - until_ns[-1] + until_ns[stop] - until_ns[first])

    def trained_ns(self, kind: int, stage: int, whole_ns: int, first: int) -> int:
        """Time of the part of a first F, or of a last B or W, of ``whole_ns`` whose first unit is ``first``."""
        before_ns = 0
        for bucket in self.buckets[stage]:
            done_ns = bucket.done_ns(kind, whole_ns)
            if bucket.part.first == first:
                return done_ns - before_ns
            before_ns = done_ns
        raise ValueError(f"no bucket of stage {stage} begins with unit {first}")

    def hidden_ns(self, first: Nanoseconds, second: Nanoseconds) -> Nanoseconds:
        """[pairs]: the time that pairs of actions save compared with one after the other; ``first`` and ``second`` are
        [pairs, 3] of kind, stage and column.
        """
        if self.collectives is None:
            return np.zeros(len(first), dtype=np.int64)
        return self.collectives.hidden_ns(first, second)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.compute_ns[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.hosts.host_of)


def uncontended(compute_ns: Nanoseconds, transfer_ns: Nanoseconds, num_ranks: int | None = None) -> Costs:
    """Costs with every rank on its own host, one rank per stage by default, and messages that only delay their own
    channel.
    """
    num_ranks = num_ranks or compute_ns.shape[1]
    no_cards = (-1,) * num_ranks
    return Costs(
        compute_ns=compute_ns,
        slowdown_ppm=np.full_like(compute_ns, MILLION),
        transfer_ns=transfer_ns,
        card_ppm=np.full((2, *transfer_ns.shape[:2]), MILLION),
        hosts=Hosts(host_of=tuple(range(num_ranks)), local_cards=no_cards, network_cards=no_cards),
    )


def compute_table(forward: npt.ArrayLike, input_gradient: npt.ArrayLike, weight_gradient: npt.ArrayLike) -> Nanoseconds:
    """[kind, stage, slice] from the tables [stage, slice] of F, I and W: B is I and W, and R costs as much as F."""
    f, i, w = (np.asarray(table, dtype=np.int64) for table in (forward, input_gradient, weight_gradient))
    table = np.zeros((len(KINDS), *f.shape), dtype=np.int64)
    table[FORWARD], table[INPUT_GRADIENT], table[WEIGHT_GRADIENT] = f, i, w
    table[BACKWARD], table[RECOMPUTE] = i + w, f
    return table
