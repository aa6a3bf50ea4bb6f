"""Timelines as Chrome's trace events, which Perfetto and chrome://tracing open.

Every timeline is a process, every rank a track of complete events; transfers have tracks of their own next to their
rank, as they run while the rank computes. An arrow leads from each transfer to the compute that waited for it. Where
several ranks send the same, replicas or shards, the first sends to the first that needs it, the second to the second.

Format: "Trace Event Format", Google, 2016: ``ph`` X is a complete event, M metadata, s and f the start and end of a
flow; times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.core.schedule import Action, Kind, flatten
from penstock.core.timeline import Activity, Event, Timeline
from penstock.view.spans import action_of, compute_kind
from penstock.view.theme import KIND_NAMES

_TRACKS_PER_RANK: Final = 100
"""Track numbers of a rank: the first for its own events, the rest for transfers that overlap each other."""

_Key = tuple[str, int, int | None, int | None]
"""Key of a message: direction F or B, the stage it is for, micro-batch and slice."""


def trace(timelines: Sequence[Timeline]) -> str:
    """The timelines as one trace, JSON text; processes are numbered from 1 in their order."""
    events = [event for pid, timeline in enumerate(timelines, start=1) for event in _process(timeline, pid)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _process(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    step = "" if timeline.step is None else f" step {timeline.step}"
    yield _metadata("process_name", f"{timeline.source.value}{step}", pid, 0)
    tracks = _tracks(timeline)
    for rank, lane in sorted(set(tracks)):
        name = f"rank {rank}" if lane == 0 else f"rank {rank} transfers" + (f" {lane}" if lane > 1 else "")
        yield _metadata("thread_name", name, pid, _tid(rank, lane))
    for event, track in zip(timeline.events, tracks, strict=True):
        yield _complete(event, pid, _tid(*track))
    yield from _flows(timeline, tracks, pid)


def _tid(rank: int, lane: int) -> int:
    return rank * _TRACKS_PER_RANK + lane


def _tracks(timeline: Timeline) -> list[tuple[int, int]]:
    """(rank, lane) of every event: lane 0, or for a transfer the first lane that is free when it starts."""
    tracks = [(event.rank, 0) for event in timeline.events]
    free_from: dict[int, list[int]] = {}
    starts = [(e.start_ns, i) for i, e in enumerate(timeline.events) if e.activity is Activity.TRANSFER]
    for start, index in sorted(starts):
        event = timeline.events[index]
        lanes = free_from.setdefault(event.rank, [])
        lane = next((i for i, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [event.stop_ns]
        tracks[index] = (event.rank, lane + 1)
    return tracks


def _metadata(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: Event, pid: int, tid: int) -> dict[str, Any]:
    action = action_of(event.action)
    kind = compute_kind(action)
    args: dict[str, Any] = {"activity": event.activity.value}
    if action is not None:
        args |= {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice}
    if action is not None and action.children:
        fields_of_children = [
            {"stage": child.stage, "microbatch": child.microbatch, "slice": child.slice} for child in action.children
        ]
        args |= {name: [fields[name] for fields in fields_of_children] for name in fields_of_children[0]}
        args["overlapped"] = [str(child) for child in action.children]
    if event.collective_ns:
        args["waitedForShardsUs"] = event.collective_ns / 1e3
    return {
        "ph": "X",
        "name": event.action,
        "cat": KIND_NAMES[kind] if kind else event.activity.value,
        "ts": event.start_ns / 1e3,
        "dur": event.duration_ns / 1e3,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _flows(timeline: Timeline, tracks: Sequence[tuple[int, int]], pid: int) -> Iterator[dict[str, Any]]:
    users, senders = _users(timeline), _senders(timeline)
    for index, event in enumerate(timeline.events):
        key = _sent(event)
        pairs = zip(senders[key], users.get(key, ()), strict=False) if key else ()
        user = next((user for rank, user in pairs if rank == event.rank), None)
        if user is None or user.start_ns < event.stop_ns:
            continue
        # An arrow binds to the event that encloses its time, so its ends lie inside, not on the edges.
        start = (event.start_ns + event.stop_ns) / 2e3
        stop = (user.start_ns + user.stop_ns) / 2e3
        common = {"name": "message", "cat": "message", "id": f"{pid}.{index}", "pid": pid}
        yield {"ph": "s", "ts": start, "tid": _tid(*tracks[index]), **common}
        yield {"ph": "f", "bp": "e", "ts": stop, "tid": _tid(user.rank, 0), **common}


def _sent(event: Event) -> _Key | None:
    """The message of a transfer; ``1SEND_F3.2`` is for stage 2, ``1SEND_B3.2`` for stage 0."""
    action = action_of(event.action)
    if event.activity is not Activity.TRANSFER or action is None or action.kind not in (Kind.SEND_F, Kind.SEND_B):
        return None
    is_forward = action.kind is Kind.SEND_F
    target = action.stage + (1 if is_forward else -1)
    return ("F" if is_forward else "B", target, action.microbatch, action.slice)


def _senders(timeline: Timeline) -> dict[_Key, list[int]]:
    """The ranks that send each message, in order."""
    senders: dict[_Key, set[int]] = {}
    for event in timeline.events:
        if key := _sent(event):
            senders.setdefault(key, set()).add(event.rank)
    return {key: sorted(ranks) for key, ranks in senders.items()}


def _users(timeline: Timeline) -> dict[_Key, list[Event]]:
    """The first compute event of every rank that needs a message, by the message, in the order of ranks."""
    users: dict[_Key, dict[int, Event]] = {}
    for event in sorted(timeline.events, key=lambda e: e.start_ns):
        action = action_of(event.action) if event.activity is Activity.COMPUTE else None
        for part in flatten([action]) if action else ():
            key = _needed(part)
            if key:
                users.setdefault(key, {}).setdefault(event.rank, event)
    return {key: [by_rank[rank] for rank in sorted(by_rank)] for key, by_rank in users.items()}


def _needed(action: Action) -> _Key | None:
    if action.kind is Kind.F:
        return ("F", action.stage, action.microbatch, action.slice)
    if action.kind in (Kind.B, Kind.I):
        return ("B", action.stage, action.microbatch, action.slice)
    return None
