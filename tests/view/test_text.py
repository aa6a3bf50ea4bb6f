"""Terminal pictures: never wider than asked, in step with time, readable back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.schedule import Schedule, parse_schedule
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.view.text import gantt_text, schedule_text
from tests.support.sample_run import sample_schedule, sample_timeline
from tests.support.timelines import timelines


def bars(text: str) -> list[str]:
    return [line.split("│", 1)[1] for line in text.splitlines() if "│" in line]


@given(timelines(), st.integers(1, 200))
@settings(max_examples=60)
def test_no_line_is_wider_than_asked(timeline: Timeline, width: int) -> None:
    text = gantt_text(timeline, width)
    assert all(len(line) <= max(24, width) for line in text.splitlines())
    assert len(bars(text)) == timeline.num_ranks


@given(timelines())
@settings(max_examples=60)
def test_shading_has_the_share_of_the_time(timeline: Timeline) -> None:
    longest = max(1, timeline.step_ns, *(event.stop_ns for event in timeline.events), 1)
    for rank, line in enumerate(bars(gantt_text(timeline, 200))):
        own = [e for e in timeline.events if e.rank == rank and e.activity is not Activity.TRANSFER]
        filled = sum(character != " " for character in line)
        assert abs(filled - 193 * sum(e.duration_ns for e in own) / longest) <= 1 + 2 * len(own)


def test_every_kind_has_a_different_shading() -> None:
    names = ("0F0.0", "0B0.0", "0W0.0", "0R0.0")
    events = [Event(0, Activity.COMPUTE, name, 10 * i, 10 * i + 10) for i, name in enumerate(names)]
    others = (Activity.WAIT, Activity.REDUCE, Activity.STEP)
    events.extend(Event(0, activity, "0STEP", 40 + 10 * i, 50 + 10 * i) for i, activity in enumerate(others))
    timeline = Timeline(source=Source.SIMULATED, num_ranks=1, step_ns=70, events=tuple(events))
    text = gantt_text(timeline, 77)
    (line,) = bars(text)
    assert line == "F0.0██████B0.0▓▓▓▓▓▓W0.0▒▒▒▒▒▒R0.0░░░░░░··········==========##########"
    assert text.splitlines()[1] == "recompute: 10.0 ns per rank  0.0 % of it hidden"
    assert text.splitlines()[4:] == [
        "F█ forward  B▓ backward  W▒ weight gradient  R░ recompute  · waiting",
        "= reduction  # optimizer",
    ]


def test_hidden_recomputation_is_stated_in_the_heading() -> None:
    events = (
        Event(0, Activity.COMPUTE, "0F0.0", 0, 10),
        Event(1, Activity.COMPUTE, "1F0.0", 10, 20),
        Event(1, Activity.COMPUTE, "1B0.0", 20, 40),
        Event(0, Activity.COMPUTE, "0R0.0", 10, 50),
        Event(0, Activity.COMPUTE, "0B0.0", 50, 70),
    )
    timeline = Timeline(source=Source.SIMULATED, num_ranks=2, step_ns=70, events=events)
    assert gantt_text(timeline, 77).splitlines()[1] == "recompute: 20.0 ns per rank  75.0 % of it hidden"
    assert "recompute" not in gantt_text(replace(timeline, events=events[:3]), 77)


def test_a_pair_is_drawn_as_both_of_its_actions() -> None:
    pair = Event(0, Activity.COMPUTE, "(0B1.0;0F3.0)OVERLAP_F_B", 0, 60)
    after = Event(0, Activity.COMPUTE, "0B2.0", 60, 70)
    text = gantt_text(Timeline(source=Source.SIMULATED, num_ranks=1, step_ns=70, events=(pair, after)), 77)
    assert bars(text) == ["B1.0" + 26 * "▓" + "F3.0" + 26 * "█" + "B2.0" + 6 * "▓"]
    assert text.splitlines()[3:] == ["F█ forward  B▓ backward"]


def test_names_have_one_form_that_fits_most_bars() -> None:
    timeline = sample_timeline(sample_schedule(2, 1, 2))
    wide, middle, narrow = ("".join(bars(gantt_text(timeline, width))) for width in (160, 60, 24))
    assert "F0.1" in wide
    assert re.search(r"F█", middle)
    assert not re.search(r"\d", middle)
    assert not re.search(r"[A-Z]", narrow)


def test_the_heading_states_source_length_and_bubble() -> None:
    timeline = Timeline(source=Source.REHEARSED, num_ranks=1, step_ns=2_000_000, events=())
    lines = gantt_text(timeline, 60).splitlines()
    assert lines[0] == "rehearsed: 2.00 ms, bubble 100.0 % on every rank"
    assert lines[1] == "rank 0│"
    assert lines[2].startswith("      └0 ms")


def test_an_idle_rank_and_an_unknown_action_are_drawn() -> None:
    odd = Event(1, Activity.COMPUTE, "something else", 0, 100)
    timeline = Timeline(source=Source.MEASURED, num_ranks=2, step_ns=100, events=(odd,))
    idle, busy = bars(gantt_text(timeline, 30))
    assert idle == ""
    assert set(busy) == {"█"}


@pytest.mark.parametrize("width", [20, 60, 100, 10_000])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (12, 2, 2)])
def test_a_grid_reads_back_as_the_schedule(shape: tuple[int, int, int], width: int) -> None:
    schedule = sample_schedule(*shape)
    text = schedule_text(schedule, width)
    rows: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        header, *lines = block.splitlines()
        assert header.startswith("step")
        for line in lines:
            name, *cells = re.split(r" {2,}", line)
            rows.setdefault(name, []).extend(cells)
    assert list(rows) == [f"rank {rank}" for rank in range(shape[0])]
    parsed, _ = parse_schedule("\n".join(",".join(cells) for cells in rows.values()))
    assert parsed.ranks == schedule.ranks
    assert all(len(line) <= max(width, 20) for line in text.splitlines())


def test_steps_stand_above_their_cells() -> None:
    lines = schedule_text(sample_schedule(2, 1, 2, split=False)).splitlines()
    assert lines == [
        "step    0      1      2      3",
        "rank 0  0F0.0  0F0.1  0B0.1  0B0.0",
        "rank 1  1F0.0  1F0.1  1B0.1  1B0.0",
    ]


def test_ranks_without_actions_keep_their_line() -> None:
    empty = Schedule(ranks=((), ()), num_stages=1, num_microbatches=1, num_slices=1)
    assert schedule_text(empty) == ""
