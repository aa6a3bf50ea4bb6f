"""Traces hold every event once, on tracks without overlap, with arrows from transfers to their users."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.view.trace import trace
from tests.support.sample_run import sample_schedule, sample_timeline
from tests.support.timelines import timelines

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "bp", "id", "ts", "pid", "tid"},
}


def events_of(*found: Timeline) -> list[dict[str, Any]]:
    document = json.loads(trace(found))
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def phase(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == name]


@given(st.lists(timelines(), max_size=3))
@settings(max_examples=60)
def test_events_have_the_format_s_fields(found: list[Timeline]) -> None:
    for event in events_of(*found):
        assert set(event) == REQUIRED[event["ph"]]
        assert event["pid"] in range(1, len(found) + 1)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
        else:
            assert event["ts"] >= 0


@given(timelines())
@settings(max_examples=60)
def test_every_event_is_there_once_in_microseconds(timeline: Timeline) -> None:
    drawn = [(e["name"], e["ts"], e["dur"]) for e in phase(events_of(timeline), "X")]
    assert sorted(drawn) == sorted((e.action, e.start_ns / 1e3, e.duration_ns / 1e3) for e in timeline.events)


@given(timelines())
@settings(max_examples=60)
def test_events_of_a_track_do_not_overlap_and_the_track_has_a_name(timeline: Timeline) -> None:
    events = events_of(timeline)
    named = {event["tid"] for event in phase(events, "M") if event["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in phase(events, "X"):
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) == named
    for spans in tracks.values():
        ordered = sorted(spans)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(ordered))


def test_overlapping_transfers_get_separate_tracks() -> None:
    transfers = tuple(Event(1, Activity.TRANSFER, f"1SEND_F0.{i}", 10 * i, 10 * i + 25) for i in range(4))
    events = events_of(Timeline(source=Source.SIMULATED, num_ranks=2, step_ns=100, events=transfers))
    names = [e["args"]["name"] for e in phase(events, "M")]
    assert names == ["simulated", "rank 1 transfers", "rank 1 transfers 2", "rank 1 transfers 3"]
    tids = [event["tid"] for event in phase(events, "X")]
    assert tids == [101, 102, 103, 101]


def test_every_transfer_of_a_step_has_an_arrow_to_its_user() -> None:
    timeline = sample_timeline(sample_schedule(4, 3, 2))
    events = events_of(timeline)
    starts, ends = ({e["id"]: e for e in phase(events, name)} for name in "sf")
    transfers = [event for event in timeline.events if event.activity is Activity.TRANSFER]
    assert len(starts) == len(ends) == len(transfers)
    complete = phase(events, "X")
    for key, start in starts.items():
        source = enclosing(complete, start)
        target = enclosing(complete, ends[key])
        assert source["args"]["activity"] == "transfer"
        assert target["args"]["activity"] == "compute"
        direction = 1 if "SEND_F" in source["name"] else -1
        assert target["args"]["stage"] == source["args"]["stage"] + direction
        assert [target["args"][k] for k in ("microbatch", "slice")] == [
            source["args"][k] for k in ("microbatch", "slice")
        ]
        assert source["ts"] + source["dur"] <= target["ts"]


def test_arrows_stay_among_ranks_of_the_same_replica_and_shard() -> None:
    """Two shards on each of two stages: ranks 0 and 1 send to 2 and 3."""
    sent = [Event(rank, Activity.TRANSFER, "0SEND_F0.0", 0, 5) for rank in range(2)]
    users = [Event(rank, Activity.COMPUTE, "1F0.0", 6, 9) for rank in (3, 2)]
    timeline = Timeline(source=Source.MEASURED, num_ranks=4, step_ns=9, events=(*sent, *users))
    events = events_of(timeline)
    starts, ends = ({e["id"]: e["tid"] // 100 for e in phase(events, name)} for name in "sf")
    assert sorted((starts[key], ends[key]) for key in starts) == [(0, 2), (1, 3)]


def enclosing(complete: list[dict[str, Any]], flow: dict[str, Any]) -> dict[str, Any]:
    (found,) = [e for e in complete if e["tid"] == flow["tid"] and e["ts"] <= flow["ts"] <= e["ts"] + e["dur"]]
    return found


def test_a_transfer_that_no_action_waits_for_has_no_arrow() -> None:
    alone = Event(0, Activity.TRANSFER, "0SEND_F0.0", 0, 10)
    posted = Event(1, Activity.TRANSFER, "1POST_RECV_F0.0", 0, 1)
    before = Event(1, Activity.COMPUTE, "1F0.0", 2, 5)
    timeline = Timeline(source=Source.MEASURED, num_ranks=2, step_ns=10, events=(alone, posted, before))
    assert not phase(events_of(timeline), "s")


def test_an_overlap_uses_the_inputs_of_its_children() -> None:
    sent = Event(0, Activity.TRANSFER, "0SEND_F1.0", 0, 5)
    user = Event(1, Activity.COMPUTE, "(1B0.0;1F1.0)OVERLAP_F_B", 6, 9)
    timeline = Timeline(source=Source.MEASURED, num_ranks=2, step_ns=9, events=(sent, user))
    (arrow,) = phase(events_of(timeline), "f")
    assert arrow["ts"] == 0.0075


def test_an_overlap_has_the_position_of_each_of_its_actions() -> None:
    pair = Event(1, Activity.COMPUTE, "(1B0.1;1F3.0)OVERLAP_F_B", 6, 9)
    (event,) = phase(events_of(Timeline(source=Source.MEASURED, num_ranks=2, step_ns=9, events=(pair,))), "X")
    expected = {"stage": [1, 1], "microbatch": [0, 3], "slice": [1, 0], "overlapped": ["1B0.1", "1F3.0"]}
    assert event["args"] == {"activity": "compute", **expected}


def test_processes_are_named_after_source_and_step() -> None:
    schedule = sample_schedule(2, 1, 1)
    events = events_of(sample_timeline(schedule), sample_timeline(schedule, source=Source.MEASURED))
    names = {e["pid"]: e["args"]["name"] for e in phase(events, "M") if e["name"] == "process_name"}
    assert names == {1: "simulated", 2: "measured step 120"}
    assert len({e["id"] for e in phase(events, "s")}) == len(phase(events, "s"))
    assert {e["cat"] for e in phase(events, "X")} >= {
        "forward",
        "input gradient",
        "weight gradient",
        "transfer",
        "step",
    }


def test_no_timelines_are_an_empty_trace() -> None:
    assert events_of() == []
