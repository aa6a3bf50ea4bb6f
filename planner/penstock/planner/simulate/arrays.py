"""Conversion of an order and its costs to the kernel's tables, and of the result to times per rank.

A step without a barrier at its end. Let rank r be busy with a step from begin(r) to end(r), including reductions with
its own peers and the optimizer. The next step can have all the same times plus P if and only if every rank is done by
then: P >= end(r) - begin(r) for each r, since all messages move by P as well. So the time from step to step is the
longest span of a rank. Because of a pipeline's warm-up and cool-down, ranks begin and end at different times, so that
is shorter than from the first begin to the last end (optimizer post-validation, arXiv 2401.10241, section 4). If a rank
gathers parameters from end(r) - P on, for g until an action that begins at t, then also P >= end(r) + g - t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.bubble import Lost, bubble
from penstock.core.errors import UserError
from penstock.core.explanation import StepParts
from penstock.core.program import Reduction
from penstock.core.schedule import Group
from penstock.planner.clock import Clock, new_clock, set_time
from penstock.planner.order import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRADIENT, Flags, Integers, Order, action_of
from penstock.planner.simulate import kernel, link
from penstock.planner.simulate.channels import DIRECTIONS, Channels, channels_of
from penstock.planner.simulate.costs import MILLION, Costs, Nanoseconds
from penstock.planner.simulate.kernel import Ints
from penstock.planner.simulate.reductions import Piece, Reduced, Reductions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """Nanoseconds of one simulated step; ``makespan_ns`` is the time from step to step if no barrier ends it.

    Per rank, compute + bubble (waiting for other ranks) + communication (waiting for transfers that are under way, and
    transport instructions) + reduction (waiting for those and for gathers under way) + optimizer = ``makespan_ns``. At
    ``finish_ns`` the rank has only reductions left, at ``step_ns`` it begins its optimizer. ``trace`` [actions,
    `kernel.REACHED` ... `kernel.ARRIVED`] has the times of every action (-1: did not happen) if it was requested.
    """

    makespan_ns: int
    finish_ns: Nanoseconds
    compute_ns: Nanoseconds
    bubble_ns: Nanoseconds
    communication_ns: Nanoseconds
    reduction_ns: Nanoseconds
    optimizer_ns: Nanoseconds
    reductions: tuple[Reduced, ...]
    step_ns: Nanoseconds
    trace: Nanoseconds

    @property
    def bubble(self) -> Lost:
        """Share of the step in which ranks did not compute (`penstock.core.bubble`)."""
        return bubble(self.compute_ns.tolist(), self.makespan_ns)

    @property
    def waiting(self) -> Lost:
        """Share of the step in which ranks waited for other ranks (`penstock.core.bubble`)."""
        return Lost.of(self.bubble_ns.tolist(), self.makespan_ns)

    @property
    def parts(self) -> StepParts:
        """Division of every rank's step into parts."""
        compute, communication, reductions, optimizer = (
            Lost.of(part.tolist(), self.makespan_ns)
            for part in (self.compute_ns, self.communication_ns, self.reduction_ns, self.optimizer_ns)
        )
        return StepParts(
            compute=compute,
            waiting=self.waiting,
            communication=communication,
            reductions=reductions,
            optimizer=optimizer,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linked:
    """An order with its messages: the tables of `link`, and the first message of each channel."""

    num_ranks: int
    channels: Channels
    actions: Ints
    messages: Ints
    first_messages: Ints
    late_receives: bool

    @property
    def first_waits(self) -> Ints:
        """[ranks]: the first WAIT_SEND of each rank in the list of all (one per message it sends)."""
        return self.first_messages[np.searchsorted(self.channels.sources, np.arange(self.num_ranks))]

    @property
    def first_posts(self) -> Ints:
        """[ranks]: the first POST_RECV of each rank in the list of all (one per message into it)."""
        counts = np.zeros(self.num_ranks + 1, dtype=np.int64)
        np.add.at(counts, self.channels.targets + 1, np.diff(self.first_messages))
        return np.cumsum(counts)[:-1]


def simulate_arrays(
    order: Order,
    costs: Costs,
    *,
    receive_ahead: int = 2,
    late_receives: bool = False,
    reductions: Sequence[Reduction] = (),
    traced: bool = False,
) -> StepTimes:
    """The times of one step; raises `UserError` if the order cannot run."""
    linked = link_order(order, receive_ahead, late_receives, width=kernel.ARRIVED + 1 if traced else kernel.REACHED)
    return simulate_linked(order, linked, costs, receive_ahead=receive_ahead, reductions=reductions)


def simulate_linked(
    order: Order, linked: Linked, costs: Costs, *, receive_ahead: int, reductions: Sequence[Reduction] = ()
) -> StepTimes:
    """The times of one step of a linked order; ``linked.actions`` gets the trace if it has columns for it."""
    if costs.num_stages != order.num_stages or costs.num_ranks != order.num_ranks:
        raise ValueError(f"costs of {costs.num_stages} stages on {costs.num_ranks} ranks for {order.num_stages} stages")
    if costs.num_remainder_slices != order.num_remainder_slices:
        raise ValueError(f"costs of {costs.num_remainder_slices} slices at the end for {order.num_remainder_slices}")
    run_order, run_linked = in_parts(order, linked, costs, reductions)
    times = simulate_parts(run_order, run_linked, costs, receive_ahead=receive_ahead, reductions=reductions)
    if run_linked is linked or linked.actions.shape[1] == kernel.REACHED:
        return times
    firsts = np.flatnonzero(_begins(run_order))
    stops = np.append(firsts[1:], run_order.num_actions) - 1
    linked.actions[:, kernel.REACHED : kernel.STOP] = run_linked.actions[firsts, kernel.REACHED : kernel.STOP]
    linked.actions[:, kernel.STOP :] = run_linked.actions[stops, kernel.STOP :]
    return replace(times, trace=linked.actions[:, kernel.REACHED :])


def simulate_parts(
    order: Order, linked: Linked, costs: Costs, *, receive_ahead: int, reductions: Sequence[Reduction] = ()
) -> StepTimes:
    """The times of one step of an order whose first forwards and last backwards are `in_parts`."""
    _fill_costs(linked.actions, order, costs)
    ends = Reductions(order.stage_ranks.tolist(), costs, reductions, _cut_stages(order))
    gathers = list(_gathers(order, linked, costs, ends))
    cells = _cells(order, linked, costs, len(ends.pieces))
    pieces = slice(len(cells) - len(ends.pieces), None)
    completed = _early_reductions(order, linked, ends)
    early = completed >= 0
    linked.actions[:, kernel.COMPLETES] = np.where(early, len(cells) - len(ends.pieces) + completed, -1)
    linked.actions[early, kernel.PAUSE_NS] = ends.pauses_ns[completed[early]]
    settings = _settings(linked, costs, receive_ahead)
    clock = _clock(order.num_ranks, len(linked.channels.sources))
    waits_first = linked.late_receives and costs.has_barrier
    if waits_first:
        for rank, gathered_at in enumerate(linked.actions[order.offsets[:-1], kernel.GATHERED_AT].tolist()):
            set_time(clock, rank, gathered_at)
    kernel.run(linked.actions, cells, linked.messages, clock, settings)
    if order.joined is not None and linked.actions.shape[1] > kernel.REACHED:
        firsts = order.firsts[:, None]
        linked.actions[firsts, [kernel.START, kernel.STOP]] = linked.actions[firsts + 1, [kernel.START, kernel.STOP]]
    started = {ends.pieces[piece]: int(cells[pieces, kernel.STARTED][piece]) for piece in completed[early]}
    for gather in gathers:
        missing_ns = int(linked.actions[gather.action, kernel.MISSING_NS])
        gather.missing_ns = ends.gather_ns(gather.piece) if waits_first else missing_ns
    return _close(cells[: order.num_ranks], linked.actions[:, kernel.REACHED :], costs, ends, started, gathers)


def in_parts(order: Order, linked: Linked, costs: Costs, reductions: Sequence[Reduction] = ()) -> tuple[Order, Linked]:
    """The order with the last backward of every stage that is reduced in buckets in their parts, and the first forward
    of every one that is gathered in buckets, as `penstock.planner.passes.reductions` cuts them: the first part
    receives, the last one sends.
    """
    buckets = dict(enumerate(costs.buckets)) if any(reduction.group.is_of_peers for reduction in reductions) else {}
    ties = [reduction.stages or (0, order.num_stages - 1) for reduction in reductions if reduction.group is Group.TIE]
    copies = {stage for stages in ties for stage in stages if stage}
    stages = range(order.num_stages)
    uncut = stages if linked.late_receives else copies
    of_stages = [1 if stage in uncut else max(len(buckets.get(stage, ())), 1) for stage in stages]
    counts = np.ones(order.num_actions, dtype=np.int64)
    counts[_last_backwards(order)] = of_stages
    if costs.gather_ns:
        counts[_first_forwards(order)] = of_stages
    if (counts == 1).all():
        return order, linked
    origins = np.repeat(np.arange(order.num_actions), counts)
    stops = np.cumsum(counts)
    parts = np.zeros((order.num_actions, 2), dtype=np.int32) if order.parts is None else order.parts
    parts = parts[origins]
    for whole in np.flatnonzero(counts > 1).tolist():
        cut = [(bucket.part.first, bucket.part.stop) for bucket in buckets[int(order.stages[whole])]]
        parts[stops[whole] - len(cut) : stops[whole]] = cut[::-1] if order.kinds[whole] == FORWARD else cut
    return _repeated(order, origins, stops, parts), _linked_in_parts(order, linked, origins, stops)


def _repeated(order: Order, origins: Ints, stops: Ints, parts: Integers) -> Order:
    return replace(
        order,
        offsets=np.concatenate([[0], stops])[order.offsets],
        kinds=order.kinds[origins],
        stages=order.stages[origins],
        microbatches=order.microbatches[origins],
        slices=order.slices[origins],
        parts=parts,
        joined=None if order.joined is None else order.joined[origins],
    )


def _linked_in_parts(order: Order, linked: Linked, origins: Ints, stops: Ints) -> Linked:
    """``stops`` [actions] are the numbers of parts up to each action, ``origins`` [parts] the actions of the parts."""
    numbers = np.arange(len(origins))
    is_last = numbers + 1 == stops[origins]
    is_first = np.concatenate([[True], is_last[:-1]])
    awaited = np.concatenate([[0], linked.actions[:-1, link.STOP_WAIT]])
    awaited[order.offsets[:-1]] = linked.first_waits
    actions = linked.actions[origins]
    actions[~is_first, link.NEEDS_CHANNEL] = actions[~is_first, link.NEEDS_NUMBER] = -1
    actions[~is_last, link.SENDS_CHANNEL] = actions[~is_last, link.SENDS_NUMBER] = -1
    actions[~is_last, link.STOP_WAIT] = awaited[origins[~is_last]]
    messages = linked.messages.copy()
    messages[:, link.SENDER] = stops[messages[:, link.SENDER]] - 1
    return replace(linked, actions=actions, messages=messages)


def _last_backwards(order: Order) -> Ints:
    """[stages]: the last B or W."""
    complete = np.flatnonzero((order.kinds == BACKWARD) | (order.kinds == WEIGHT_GRADIENT))
    last = np.zeros(order.num_stages, dtype=np.int64)
    np.maximum.at(last, order.stages[complete], complete)
    return last


def _first_forwards(order: Order) -> Ints:
    """[stages]: the first F."""
    forwards = np.flatnonzero(order.kinds == FORWARD)
    first = np.full(order.num_stages, order.num_actions, dtype=np.int64)
    np.minimum.at(first, order.stages[forwards], forwards)
    return first


def _begins(order: Order) -> Flags:
    """[actions]: whether it is not a later part of a forward or backward."""
    assert order.parts is not None, "only orders with parts are cut"
    is_part = (order.kinds != RECOMPUTE) & (order.parts[:, 1] > 0)
    goes_on = is_part[1:] & is_part[:-1] & (order.stages[1:] == order.stages[:-1])
    goes_on &= order.kinds[1:] == order.kinds[:-1]
    begins: Flags = np.concatenate([[True], ~goes_on])
    return begins


def _cut_stages(order: Order) -> frozenset[int]:
    """The stages that are reduced in buckets, whose last backward is in parts."""
    if order.parts is None:
        return frozenset()
    return frozenset(order.stages[(order.kinds != RECOMPUTE) & (order.parts[:, 1] > 0)].tolist())


def link_order(
    order: Order, receive_ahead: int, late_receives: bool = False, *, width: int = link.NUM_ACTION_COLUMNS
) -> Linked:
    """Number the messages, place posts and waits; ``width`` is the number of columns of ``actions``."""
    channels = channels_of(order.stage_ranks.tolist())
    joined = np.zeros(order.num_actions, dtype=np.int32) if order.joined is None else order.joined.astype(np.int32)
    codes = np.stack([order.kinds, order.stages, order.microbatches, order.slices, joined], axis=1)
    producers = np.full((2, order.num_stages, order.num_microbatches, order.num_slices), -1, dtype=np.int32)
    actions = np.full((order.num_actions, width), -1, dtype=np.int64)
    stuck_action = link.find_rounds(
        order.offsets, codes, DIRECTIONS, channels.sends, channels.receives, producers, actions
    )
    if stuck_action >= 0:
        raise _deadlock(order, stuck_action)
    counts = np.bincount(actions[:, link.SENDS_CHANNEL] + 1, minlength=len(channels.sources) + 1)[1:]
    first_messages = np.concatenate([[0], np.cumsum(counts)])
    messages = np.zeros((first_messages[-1], kernel.POSTED_AT + 1), dtype=np.int64)
    link.find_due_rounds(
        order.offsets, channels.targets, receive_ahead, late_receives, actions, first_messages, messages
    )
    link.place_posts(order.offsets, channels.targets, receive_ahead, actions, first_messages, messages)
    link.place_waits(order.offsets, channels.sources, receive_ahead, actions, first_messages, messages)
    return Linked(
        num_ranks=order.num_ranks,
        channels=channels,
        actions=actions,
        messages=messages,
        first_messages=first_messages,
        late_receives=late_receives,
    )


def _deadlock(order: Order, index: int) -> UserError:
    is_pair = order.joined is not None and bool(order.joined[index])
    columns = (order.kinds, order.stages, order.microbatches, order.slices)
    actions = [action_of(*(int(array[number]) for array in columns)) for number in range(index, index + 1 + is_pair)]
    both = ", both actions of an overlap before either begins (with tp above 1)" if is_pair else ""
    return UserError(
        what=f"{';'.join(map(str, actions))} never gets what it needs",
        where=f"schedule, rank {order.ranks[index]}",
        remedy=f"order the actions so that what each needs can come first{both}",
    )


def _fill_costs(actions: Ints, order: Order, costs: Costs) -> None:
    part = (order.stages, order.columns)
    actions[:, kernel.WORK] = whole_ns(order, costs)
    if order.parts is not None:
        for index in np.flatnonzero(order.parts[:, 1]).tolist():
            (stage, column), (first, stop) = (int(part[0][index]), int(part[1][index])), order.parts[index].tolist()
            kind = int(order.kinds[index])
            if kind == RECOMPUTE:
                work_ns = costs.part_ns(stage, column, first, stop)
            else:
                work_ns = costs.trained_ns(kind, stage, int(actions[index, kernel.WORK]), first)
            actions[index, kernel.WORK] = work_ns
    actions[:, kernel.SLOWDOWN_PPM] = costs.slowdown_ppm[order.kinds, *part]
    actions[:, kernel.JOINS] = kernel.ALONE
    if order.joined is not None:
        _join(actions, order, costs)
    actions[:, kernel.SENDS_NS] = costs.transfer_ns[DIRECTIONS[order.kinds], *part]


def whole_ns(order: Order, costs: Costs) -> Nanoseconds:
    """[actions]: the time of every action alone on its host; for a part that of the whole action."""
    places = (order.stages, order.columns)
    work_ns: Nanoseconds = costs.compute_ns[order.kinds, *places]
    if costs.inside_ns is not None:
        work_ns = work_ns + np.where(order.recomputes_inside(), costs.inside_ns[places], 0)
    return work_ns


def _join(actions: Ints, order: Order, costs: Costs) -> None:
    """Give the second action of every pair the work of both, less the time of collectives that the pair hides; its
    slowdown is the average of both.
    """
    firsts = order.firsts
    pairs = np.stack([firsts, firsts + 1])
    work, slowed = actions[pairs, kernel.WORK], actions[pairs, kernel.SLOWDOWN_PPM].astype(np.float64)
    total = work.sum(axis=0)
    places = np.stack([order.kinds, order.stages, order.columns], axis=1)[pairs]
    actions[firsts, kernel.WORK] = 0
    actions[firsts + 1, kernel.WORK] = np.maximum(total - costs.hidden_ns(places[0], places[1]), 0)
    average = (slowed * work).sum(axis=0) / np.maximum(total, 1)
    actions[firsts + 1, kernel.SLOWDOWN_PPM] = np.where(total > 0, np.rint(average), MILLION).astype(np.int64)
    actions[firsts, kernel.JOINS] = kernel.FIRST_OF_PAIR
    actions[firsts + 1, kernel.JOINS] = kernel.SECOND_OF_PAIR


def _early_reductions(order: Order, linked: Linked, ends: Reductions) -> Nanoseconds:
    """[actions]: the number in ``ends.pieces`` of what is reduced after the action while the rank continues
    (`penstock.planner.passes.reductions`), -1 for none; for a pair, after its second action.
    """
    completed = np.full(order.num_actions, -1, dtype=np.int64)
    if not linked.late_receives:
        last = _last_backwards(order)
        if order.joined is not None:
            last += order.joined[last]
        for number, piece in enumerate(ends.pieces):
            completed[last[piece.stage] + 1 - (ends.num_pieces(piece.stage) - piece.number)] = number
        completed[order.offsets[1:] - 1] = -1
    return completed


@dataclass(slots=True)
class _Gather:
    """The gather of a piece's parameters. If the rank's gathers begin at 0, it is over at ``over_ns``. That is
    ``missing_ns`` after ``action``, which waits for it, could begin otherwise (negative: before that).
    """

    piece: Piece
    action: int
    over_ns: int
    missing_ns: int = 0


def _gathers(order: Order, linked: Linked, costs: Costs, ends: Reductions) -> Iterator[_Gather]:
    """All gathers, in the order in which the ranks' first forwards need them; with ``late_receives`` a rank's first
    action waits for all.
    """
    linked.actions[:, kernel.GATHERED_AT] = 0
    if not costs.gather_ns:
        return
    firsts = _first_forwards(order)
    needed = sorted(
        (firsts[piece.stage] + ends.num_pieces(piece.stage) - 1 - piece.number, piece) for piece in ends.pieces
    )
    over_ns = ends.gathered_ns([piece for _, piece in needed])
    first_actions = order.offsets[order.stage_ranks]
    for (action, piece), over in zip(needed, over_ns, strict=True):
        waits = first_actions[piece.stage] if linked.late_receives else action
        linked.actions[waits, kernel.GATHERED_AT] = over
        yield _Gather(piece, int(waits), over)


def _cells(order: Order, linked: Linked, costs: Costs, num_pieces: int) -> Ints:
    """Rows of ranks, channels, sending cards, receiving cards (row 0 of each stands for no card), and pieces of
    gradients.
    """
    num_channels = len(linked.channels.sources)
    num_cards = 2 + max(*costs.hosts.local_cards, *costs.hosts.network_cards)
    num_cells = order.num_ranks + num_channels + 2 * num_cards + num_pieces
    cells = np.zeros((num_cells, kernel.WIDTH), dtype=np.int64)
    _fill_ranks(cells[: order.num_ranks], order, linked, costs)
    _fill_channels(cells[order.num_ranks : order.num_ranks + num_channels], linked, costs, order.num_ranks, num_cards)
    return cells


def _fill_ranks(rows: Ints, order: Order, linked: Linked, costs: Costs) -> None:
    host_of = np.asarray(costs.hosts.host_of)
    rows[:, kernel.STOP_AT] = order.offsets[1:]
    rows[:, kernel.POSITION] = order.offsets[:-1]
    rows[:, kernel.NEXT_POST] = linked.first_posts
    rows[:, kernel.NEXT_WAIT] = linked.first_waits
    rows[:, kernel.LAST_WAIT] = [*linked.first_waits[1:], len(linked.messages)]
    rows[:, [kernel.CHANNEL, kernel.NUMBER]] = -1
    for host in set(costs.hosts.host_of):
        ring = np.flatnonzero(host_of == host)
        rows[ring[:-1], kernel.NEIGHBOUR] = ring[1:]
        rows[ring[-1], kernel.NEIGHBOUR] = ring[0]
        rows[ring, kernel.RESIDENTS] = len(ring)


def _fill_channels(rows: Ints, linked: Linked, costs: Costs, num_ranks: int, num_cards: int) -> None:
    host_of, local, network = map(np.asarray, (costs.hosts.host_of, costs.hosts.local_cards, costs.hosts.network_cards))
    channels = linked.channels
    inside = host_of[channels.sources] == host_of[channels.targets]
    rows[:, kernel.FIRST] = linked.first_messages[:-1]
    rows[:, kernel.COUNT] = np.diff(linked.first_messages)
    rows[:, [kernel.SOURCE, kernel.TARGET]] = np.stack([channels.sources, channels.targets], axis=1)
    sends = channels.sends >= 0
    for side, ranks in enumerate((channels.sources, channels.targets)):
        card = np.where(inside, local[ranks], network[ranks])
        needed = np.zeros(len(rows), dtype=np.int64)
        needed[channels.sends[sends]] = costs.card_ppm[side][sends]
        rows[:, kernel.CARD + side] = num_ranks + len(rows) + side * num_cards + card + 1
        rows[:, kernel.NEEDED + side] = np.where(card < 0, 0, needed)
        rows[:, kernel.SHARING + side] = num_ranks + np.arange(len(rows))
        for card_number in np.unique(card[card >= 0]):
            ring = np.flatnonzero(card == card_number)
            rows[ring, kernel.SHARING + side] = num_ranks + np.roll(ring, -1)


def _clock(num_ranks: int, num_channels: int) -> Clock:
    """A clock on which all ranks are due now, and channels never."""
    return new_clock(num_ranks + num_channels, np.arange(num_ranks + num_channels) < num_ranks)


def _settings(linked: Linked, costs: Costs, receive_ahead: int) -> Ints:
    hosts = costs.hosts
    shared = hosts.replicas > 1 or len(set(hosts.host_of)) < len(hosts.host_of)
    contended = shared and bool((costs.slowdown_ppm != MILLION).any())
    counts = [costs.num_ranks, len(linked.channels.sources)]
    traced = linked.actions.shape[1] > kernel.REACHED
    constants = [
        *costs.instructions.as_tuple,
        receive_ahead,
        hosts.replicas,
        contended,
        traced,
        *counts,
        costs.is_blocking,
        costs.has_barrier,
    ]
    return np.array(constants, dtype=np.int64)


def _close(
    ranks: Ints,
    trace: Ints,
    costs: Costs,
    ends: Reductions,
    started: Mapping[Piece, int],
    gathers: Sequence[_Gather],
) -> StepTimes:
    """Simulate the end of the step: the ranks' reductions, some of which ``started`` early, and their optimizers.
    Without a barrier the gathers of the next step follow, which takes the same times.
    """
    finish, busy, bubble = (ranks[:, column].copy() for column in (kernel.FINISH, kernel.BUSY, kernel.BUBBLE))
    for gather in gathers if costs.has_barrier else ():
        ends.gather(gather.piece, gather.over_ns, max(gather.missing_ns, 0))
    communication = finish - busy - bubble - ends.paused_ns(started) - ends.reduction_ns
    ends.join(finish, started)
    optimizer = np.array(costs.optimizer_ns or (0,) * len(finish), dtype=np.int64)
    done = ends.clock_ns + optimizer
    begins = np.zeros_like(done) if costs.has_barrier else ranks[:, kernel.BEGAN].copy()
    for gather in () if costs.has_barrier else gathers:
        rank = ends.rank_of(gather.piece)
        begins[rank] = min(begins[rank], -gather.missing_ns)
        ends.gather(gather.piece, int(done[rank]) + gather.over_ns, 0)
    makespan = int((done - begins).max())
    return StepTimes(
        makespan_ns=makespan,
        finish_ns=finish,
        compute_ns=busy,
        bubble_ns=np.maximum(makespan - busy - communication - ends.reduction_ns - optimizer, 0),
        communication_ns=communication,
        reduction_ns=ends.reduction_ns,
        optimizer_ns=optimizer,
        reductions=tuple(ends.reductions),
        step_ns=ends.clock_ns,
        trace=trace,
    )
