"""Entry point of the simulator: from a Program and its costs to a Timeline and the parts of its step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.program import Program, RankProgram
from penstock.core.schedule import Action, Kind, Schedule
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.order import RECOMPUTE, Order, actions_of, from_schedule
from penstock.planner.simulate import kernel, link
from penstock.planner.simulate.arrays import Linked, StepTimes, in_parts, link_order, simulate_parts, whole_ns
from penstock.planner.simulate.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation:
    """One simulated step: ``timeline`` has its events, ``times`` the totals per rank.

    ``peak_bytes`` per rank is the sum of the static bytes and the peak of live slots and transients.
    """

    timeline: Timeline
    times: StepTimes

    @property
    def makespan_ns(self) -> int:
        """The step's length."""
        return self.times.makespan_ns

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes per rank."""
        return self.timeline.peak_bytes


def simulate(program: Program, costs: Costs, *, static_bytes: Sequence[int] = ()) -> Simulation:
    """Simulate one step of a lowered Program, whose transfers are placed as by `planner.lowering`.

    ``static_bytes`` per rank are always held: parameters, gradients, optimizer state, the process itself.
    """
    order = from_schedule(_schedule(program), keep_pairs=True)
    linked = link_order(order, program.receive_ahead, program.late_receives, width=kernel.ARRIVED + 1)
    order, linked = in_parts(order, linked, costs, program.reductions)
    times = simulate_parts(order, linked, costs, receive_ahead=program.receive_ahead, reductions=program.reductions)
    always = static_bytes or (0,) * order.num_ranks
    timeline = Timeline(
        source=Source.SIMULATED,
        num_ranks=order.num_ranks,
        step_ns=times.makespan_ns,
        events=tuple(_events(order, linked, times, _Waits(order, linked, costs))),
        peak_bytes=tuple(a + live_bytes(rank) for a, rank in zip(always, program.ranks, strict=True)),
    )
    return Simulation(timeline=timeline, times=times)


def _schedule(program: Program) -> Schedule:
    """The compute actions, with backwards whole."""
    rows = [[i.action for i in rank.instructions if i.action.is_compute] for rank in program.ranks]
    return Schedule(
        ranks=tuple(tuple(itertools.chain.from_iterable(map(_whole, row))) for row in rows),
        num_stages=program.num_stages,
        num_microbatches=program.num_microbatches,
        num_slices=len(program.slice_capacities),
        num_remainder_slices=len(program.remainder_capacities),
    )


def _whole(action: Action) -> tuple[Action, ...]:
    """The action; the whole backward instead of its last part, and nothing for the parts before it."""
    if action.part is None or action.kind is Kind.R:
        return (action,)
    return () if action.part.first else (replace(action, part=None),)


def live_bytes(program: RankProgram) -> int:
    """The largest number of bytes of live slots and transients at one instruction."""
    live = peak = 0
    for instruction in program.instructions:
        live += sum(program.slots[index].num_bytes for index in instruction.acquires)
        peak = max(peak, live + instruction.transient_bytes)
        live -= sum(program.slots[index].num_bytes for index in instruction.frees)
    return peak


_RECEIVE = {Kind.F: Kind.WAIT_RECV_F, Kind.B: Kind.WAIT_RECV_B, Kind.I: Kind.WAIT_RECV_B}
_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
_RELEASE = {Kind.F: Kind.WAIT_SEND_F, Kind.B: Kind.WAIT_SEND_B, Kind.I: Kind.WAIT_SEND_B}
_REDUCE, _GATHER = (Kind.START_REDUCE, Kind.WAIT_REDUCE), (Kind.START_GATHER, Kind.WAIT_GATHER)


class _Waits:
    """Waits of ranks for their shards in compute actions; a part of a backward has its share of the work."""

    def __init__(self, order: Order, linked: Linked, costs: Costs) -> None:
        self._collectives = costs.collectives
        self._places = np.stack([order.kinds, order.stages, order.columns], axis=1).astype(np.int64)
        self._whole_ns, self._work_ns = whole_ns(order, costs), linked.actions[:, kernel.WORK]
        self._is_inside = np.zeros(order.num_actions, dtype=bool)
        if costs.inside_ns is not None:
            self._is_inside = order.recomputes_inside() & (costs.inside_ns[order.stages, order.columns] > 0)
        self._is_part = np.zeros(order.num_actions, dtype=bool)
        if order.parts is not None:
            self._is_part = (order.parts[:, 1] > 0) & (order.kinds != RECOMPUTE)

    def of(self, number: int, *, is_pair: bool) -> int:
        """The wait in the action with this number, or in the pair that it ends."""
        if self._collectives is None:
            return 0
        places = self._places[number - is_pair : number + 1]
        waited = sum(self._collectives.waited_ns((kind, stage, column)) for kind, stage, column in places.tolist())
        if self._is_inside[number]:
            _, stage, column = places[-1].tolist()
            waited += self._collectives.waited_ns((RECOMPUTE, stage, column))
        if self._is_part[number]:
            return waited * int(self._work_ns[number]) // max(int(self._whole_ns[number]), 1)
        return waited - int(self._collectives.hidden_ns(places[:1], places[1:])[0]) if is_pair else waited


def _events(order: Order, linked: Linked, times: StepTimes, waits: _Waits) -> Iterator[Event]:
    """Events of all ranks; waits and transfers without duration are omitted."""
    actions, awaited = list(actions_of(order)), _awaited(linked)
    shown = _shown(order, actions)
    free = 0
    ranks, stops = order.ranks.tolist(), linked.actions[:, link.STOP_WAIT].tolist()
    rows = zip(ranks, actions, shown, stops, times.trace.tolist(), strict=True)
    for number, (rank, action, computed, stop_wait, row) in enumerate(rows):
        reached, received, start, stop, released, departed, arrived = row
        free = max(stop, free) if computed is not None and computed.children else stop
        if received > reached >= 0:
            yield _event(rank, Activity.WAIT, _RECEIVE, action, reached, received)
        if computed is not None:
            waited = min(waits.of(number, is_pair=bool(computed.children)), stop - start)
            yield Event(rank, Activity.COMPUTE, str(computed), start, stop, waited)
        if released > free:
            yield _event(rank, Activity.WAIT, _RELEASE, actions[awaited[stop_wait - 1]], free, released)
        free = released
        if arrived > departed:
            yield _event(rank, Activity.TRANSFER, _SEND, action, departed, arrived)
    last_waits = [*linked.first_waits[1:].tolist(), len(awaited)]
    for rank, (last_wait, finish) in enumerate(zip(last_waits, times.finish_ns.tolist(), strict=True)):
        done = int(times.trace[order.offsets[rank + 1] - 1, [_STOP, _RELEASED]].max())
        if finish > done:
            yield _event(rank, Activity.WAIT, _RELEASE, actions[awaited[last_wait - 1]], done, finish)
    yield from _step_end_events(order, times)


def _shown(order: Order, actions: Sequence[Action]) -> list[Action | None]:
    """The compute events of all actions: a pair is one event, shown as an action with both children."""
    shown: list[Action | None] = list(actions)
    for first in order.firsts.tolist():
        shown[first] = None
        shown[first + 1] = Action(Kind.OVERLAP, actions[first].stage, children=tuple(actions[first : first + 2]))
    return shown


_STOP, _RELEASED = kernel.STOP - kernel.REACHED, kernel.RELEASED - kernel.REACHED


def _awaited(linked: Linked) -> list[int]:
    """The action that sent the message of every WAIT_SEND, in the order of `Linked.messages`' list of them.

    The WAIT_SENDs of one channel are in the order of its messages, so sorted by channel they are the messages in order.
    """
    senders = np.empty(len(linked.messages), dtype=np.int64)
    senders[np.argsort(linked.messages[:, link.AWAITED], kind="stable")] = linked.messages[:, link.SENDER]
    numbers: list[int] = senders.tolist()
    return numbers


def _event(rank: int, activity: Activity, kinds: dict[Kind, Kind], action: Action, start: int, stop: int) -> Event:
    """An event of the transport instruction that belongs to a compute action."""
    name = str(Action(kinds[action.kind], action.stage, action.microbatch, action.slice))
    return Event(rank, activity, name, start, stop)


def _step_end_events(order: Order, times: StepTimes) -> Iterator[Event]:
    """Events of reductions, gathers and optimizers. A reduction or gather is shown as a transfer while it runs, and as
    REDUCE while its rank waits for it or for others before it.
    """
    stage_of = {rank: stage for stage, rank in reversed(list(enumerate(order.stage_ranks.tolist())))}
    for reduced in times.reductions:
        kinds = _GATHER if reduced.is_gather else _REDUCE
        start, wait = (str(Action(kind, reduced.stage, group=reduced.group, part=reduced.part)) for kind in kinds)
        if reduced.over_ns > reduced.begin_ns:
            yield Event(reduced.rank, Activity.TRANSFER, start, reduced.begin_ns, reduced.over_ns)
        if reduced.over_ns > reduced.reached_ns:
            yield Event(reduced.rank, Activity.REDUCE, wait, reduced.reached_ns, reduced.over_ns)
    for rank, (begin, duration) in enumerate(zip(times.step_ns.tolist(), times.optimizer_ns.tolist(), strict=True)):
        yield Event(rank, Activity.STEP, str(Action(Kind.STEP, stage_of[rank])), begin, begin + duration)
