"""Gathering slivers loses no time and no kind, and bounds the number of shapes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.schedule import Kind
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.view.spans import Span, action_of, carries_gradient, children_of, compute_kind, end_ns, gather, lanes
from tests.support.timelines import rank_events, timelines


def time_by_kind(spans: tuple[Span, ...]) -> Counter[tuple[Activity, Kind | None]]:
    found: Counter[tuple[Activity, Kind | None]] = Counter()
    for span in spans:
        for event, share in span.mix:
            found[event.activity, compute_kind(action_of(event.action))] += round(share * span.duration_ns)
    return found


@given(rank_events(0, 1000), st.integers(1, 5000))
def test_gathering_keeps_the_time_of_every_kind(events: list[Event], shortest: int) -> None:
    bars = [e for e in events if e.activity not in (Activity.WAIT, Activity.TRANSFER)]
    expected: Counter[tuple[Activity, Kind | None]] = Counter()
    for children in map(children_of, bars):
        for event in children:
            expected[event.activity, compute_kind(action_of(event.action))] += event.duration_ns // len(children)
    found = time_by_kind(gather(bars, shortest))
    assert all(abs(found[key] - expected[key]) <= len(bars) for key in expected | found)


@given(rank_events(0, 1000), st.integers(1, 5000))
def test_spans_cover_their_events_in_order_without_overlap(events: list[Event], shortest: int) -> None:
    spans = gather(events, shortest)
    assert sum(span.count for span in spans) == len(events)
    reached = 0
    for span in spans:
        assert span.start_ns >= reached
        reached = span.stop_ns
        assert all(0 <= share <= 1 for _, share in span.mix)
        assert span.count == 1 or span.duration_ns <= 2 * shortest
        assert span.count > 1 or (span.start_ns, span.stop_ns) == (span.event.start_ns, span.event.stop_ns)


@given(rank_events(0, 1000), st.integers(1, 5000))
def test_long_events_are_never_gathered(events: list[Event], shortest: int) -> None:
    alone = [span.event for span in gather(events, shortest) if span.count == 1]
    assert all(children_of(event)[0] in alone for event in events if event.duration_ns >= shortest)


@given(st.integers(1, 400), st.integers(1, 40))
def test_the_number_of_spans_follows_from_the_width(num_events: int, shortest: int) -> None:
    events = [Event(0, Activity.COMPUTE, "0F0.0", i, i + 1) for i in range(num_events)]
    assert len(gather(events, shortest)) <= 2 * num_events / shortest + 1


@given(timelines())
def test_every_event_is_in_its_lane(timeline: Timeline) -> None:
    for rank, row in enumerate(lanes(timeline, 0)):
        events = [event for event in timeline.events if event.rank == rank]
        assert [s.event.activity for s in row.waits] == [Activity.WAIT] * len(row.waits)
        assert all(carries_gradient(span.event) for span in row.gradients)
        assert not any(carries_gradient(span.event) for span in row.activations)
        assert row.num_spans == sum(len(children_of(event)) for event in events)
        starts = [span.start_ns for span in row.bars]
        assert starts == sorted(starts)


def test_a_mix_is_ordered_and_leaves_gaps_out() -> None:
    events = [
        Event(0, Activity.COMPUTE, "0W0.0", 0, 2),
        Event(0, Activity.COMPUTE, "0F0.1", 3, 6),
        Event(0, Activity.STEP, "0STEP", 6, 7),
        Event(0, Activity.COMPUTE, "0F0.2", 7, 8),
    ]
    (span,) = gather(events, 10)
    assert [(event.action, share) for event, share in span.mix] == [("0F0.1", 0.5), ("0W0.0", 0.25), ("0STEP", 0.125)]
    assert span.event.action == "0F0.1"
    assert span.count == 4


def test_overlapping_measurements_do_not_overfill_a_bar() -> None:
    events = [Event(0, Activity.COMPUTE, "0F0.0", 0, 4), Event(0, Activity.COMPUTE, "0W0.0", 1, 4)]
    (span,) = gather(events, 10)
    assert sum(share for _, share in span.mix) == 1.0


def test_waits_too_short_to_see_are_left_out() -> None:
    waits = tuple(Event(0, Activity.WAIT, "0WAIT_RECV_F0.0", 100 * i, 100 * i + 10 * i) for i in range(1, 4))
    timeline = Timeline(source=Source.MEASURED, num_ranks=1, step_ns=500, events=waits)
    (row,) = lanes(timeline, 20)
    assert [span.duration_ns for span in row.waits] == [20, 30]


def test_events_of_ranks_that_do_not_exist_are_left_out() -> None:
    events = (Event(3, Activity.COMPUTE, "0F0.0", 0, 1), Event(-1, Activity.COMPUTE, "0F0.0", 0, 1))
    timeline = Timeline(source=Source.MEASURED, num_ranks=2, step_ns=1, events=events)
    assert [row.num_spans for row in lanes(timeline, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1F3.2", Kind.F), ("0R1.1", Kind.R), ("(0B0.0;1F1.0)OVERLAP_F_B", Kind.B), ("0STEP", None), ("nonsense", None)],
)
def test_the_kind_of_an_action(text: str, kind: Kind | None) -> None:
    assert compute_kind(action_of(text)) is kind


def test_a_picture_ends_with_the_step_or_the_last_event() -> None:
    late = Event(0, Activity.STEP, "0STEP", 5, 9)
    assert end_ns(Timeline(source=Source.MEASURED, num_ranks=1, step_ns=7, events=(late,))) == 9
    assert end_ns(Timeline(source=Source.MEASURED, num_ranks=1, step_ns=11, events=(late,))) == 11
    assert end_ns(Timeline(source=Source.MEASURED, num_ranks=1, step_ns=0, events=())) == 0


def test_a_running_reduction_is_drawn_with_the_gradients() -> None:
    """It is drawn next to the concurrent compute; the wait of its rank is a separate bar."""
    events = (
        Event(0, Activity.COMPUTE, "0W0.0", 0, 30),
        Event(0, Activity.TRANSFER, "2START_REDUCE(dp)", 10, 50),
        Event(0, Activity.REDUCE, "2WAIT_REDUCE(dp)", 30, 50),
    )
    (own,) = lanes(Timeline(source=Source.SIMULATED, num_ranks=1, step_ns=50, events=events), 1.0)
    assert [span.event for span in own.gradients] == [events[1]]
    assert [span.event for span in own.bars] == [events[0], events[2]]
    assert not own.activations


def test_a_pair_is_drawn_as_both_of_its_actions() -> None:
    """Each has half of the bar; among gathered neighbours each counts for half of the time."""
    pair = Event(0, Activity.COMPUTE, "(0B0.0;0F2.0)OVERLAP_F_B", 10, 30)
    (alone,) = gather([pair], shortest_ns=5)
    assert [(event.action, share) for event, share in alone.mix] == [("0B0.0", 0.5), ("0F2.0", 0.5)]
    assert {(event.start_ns, event.stop_ns) for event, _ in alone.mix} == {(10, 30)}
    (gathered,) = gather([pair, Event(0, Activity.COMPUTE, "0F3.0", 30, 50)], shortest_ns=100)
    assert [(event.action, share) for event, share in gathered.mix] == [("0F2.0", 0.75), ("0B0.0", 0.25)]
