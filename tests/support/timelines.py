"""Hypothesis strategies for timelines, well-formed and hostile."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.core.timeline import Activity, Event, Source, Timeline

NAMES = {
    Activity.COMPUTE: (
        "0F0.0",
        "1F3.2",
        "0B1.0",
        "2I1.1",
        "0W12.3",
        "1R0.0",
        "(0F0.0;1B0.0)OVERLAP_F_B",
        "<odd & 'word'>",
    ),
    Activity.WAIT: ("0WAIT_RECV_F1.0", "1WAIT_SEND_B0.2"),
    Activity.TRANSFER: ("0SEND_F1.0", "1SEND_B0.2", "0POST_RECV_B1.1"),
    Activity.REDUCE: ("0WAIT_REDUCE(norm)",),
    Activity.STEP: ("0STEP",),
}


@st.composite
def rank_events(draw: st.DrawFn, rank: int, longest_ns: int) -> list[Event]:
    """Events of one rank, one after another with gaps, as a rank that does one thing at a time makes them."""
    now = 0
    found = []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, longest_ns), st.integers(0, longest_ns)), max_size=30)):
        activity = draw(st.sampled_from(list(Activity)))
        name = draw(st.sampled_from(NAMES[activity]))
        found.append(Event(rank, activity, name, now + gap, now + gap + length))
        now += gap + length
    return found


@st.composite
def timelines(draw: st.DrawFn, longest_ns: int = 10**7) -> Timeline:
    """A timeline of one to five ranks; the step may end before or after the last event."""
    num_ranks = draw(st.integers(1, 5))
    events = [event for rank in range(num_ranks) for event in draw(rank_events(rank, longest_ns))]
    has_peaks = draw(st.booleans())
    return Timeline(
        source=draw(st.sampled_from(list(Source))),
        num_ranks=num_ranks,
        step_ns=draw(st.integers(0, 40 * longest_ns)),
        events=tuple(draw(st.permutations(events))),
        peak_bytes=tuple(draw(st.integers(0, 2**40)) for _ in range(num_ranks)) if has_peaks else (),
        step=draw(st.none() | st.integers(0, 10**6)),
    )
