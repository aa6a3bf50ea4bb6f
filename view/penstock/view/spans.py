"""A Timeline as lanes of spans, before anything is drawn: what to show where, with slivers gathered.

Every rank has four lanes: ``bars`` (compute, reductions, the optimizer step), ``waits``, and the transfers of
activations and of gradients. Events too short to see are gathered with their neighbours into one span that keeps the
share of every kind, so that a picture's size follows from its width and never from the length of the run. Waits too
short to see are left out: the gap says as much.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.core.errors import UserError
from penstock.core.schedule import Action, Kind, parse_action
from penstock.core.timeline import Activity, Event, Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """One shape to draw: a single event, or ``count`` short neighbours. A pair of actions is drawn as both, each with
    half of the height.

    ``mix`` has one event of every kind in the span, with the kind's share of the span's length, in the order of kinds.
    The gaps between events are the rest up to 1.
    """

    start_ns: int
    stop_ns: int
    mix: tuple[tuple[Event, float], ...]
    count: int = 1

    @property
    def duration_ns(self) -> int:
        """Its length, gaps between gathered events included."""
        return self.stop_ns - self.start_ns

    @property
    def event(self) -> Event:
        """The event, or of gathered ones an example of the kind that took most of the time."""
        return max(self.mix, key=lambda part: part[1])[0]

    @property
    def action(self) -> Action | None:
        """The action of `event`."""
        return action_of(self.event.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """The spans of one rank."""

    bars: tuple[Span, ...]
    waits: tuple[Span, ...]
    activations: tuple[Span, ...]
    gradients: tuple[Span, ...]

    @property
    def num_spans(self) -> int:
        """How many shapes the rank needs."""
        return sum(len(span.mix) for span in self.bars) + len(self.waits) + len(self.activations) + len(self.gradients)


THIN = 3
"""Transfers are drawn thin, where detail is harder to see: they are gathered up to this many times longer."""


@functools.lru_cache(maxsize=65536)
def action_of(text: str) -> Action | None:
    """The action written as ``text``, or none where a timeline holds another word."""
    try:
        return parse_action(text)
    except UserError:
        return None


def compute_kind(action: Action | None) -> Kind | None:
    """F, B, I, W or R; an overlap counts as its first child; none for everything else."""
    if action is None:
        return None
    if action.kind is Kind.OVERLAP:
        return compute_kind(action.children[0])
    return action.kind if action.is_compute else None


def lanes(timeline: Timeline, shortest_ns: float) -> tuple[Lanes, ...]:
    """The lanes of every rank; events shorter than ``shortest_ns`` are gathered, events of unknown ranks left out."""
    by_rank: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if 0 <= event.rank < timeline.num_ranks:
            by_rank[event.rank].append(event)
    return tuple(_rank_lanes(sorted(events, key=_position), shortest_ns) for events in by_rank)


def _position(event: Event) -> tuple[int, int]:
    return (event.start_ns, event.stop_ns)


def _rank_lanes(events: Sequence[Event], shortest_ns: float) -> Lanes:
    thin = (Activity.WAIT, Activity.TRANSFER)
    transfers = [e for e in events if e.activity is Activity.TRANSFER]
    return Lanes(
        bars=gather([e for e in events if e.activity not in thin], shortest_ns),
        waits=tuple(_merge([e]) for e in events if e.activity is Activity.WAIT and e.duration_ns >= shortest_ns),
        activations=gather([e for e in transfers if not carries_gradient(e)], THIN * shortest_ns),
        gradients=gather([e for e in transfers if carries_gradient(e)], THIN * shortest_ns),
    )


def carries_gradient(event: Event) -> bool:
    """Whether a transfer goes backward through the model, or sums gradients."""
    action = action_of(event.action)
    return action is not None and (action.kind is Kind.START_REDUCE or action.kind.value.endswith("_B"))


def gather(events: Iterable[Event], shortest_ns: float) -> tuple[Span, ...]:
    """Spans in the order of ``events`` (by start); runs of short ones become spans of at most 2 x ``shortest_ns``."""
    spans: list[Span] = []
    run: list[Event] = []
    for event in events:
        if run and not _joins(run, event, shortest_ns):
            spans.append(_merge(run))
            run = []
        if event.duration_ns >= shortest_ns:
            spans.append(_merge([event]))
        else:
            run.append(event)
    return (*spans, _merge(run)) if run else tuple(spans)


def _joins(run: Sequence[Event], event: Event, shortest_ns: float) -> bool:
    is_near = event.start_ns - run[-1].stop_ns < shortest_ns
    return is_near and event.duration_ns < shortest_ns and event.stop_ns - run[0].start_ns <= 2 * shortest_ns


def children_of(event: Event) -> tuple[Event, ...]:
    """The event, or of a pair of actions one for each of them, both as long as the pair."""
    action = action_of(event.action)
    if action is None or not action.children:
        return (event,)
    return tuple(replace(event, action=str(child)) for child in action.children)


def _merge(run: Sequence[Event]) -> Span:
    if len(run) == 1:
        children = children_of(run[0])
        return Span(run[0].start_ns, run[0].stop_ns, tuple((child, 1 / len(children)) for child in children))
    start, stop = run[0].start_ns, max(event.stop_ns for event in run)
    time_by_kind: defaultdict[str, float] = defaultdict(float)
    example: dict[str, Event] = {}
    for children in map(children_of, run):
        for event in children:
            time_by_kind[_order(event)] += event.duration_ns / len(children)
            example.setdefault(_order(event), event)
    # Events of a measured rank may overlap by the clock's resolution. Shares must not exceed 1, so they are of the sum
    # of the events' times if that is longer than the span.
    length = max(stop - start, sum(time_by_kind.values()), 1)
    mix = tuple((example[key], time_by_kind[key] / length) for key in sorted(example))
    return Span(start, stop, mix, len(run))


def _order(event: Event) -> str:
    """A key that sorts F, B, I, W, R and then everything that is not compute."""
    kind = compute_kind(action_of(event.action)) if event.activity is Activity.COMPUTE else None
    return f"{'FBIWR'.index(kind.value)}" if kind else f"other {event.activity.value}"


def end_ns(timeline: Timeline) -> int:
    """End of the chart: the step's length, or later if an event lasted longer."""
    return max(timeline.step_ns, max((event.stop_ns for event in timeline.events), default=0))
