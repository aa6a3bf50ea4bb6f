"""From an order and its costs to the kernel's arrays, and back to times per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import UserError
from penstock.core.program import Reduction
from penstock.planner.order import Order, action_of
from penstock.planner.simulate import kernel
from penstock.planner.simulate.channels import DIRECTIONS, Channels, channels_of
from penstock.planner.simulate.costs import MILLION, Costs, Nanoseconds
from penstock.planner.simulate.kernel import Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """Nanoseconds of one simulated step.

    Per rank, compute + bubble (waiting for other ranks) + communication (waiting for transfers that are under way, and
    transport instructions) + reduction + optimizer = ``makespan_ns``. ``finish_ns`` is when the rank begins its
    reductions. ``trace`` [actions, columns of `kernel`] holds every action's times (-1: did not happen) where it was asked for.
    """

    makespan_ns: int
    finish_ns: Nanoseconds
    compute_ns: Nanoseconds
    bubble_ns: Nanoseconds
    communication_ns: Nanoseconds
    reduction_ns: Nanoseconds
    optimizer_ns: Nanoseconds
    trace: Nanoseconds

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time that was not compute, from 0 to 1."""
        total = len(self.compute_ns) * self.makespan_ns
        return 1.0 - int(self.compute_ns.sum()) / total if total else 0.0


def simulate_arrays(
    order: Order,
    costs: Costs,
    *,
    receive_ahead: int = 2,
    reductions: Sequence[Reduction] = (),
    traced: bool = False,
) -> StepTimes:
    """The times of one step; raises `UserError` if ranks wait for each other for ever."""
    if costs.num_stages != order.num_stages or costs.num_ranks != order.num_ranks:
        raise ValueError(f"costs of {costs.num_stages} stages on {costs.num_ranks} ranks for {order.num_stages} stages")
    channels = channels_of(order)
    actions = _actions(order, channels, costs, traced)
    cells = _cells(order, channels, costs, receive_ahead)
    keys, settings = _keys_and_settings(order.num_ranks, len(channels.counts), costs, receive_ahead)
    kernel.run(actions, cells, keys, settings)
    ranks = cells[: order.num_ranks]
    _require_finished(order, ranks)
    return _close(ranks, actions[:, kernel.REACHED :], costs, reductions)


def _actions(order: Order, channels: Channels, costs: Costs, traced: bool) -> Ints:
    directions = DIRECTIONS[order.kinds]
    table = np.full((order.num_actions, kernel.ARRIVED + 1 if traced else kernel.REACHED), -1, dtype=np.int64)
    table[:, kernel.WORK] = costs.compute_ns[order.kinds, order.stages, order.slices]
    table[:, kernel.TOGETHER] = costs.together_ppm[order.kinds, order.stages, order.slices]
    table[:, kernel.NEEDS_NUMBER] = channels.needs
    table[:, kernel.SENDS_NS] = costs.transfer_ns[directions, order.stages, order.slices]
    for column, ends in ((kernel.NEEDS_CHANNEL, channels.receives), (kernel.SENDS_CHANNEL, channels.sends)):
        numbers = np.where(directions < 0, -1, ends[directions, order.stages])
        table[:, column] = np.where(numbers < 0, -1, order.num_ranks + numbers)
    return table


def _cells(order: Order, channels: Channels, costs: Costs, receive_ahead: int) -> Ints:
    """Rows of ranks, channels and cards; the first card is the one that stands for none."""
    num_cards = 2 + max(*costs.hosts.local_cards, *costs.hosts.network_cards)
    num_channels = len(channels.counts)
    width = max(kernel.FINISH + 1, kernel.RING + kernel.RING_WIDTH * receive_ahead)
    cells = np.zeros((order.num_ranks + num_channels + num_cards, width), dtype=np.int64)
    _fill_ranks(cells[: order.num_ranks], order, costs)
    first_card = order.num_ranks + num_channels + 1
    _fill_channels(cells[order.num_ranks : order.num_ranks + num_channels], channels, costs, first_card)
    return cells


def _fill_ranks(rows: Ints, order: Order, costs: Costs) -> None:
    host_of = np.asarray(costs.hosts.host_of)
    rows[:, kernel.STOP_AT] = order.offsets[1:]
    rows[:, kernel.POSITION] = order.offsets[:-1]
    rows[:, [kernel.CHANNEL, kernel.FINISH]] = -1
    for host in set(costs.hosts.host_of):
        ring = np.flatnonzero(host_of == host)
        rows[ring, kernel.NEIGHBOUR] = np.roll(ring, -1)
        rows[ring, kernel.RESIDENTS] = len(ring)


def _fill_channels(rows: Ints, channels: Channels, costs: Costs, first_card: int) -> None:
    host_of, local, network = map(np.asarray, (costs.hosts.host_of, costs.hosts.local_cards, costs.hosts.network_cards))
    inside = host_of[channels.sources] == host_of[channels.targets]
    rows[:, kernel.COUNT] = channels.counts
    for end, card, ranks in (
        (kernel.SOURCE, kernel.OUT_CARD, channels.sources),
        (kernel.TARGET, kernel.IN_CARD, channels.targets),
    ):
        rows[:, end] = ranks
        rows[:, card] = first_card + np.where(inside, local[ranks], network[ranks])


def _keys_and_settings(num_ranks: int, num_channels: int, costs: Costs, receive_ahead: int) -> tuple[Ints, Ints]:
    """The tree of next times (ranks now, channels never), and the kernel's settings."""
    bits = (num_ranks + num_channels - 1).bit_length()
    keys = np.full(2 << bits, 1 << 62, dtype=np.int64)
    keys[1 << bits : (1 << bits) + num_ranks] = np.arange(num_ranks)
    for node in range((1 << bits) - 1, 0, -1):
        keys[node] = min(keys[2 * node], keys[2 * node + 1])
    hosts = costs.hosts
    shared = hosts.replicas > 1 or len(set(hosts.host_of)) < len(hosts.host_of)
    contended = shared and bool((costs.together_ppm != MILLION).any())
    constants = [*costs.instructions.as_tuple, receive_ahead, hosts.replicas, contended, num_ranks, num_channels, bits]
    return keys, np.array(constants + [0] * (2 + num_channels), dtype=np.int64)


def _require_finished(order: Order, ranks: Ints) -> None:
    stuck = np.flatnonzero(ranks[:, kernel.FINISH] < 0)
    if len(stuck):
        rank = int(stuck[0])
        at = min(int(ranks[rank, kernel.POSITION]), int(order.offsets[rank + 1]) - 1)
        action = action_of(*(int(a[at]) for a in (order.kinds, order.stages, order.microbatches, order.slices)))
        raise UserError(
            what=f"{len(stuck)} ranks wait for each other for ever, rank {rank} at {action}",
            where="schedule",
            remedy="order the actions so that what each needs can come first",
        )


def _close(rank_table: Ints, trace: Ints, costs: Costs, reductions: Sequence[Reduction]) -> StepTimes:
    """The end of the step: every reduction is a barrier of its ranks, then each runs its optimizer."""
    finish, busy, bubble = (rank_table[:, column].copy() for column in (kernel.FINISH, kernel.BUSY, kernel.BUBBLE))
    communication = finish - busy - bubble
    reduction = np.zeros_like(finish)
    clock = finish.copy()
    for barrier in reductions:
        ranks = list(barrier.ranks)
        begin = clock[ranks].max()
        duration = (
            max(costs.reduce_ns[barrier.group][rank] for rank in ranks) if barrier.group in costs.reduce_ns else 0
        )
        bubble[ranks] += begin - clock[ranks]
        reduction[ranks] += duration
        clock[ranks] = begin + duration
    optimizer = np.asarray(costs.optimizer_ns or [0] * len(clock), dtype=np.int64)
    clock += optimizer
    bubble += clock.max() - clock
    return StepTimes(
        makespan_ns=int(clock.max()),
        finish_ns=finish,
        compute_ns=busy,
        bubble_ns=bubble,
        communication_ns=communication,
        reduction_ns=reduction,
        optimizer_ns=optimizer,
        trace=trace,
    )
