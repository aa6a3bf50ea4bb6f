"""The Gantt picture: valid SVG, bars where the events are, legible and bounded whatever the step."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.schedule import Action, Kind
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.view.gantt import MAX_SPANS, difference, gantt
from penstock.view.rows import Labels
from tests.support.sample_run import sample_schedule, sample_timeline
from tests.support.timelines import timelines

SVG = "{http://www.w3.org/2000/svg}"
PLOT = 1120 - 60 - 140


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def rects(root: ET.Element, *classes: str) -> list[ET.Element]:
    """The rectangles with a tooltip that have any of ``classes``."""
    return [
        rect
        for rect in root.iter(f"{SVG}rect")
        if set(classes) & set(rect.get("class", "").split()) and rect.find(f"{SVG}title") is not None
    ]


def texts(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def one_rank(*events: Event, step_ns: int = 1_000_000, source: Source = Source.SIMULATED) -> Timeline:
    return Timeline(source=source, num_ranks=1, step_ns=step_ns, events=events)


@given(st.lists(timelines(), min_size=1, max_size=3), st.sampled_from([320, 600, 1120]))
@settings(max_examples=60)
def test_any_timelines_give_valid_svg_inside_its_frame(found: list[Timeline], width: int) -> None:
    root = parse(gantt(found, width=width, title="<&>"))
    left, _, total, height = map(float, root.get("viewBox", "").split())
    assert (left, total) == (-10, width + 20)
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.get("x", "")) <= width
        assert float(rect.get("width", "")) <= width
    assert all(
        0 <= float(node.get("x", "")) <= width and float(node.get("y", "")) <= height
        for node in root.iter(f"{SVG}text")
    )


@given(timelines())
@settings(max_examples=60)
def test_a_bar_is_where_its_event_is(timeline: Timeline) -> None:
    root = parse(gantt([timeline]))
    longest = max(1, timeline.step_ns, *(event.stop_ns for event in timeline.events), 1)
    expected = sorted(
        (round(e.start_ns / longest * PLOT, 1), round(e.duration_ns / longest * PLOT, 1))
        for e in timeline.events
        if e.activity not in (Activity.WAIT, Activity.TRANSFER) and e.duration_ns / longest * PLOT >= 1.01
    )
    drawn = [(float(rect.get("x", "")), float(rect.get("width", ""))) for rect in rects(root, "bar")]
    for x, width in expected:
        assert any(abs(x - at) <= 0.06 and abs(width - wide) <= 0.06 for at, wide in drawn)


def test_rows_follow_the_ranks_and_share_one_scale() -> None:
    first = one_rank(Event(0, Activity.COMPUTE, "0F0.0", 0, 500_000))
    second = one_rank(Event(0, Activity.COMPUTE, "0F0.0", 0, 500_000), step_ns=2_000_000, source=Source.MEASURED)
    bars = rects(parse(gantt([first, second])), "f")
    assert [float(bar.get("width", "")) for bar in bars] == [PLOT / 4, PLOT / 4]


def test_two_timelines_state_their_difference() -> None:
    schedule = sample_schedule(2, 2, 4)
    predicted, measured = sample_timeline(schedule), sample_timeline(schedule, source=Source.MEASURED, noise=0.05)
    shown = texts(parse(gantt([predicted, measured])))
    assert difference(predicted, measured) in shown
    assert "Predicted" in shown
    assert "Measured, step 120" in shown
    assert len(list(parse(gantt([predicted, measured])).iter(f"{SVG}line"))) > 3


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (100_000_000, 104_000_000, "Measured 104 ms, predicted 100 ms: error −3.8%."),
        (100_000_000, 90_000_000, "Measured 90.0 ms, predicted 100 ms: error +11.1%."),
        (100_000_000, 100_010_000, "Measured 100 ms, predicted 100 ms: error −0.0%."),
        (0, 0, "Measured 0 ns, predicted 0 ns."),
    ],
)
def test_the_difference_is_a_sentence(first: int, second: int, sentence: str) -> None:
    assert difference(one_rank(step_ns=first), one_rank(step_ns=second, source=Source.MEASURED)) == sentence


def test_the_first_step_s_end_is_marked_in_the_others() -> None:
    pair = [one_rank(step_ns=1_000_000), one_rank(step_ns=2_000_000, source=Source.MEASURED)]
    (mark,) = [line for line in parse(gantt(pair)).iter(f"{SVG}line") if line.get("class") == "mark"]
    assert float(mark.get("x1", "")) == 60 + PLOT / 2
    assert mark.findtext(f"{SVG}title") == "predicted end of the step"
    assert 'class="mark"' not in gantt(pair[:1])


def test_a_small_step_names_every_slice() -> None:
    timeline = sample_timeline(sample_schedule(2, 2, 4))
    shown = texts(parse(gantt([timeline])))
    for action in (e.action for e in timeline.events if e.activity is Activity.COMPUTE):
        assert re.split(r"[FIW]", action)[1] in shown


def test_labels_have_one_form_that_depends_on_the_width() -> None:
    timeline = sample_timeline(sample_schedule(2, 4, 4))
    for width, pattern in ((2400, r"\d+\.\d+"), (1120, r"\d+")):
        root = parse(gantt([timeline], width=width))
        labels = [node.text or "" for node in root.iter(f"{SVG}text") if node.get("class") == "on"]
        assert labels
        assert all(re.fullmatch(pattern, label) for label in labels)
    assert not [n for n in parse(gantt([timeline], width=320)).iter(f"{SVG}text") if n.get("class") == "on"]


def test_the_text_of_labels() -> None:
    action = Action(Kind.F, 0, 3, 2)
    assert [labels.text(action) for labels in Labels] == ["3.2", "2", ""]
    assert Labels.FULL.text(Action(Kind.STEP, 0)) == ""


def test_the_label_of_a_pair_names_both_actions() -> None:
    pair = Event(0, Activity.COMPUTE, "(0B1.0;0F3.2)OVERLAP_F_B", 0, 1_000_000)
    assert "1.0 3.2" in texts(parse(gantt([one_rank(pair)])))


def test_micro_batches_take_turns_in_four_shades() -> None:
    events = [Event(0, Activity.COMPUTE, f"0F{m}.0", m * 100_000, (m + 1) * 100_000) for m in range(6)]
    bars = rects(parse(gantt([one_rank(*events)])), "f")
    assert [bar.get("class", "").split()[-1] for bar in bars] == ["m0", "m1", "m2", "m3", "m0", "m1"]


def test_every_span_has_a_description() -> None:
    timeline = sample_timeline(sample_schedule(2, 1, 2))
    tooltips = [node.text or "" for node in parse(gantt([timeline])).iter(f"{SVG}title")]
    for event in timeline.events:
        if event.activity is Activity.COMPUTE:
            assert any(tooltip.startswith(event.action) for tooltip in tooltips)
    assert any(re.fullmatch(r"1F0\.1 forward: [\d.]+ ms, [\d.]+ to [\d.]+ ms", tooltip) for tooltip in tooltips)


def test_gathered_bars_are_divided_by_kind() -> None:
    kinds = ("F", "I", "W", "W")
    events = [Event(0, Activity.COMPUTE, f"0{kinds[i % 4]}0.0", i * 100, i * 100 + 100) for i in range(20_000)]
    root = parse(gantt([one_rank(*events, step_ns=2_000_000)]))
    groups = [g for g in root.iter(f"{SVG}g") if (g.findtext(f"{SVG}title") or "").find(" events") > 0]
    assert groups
    heights = [[float(r.get("height", "")) for r in g.iter(f"{SVG}rect")] for g in groups]
    assert all(len(parts) == 3 and abs(sum(parts) - 38 * 0.64) < 0.05 for parts in heights)
    assert all(abs(parts[2] - 2 * parts[0]) < 5 for parts in heights)


def test_the_legend_lists_the_kinds_in_the_chart() -> None:
    shown = texts(parse(gantt([sample_timeline(sample_schedule(2, 2, 2))])))
    assert {"F forward", "I input gradient", "W weight gradient", "shade: micro-batch", "optimizer", "waiting"} <= set(
        shown
    )
    assert {"transfer of activations", "transfer of gradients"} <= set(shown)
    assert not {"B backward", "R recompute", "reduction", "other compute"} & set(shown)
    assert "F forward" not in texts(parse(gantt([one_rank()])))


def test_ticks_are_round_and_name_their_unit() -> None:
    shown = texts(parse(gantt([one_rank(step_ns=133_000_000)])))
    assert [text for text in shown if text.isdigit()] == ["0", "20", "40", "60", "80", "100", "120"]
    assert "ms" in shown


def test_peak_memory_and_busy_share_stand_next_to_their_rank() -> None:
    timeline = dataclasses.replace(one_rank(Event(0, Activity.COMPUTE, "0F0.0", 0, 250_000)), peak_bytes=(3 * 2**29,))
    shown = texts(parse(gantt([timeline])))
    assert {"1.5 GiB", "25% busy", "peak memory", "rank 0"} <= set(shown)
    narrow = texts(parse(gantt([timeline], width=320)))
    assert {"1.5 GiB", "peak", "0"} <= set(narrow)
    assert "25% busy" not in narrow


def test_words_from_data_are_escaped() -> None:
    hostile = Event(0, Activity.COMPUTE, '</title><script>alert("x")</script>', 0, 500_000)
    picture = gantt([one_rank(hostile)], title="<b>&")
    assert "<script" not in picture
    assert "<b>" not in picture
    assert parse(picture).find(f".//{SVG}script") is None


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_slices"), [(16, 17, 8), (64, 8, 4)])
def test_long_steps_stay_small(num_ranks: int, num_microbatches: int, num_slices: int) -> None:
    timeline = sample_timeline(sample_schedule(num_ranks, num_microbatches, num_slices))
    picture = gantt([timeline, dataclasses.replace(timeline, source=Source.MEASURED)])
    assert len(picture) < 2_000_000
    assert picture.count("<rect") < MAX_SPANS + 1_000


def test_dense_rows_name_only_some_ranks() -> None:
    many = Timeline(source=Source.SIMULATED, num_ranks=256, step_ns=1000, events=())
    names = [text for text in texts(parse(gantt([many]))) if text.startswith("rank")]
    assert names[:2] == ["rank 0", "rank 3"]
    assert float(parse(gantt([many])).get("height", "")) < 2_000


def test_a_predicted_row_names_all_ranks_that_it_stands_for() -> None:
    """Measured steps have a row for each of them."""
    predicted = Timeline(source=Source.SIMULATED, num_ranks=2, step_ns=1000, events=())
    measured = dataclasses.replace(predicted, source=Source.MEASURED, num_ranks=8)
    names = [text for text in texts(parse(gantt([predicted, measured], tp=4))) if text.startswith("rank")]
    assert names == ["ranks 0–3", "ranks 4–7", *(f"rank {rank}" for rank in range(8))]
    assert {"0", "4"} <= set(texts(parse(gantt([predicted], width=320, tp=4))))


def test_no_script_no_reference_no_clock() -> None:
    timeline = sample_timeline(sample_schedule(2, 2, 2))
    picture = gantt([timeline])
    assert picture == gantt([timeline])
    assert "href" not in picture
    assert "url(" not in picture
    assert picture.count("http") == 1
    assert "prefers-color-scheme:dark" in picture


def test_the_chart_has_an_accessible_name() -> None:
    root = parse(gantt([one_rank(step_ns=5_000_000)]))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Predicted step on 1 rank: 5.00 ms, bubble 100.0 % on every rank."


def test_an_empty_timeline_is_an_error() -> None:
    with pytest.raises(ValueError, match="no timeline"):
        gantt([])
