"""Costs for simulated steps: uniform ones for closed forms, random ones for everything else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from penstock.core.program import Program, SlotSizes
from penstock.core.schedule import Group, Part
from penstock.planner.order import KINDS, RECOMPUTE
from penstock.planner.schedules.inputs import ScheduleInputs, StageTable
from penstock.planner.schedules.registry import BUILT_IN
from penstock.planner.simulate.costs import (
    MILLION,
    Bucket,
    Costs,
    Hosts,
    InstructionCosts,
    compute_table,
    hosts,
    uncontended,
)
from penstock.planner.simulate.memory import SlotBytes
from penstock.planner.simulate.pairs import Collectives
from tests.support.strategies import MOST_UNITS

Table = npt.NDArray[np.int64]


def equal_costs(
    num_ranks: int, num_slices: int, forward: int, input_gradient: int, weight_gradient: int, transfer: int = 0
) -> Costs:
    """Every stage and slice costs the same."""
    shape = (num_ranks, num_slices)
    compute = compute_table(*(np.full(shape, cost) for cost in (forward, input_gradient, weight_gradient)))
    return uncontended(compute, np.full((2, *shape), transfer))


def slice_costs(num_ranks: int, forward: list[int], input_gradient: list[int], weight_gradient: list[int]) -> Costs:
    """Every stage costs the same, slices differ, messages are free."""
    tables = (np.tile(costs, (num_ranks, 1)) for costs in (forward, input_gradient, weight_gradient))
    return uncontended(compute_table(*tables), np.zeros((2, num_ranks, len(forward)), dtype=np.int64))


def shape(num_ranks: int, num_microbatches: int, num_slices: int, name: str = "1f1b") -> ScheduleInputs:
    """Inputs without costs, for the built-in schedule ``name``."""
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        stages_per_rank=BUILT_IN[name].stages_per_rank,
    )


def rows(table: Table) -> StageTable:
    """A table as the tuples of `ScheduleInputs`."""
    return tuple(tuple(row) for row in table.tolist())


def slot_arrays(sizes: SlotSizes, num_stages: int) -> SlotBytes:
    """The bytes of slots one by one, as `high_water_bytes` asks for them."""
    return lambda kind, lengths: np.array([[sizes(kind, stage, n) for n in lengths] for stage in range(num_stages)])


def costs_of(rng: random.Random, program: Program, buckets: Sequence[tuple[Part, ...]] = ()) -> Costs:
    """Any costs of the Program's actions and messages, and of reductions in ``buckets``."""
    counts = [len(each) for each in (program.slice_capacities, program.remainder_capacities)]
    costs = random_costs(rng, len(program.ranks), program.num_stages, sum(counts))
    gather_ns = tuple(rng.randrange(30) for _ in range(program.num_stages)) if program.zero else ()
    in_buckets = tuple(
        tuple(_random_buckets(rng, parts, gathers=bool(program.zero))) if parts else () for parts in buckets
    )
    again = costs.compute_ns[RECOMPUTE]
    inside = again + np.random.default_rng(rng.getrandbits(32)).integers(0, 20, again.shape)
    return replace(
        costs,
        num_remainder_slices=counts[1],
        gather_ns=gather_ns,
        buckets=in_buckets,
        inside_ns=inside if rng.random() < 0.7 else None,
    )


def _random_buckets(rng: random.Random, parts: Sequence[Part], *, gathers: bool) -> Iterator[Bucket]:
    """Any shares of B, W and F, and any times."""
    rows = [[*sorted(rng.randrange(MILLION + 1) for _ in parts[1:]), MILLION] for _ in range(3)]
    for part, *done_ppm in zip(parts, *rows, strict=True):
        reduce_ns = {group: rng.randrange(30) for group in (Group.TP, Group.DP)}
        yield Bucket(
            part=part,
            done_ppm=(done_ppm[0], done_ppm[1], done_ppm[2]),
            reduce_ns=reduce_ns,
            gather_ns=rng.randrange(30) if gathers else 0,
        )


def random_costs(rng: random.Random, num_ranks: int, num_stages: int, num_slices: int) -> Costs:
    """Any costs: zero and large, shared hosts and cards, contention, transport instructions that take time."""
    draw = np.random.default_rng(rng.getrandbits(32))
    tables = (len(KINDS), num_stages, num_slices)
    together = draw.integers(900_000, 2_000_000, tables) if rng.random() < 0.5 else np.full(tables, MILLION)
    compute = draw.integers(0, rng.choice([2, 4, 20, 1000]), tables)
    remade = draw.integers(0, 50, (num_stages, MOST_UNITS + 1, num_slices)).cumsum(axis=1)
    remade -= remade[:, :1]
    compute[RECOMPUTE] += remade[:, -1]
    return Costs(
        compute_ns=compute,
        remade_ns=tuple(remade),
        slowdown_ppm=together,
        transfer_ns=draw.integers(0, rng.choice([1, 2, 8, 400]), (2, num_stages, num_slices)),
        card_ppm=_random_parts(rng, num_stages),
        hosts=_random_hosts(rng, num_ranks),
        instructions=_random_instructions(rng),
        reduce_ns={
            group: tuple(draw.integers(0, 30, num_stages if group.is_of_peers else num_ranks).tolist())
            for group in Group
        },
        optimizer_ns=tuple(draw.integers(0, 9, num_ranks).tolist()),
        collectives=_random_collectives(rng, compute) if rng.random() < 0.7 else None,
    )


def _random_collectives(rng: random.Random, compute: Table) -> Collectives:
    """Any segments of every action, which take what it takes."""
    draw = np.random.default_rng(rng.getrandbits(32))
    segments = {}
    for place, work in np.ndenumerate(compute):
        bounds = np.sort(draw.integers(0, work + 1, 2 * int(draw.integers(1, 4)) - 1))
        segments[place] = np.diff([0, *bounds, work]).reshape(-1, 2)
    return Collectives(segments.__getitem__)


def _random_parts(rng: random.Random, num_stages: int) -> Table:
    """The parts of cards that messages take: all, or anything from next to nothing."""
    draw = np.random.default_rng(rng.getrandbits(32))
    table = (2, 2, num_stages)
    return np.full(table, MILLION) if rng.random() < 0.5 else draw.integers(1, MILLION + 1, table)


def _random_hosts(rng: random.Random, num_ranks: int) -> Hosts:
    num_hosts = rng.randint(1, num_ranks)
    host_of = tuple(rng.randrange(num_hosts) for _ in range(num_ranks))
    if rng.random() < 0.4:
        return hosts(host_of, replicas=rng.randint(1, 2))
    nothing = (-1,) * num_ranks
    own = tuple(range(num_ranks))
    local, network = rng.choice([(nothing, nothing), (nothing, own), (own, tuple(range(num_ranks, 2 * num_ranks)))])
    return Hosts(host_of=host_of, local_cards=local, network_cards=network, replicas=rng.randint(1, 2))


def _random_instructions(rng: random.Random) -> InstructionCosts:
    if rng.random() < 0.5:
        return InstructionCosts()
    post, wait_receive, send, wait_send = (rng.randrange(4) for _ in range(4))
    return InstructionCosts(post_ns=post, wait_receive_ns=wait_receive, send_ns=send, wait_send_ns=wait_send)


@st.composite
def zb_inputs(draw: st.DrawFn) -> ScheduleInputs:
    """Random pipelines for schedules that are made from costs: equal or unequal stages, slices and messages."""
    num_ranks, num_slices = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = (num_ranks, num_slices)
    if draw(st.booleans()):
        forward, gradient, weight = (np.full(table, rng.integers(1, 30)) for _ in range(3))
        forward[-1] += rng.integers(0, 20)
    else:
        forward, gradient, weight = (rng.integers(0, 30, table) for _ in range(3))
    down, up = rng.integers(0, draw(st.sampled_from([1, 5, 40])), (2, *table))
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, 10)),
        num_slices=num_slices,
        forward_ns=rows(forward),
        input_ns=rows(gradient),
        weight_ns=rows(weight),
        send_forward_ns=rows(down),
        send_backward_ns=rows(up),
        receive_ahead=draw(st.integers(1, 4)),
        late_receives=draw(st.booleans()),
    )
