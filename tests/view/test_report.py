"""The report: complete, in order, self-contained, safe with any data, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from penstock.core.bubble import Lost
from penstock.core.comparison import RankMemory
from penstock.core.curves import RunCurves, curves_of
from penstock.core.layout import Operation
from penstock.core.model import UnitKind
from penstock.core.plan import slices_text
from penstock.core.remaking import Remake
from penstock.core.speed import format_rate
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.core.units import to_seconds
from penstock.view.data import ReportData, Sample
from penstock.view.markup import Markup
from penstock.view.page import POLICY, json_in_html, page, plotly_javascript
from penstock.view.report import (
    measured_peak_bytes,
    measured_step_seconds,
    predicted_peak_bytes,
    predicted_step_seconds,
    report,
)
from penstock.view.report_plan import compute_difference, model_text, plan_facts
from tests.support.sample_report import sample_report
from tests.support.sample_run import MIB, explained_plan, sample_metrics, sample_plan

VOID = {"meta", "br"}
TITLES = [
    "The plan",
    "Why this plan",
    "One step, predicted and measured",
    "Loss and speed",
    "Memory",
    "Cost model",
    "What the model writes",
    "Machine and versions",
    "Do it again",
]
EMPTY = ReportData(job="empty", phase="Failed", command="penstock run job.yaml")


class Page(HTMLParser):
    """Collects what the tests ask about, and insists that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend((tag, name, value or "") for name, value in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend((tag, name, value or "") for name, value in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append((self.open[-1], data))

    def texts(self, tag: str) -> list[str]:
        return [words for name, words in self.words if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return report(sample_report())


@pytest.fixture(scope="module")
def full(text: str) -> Page:
    return Page(text)


def without_plotly(text: str) -> str:
    return text.replace(plotly_javascript(), "")


def figures_of(text: str) -> dict[str, dict[str, object]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert found
    figures: dict[str, dict[str, object]] = json.loads(found[1])["figures"]
    return figures


def test_sections_come_in_order(full: Page) -> None:
    assert full.texts("h1") == ["stdlib-llama"]
    assert full.texts("h2") == TITLES
    assert "Succeeded" in full.texts("span")


def test_the_navigation_leads_to_every_section(full: Page) -> None:
    anchors = {value for tag, name, value in full.attributes if tag == "section" and name == "id"}
    links = [value.removeprefix("#") for tag, name, value in full.attributes if tag == "a" and name == "href"]
    assert len(links) == len(TITLES)
    assert set(links) == anchors


def test_the_headline_compares_prediction_and_measurement(full: Page) -> None:
    shown = full.texts("dd")
    assert f"{sample_metrics()[-1].loss:.3f}" in shown
    assert any(re.fullmatch(r"predicted 231 ms, error −3\.\d%", words) for words in shown)
    assert any(re.fullmatch(r"predicted 485 MiB, error −1\.4%", words) for words in shown)
    assert "tokens/s" in full.texts("small")


def test_a_report_loads_no_external_resource(text: str, full: Page) -> None:
    rest = without_plotly(text)
    assert len(rest) < 400_000
    references = [
        (tag, name, value) for tag, name, value in full.attributes if name in ("src", "href", "srcset", "data")
    ]
    assert all(tag == "a" and value.startswith("#") for tag, _, value in references)
    assert "url(" not in rest
    assert "@import" not in rest
    outside = set(re.findall(r"https?://[^\s\"'<>]+", rest))
    assert outside == {"http://www.w3.org/2000/svg"}
    policy = [value for tag, name, value in full.attributes if tag == "meta" and name == "content"]
    assert POLICY in policy
    assert "default-src 'none'" in POLICY


def test_plotly_is_there_once(text: str) -> None:
    assert text.count(plotly_javascript()) == 1
    assert 4_000_000 < len(plotly_javascript()) < 8_000_000
    assert "</script" not in plotly_javascript().lower()


def test_every_place_has_its_figure_and_every_figure_a_place(text: str, full: Page) -> None:
    places = [value for _, name, value in full.attributes if name == "data-figure"]
    figures = figures_of(text)
    assert sorted(places) == sorted(figures)
    assert len(places) == 8
    for figure in figures.values():
        go.Figure(figure)


def test_pictures_are_there_for_wide_and_narrow_screens(full: Page) -> None:
    labels = [value for tag, name, value in full.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == 4
    assert labels[0] == labels[1] == "2 stages by 4 slices of 1024 tokens"
    assert labels[2] == labels[3]
    assert "Measured step on 2 ranks" in labels[2]


def test_the_plan_is_explained(full: Page) -> None:
    cells = full.texts("td")
    plan = sample_plan()
    assert all(reason in full.texts("li") for reason in plan.reasons)
    timed = [a for a in plan.alternatives if a.step_seconds is not None]
    for place, alternative in enumerate(sorted(timed, key=lambda a: a.step_seconds or 0.0)):
        assert (alternative.reason in cells) is (place < 5)
    assert all(a.reason in cells for a in plan.alternatives if a.step_seconds is None)
    assert {"chosen", "+1.2%", "4.71 GiB"} <= set(cells)


def test_recomputation_is_shown_by_stage_and_by_rank_if_there_is_any() -> None:
    """In the predicted step, rank 0 recomputes for 40 ns, of which a gradient hides 30 ns."""
    data = sample_report()
    assert data.plan is not None
    assert "ecomputation" not in report(data)
    norms = Remake(unit=UnitKind.MLP, count=1, operations=(Operation.NORM,))
    plan = dataclasses.replace(data.plan, recompute=((norms,), *[()] * (len(data.plan.stages) - 1)))
    events = (
        Event(0, Activity.COMPUTE, "0F0.0", 0, 10),
        Event(1, Activity.COMPUTE, "1F0.0", 10, 20),
        Event(1, Activity.COMPUTE, "1B0.0", 20, 40),
        Event(0, Activity.COMPUTE, "0R0.0", 10, 50),
        Event(0, Activity.COMPUTE, "0B0.0", 50, 70),
    )
    steps = [
        Timeline(source=each, num_ranks=2, step_ns=70, events=events) for each in (Source.SIMULATED, Source.MEASURED)
    ]
    drawn = dataclasses.replace(data, predicted=steps[0], measured=steps[1])
    for tp, name in ((1, "rank 0"), (2, "ranks 0–1")):
        changed = dataclasses.replace(plan, tp=tp, placement=())
        words = [text for _, text in Page(report(dataclasses.replace(drawn, plan=changed))).words]
        headers = ["stage", "recomputes before its backwards"]
        place = words.index("Recomputation by stage") + 1
        assert words[place : place + 4] == [*headers, f"stage 0, {name}", "norms of 1 of 4 MLPs"]
        place = words.index("predicted, all ranks") + 1
        assert words[place : place + 5] == ["40.0 ns", "30.0 ns", "10.0 ns", "75.0%", f"predicted, {name}"]
        place = words.index("measured, rank 0") + 1
        assert words[place : place + 4] == ["40.0 ns", "30.0 ns", "10.0 ns", "75.0%"]


def test_the_plan_section_states_when_receives_are_posted() -> None:
    plan = dataclasses.replace(sample_plan(), receive_ahead=4)
    late = dataclasses.replace(plan, late_receives=True)
    assert "posted late" not in plan_facts(plan)
    assert "4, posted late" in plan_facts(late)


def test_long_lists_of_rejected_plans_are_cut() -> None:
    data = sample_report()
    assert data.plan is not None
    rejected = tuple(a for a in data.plan.alternatives if a.step_seconds is None) * 10
    shown = Page(report(dataclasses.replace(data, plan=dataclasses.replace(data.plan, alternatives=rejected))))
    assert shown.texts("td").count(rejected[0].reason) == 6
    assert "and 8 more" in shown.texts("p")
    assert "The next best plans" not in shown.texts("h3")


def test_the_parts_of_a_step_are_listed(full: Page) -> None:
    cells = full.texts("td")
    assert {"206 ms", "89.4%", "9.9 ms", "4.3%", "8.2 ms"} <= set(cells)
    flexes = [float(value.split("flex:")[1].split(";")[0]) for tag, name, value in full.attributes if tag == "i"]
    assert sum(flexes) == pytest.approx(1.0, abs=0.01)


def test_a_doubtful_prediction_is_marked_where_it_is_shown() -> None:
    data = sample_report()
    assert data.plan is not None
    assert data.plan.prediction is not None
    doubtful = dataclasses.replace(data.plan.prediction, low_seconds=0.125, high_seconds=0.5, warnings=("it was busy",))
    shown = Page(report(dataclasses.replace(data, plan=dataclasses.replace(data.plan, prediction=doubtful))))
    assert {"125 ms", "500 ms"} <= set(shown.texts("td"))
    assert "Warning: it was busy." in shown.texts("p")


def test_waiting_is_shown_for_all_ranks() -> None:
    data = sample_report()
    assert data.plan is not None
    assert data.plan.prediction is not None
    prediction = dataclasses.replace(
        data.plan.prediction,
        waiting=Lost(mean=0.05, worst=0.1, rank=1),
        bubble=Lost(mean=0.2, worst=0.3, rank=1),
    )
    shown = Page(report(dataclasses.replace(data, plan=dataclasses.replace(data.plan, prediction=prediction))))
    assert "Waiting for other ranks, over all ranks: 5.0 % on average, 10.0 % on rank 1." in shown.texts("p")
    assert "Bubble: 20.0 % on average, 30.0 % on rank 1." in shown.texts("p")


def test_the_parts_are_shown_over_all_ranks_where_they_are_known(full: Page) -> None:
    shown = Page(report(dataclasses.replace(sample_report(), plan=explained_plan())))
    assert {"86.0%", "89.4%", "7.0%", "9.0%", "2.5%"} <= set(shown.texts("td"))
    assert {"mean", "most"} <= set(shown.texts("th"))
    assert "mean" not in full.texts("th")


def test_variations_state_how_they_were_computed(full: Page) -> None:
    shown = Page(report(dataclasses.replace(sample_report(), plan=explained_plan())))
    cells = shown.texts("td")
    assert "What would help" in shown.texts("h3")
    assert {"one node more, 4 devices", "112 ms", "9,143", "41.0 %", "+2.9%"} <= set(cells)
    assert "new search: dp 1 x tp 1 x pp 4, 4 micro-batches of 1, 4 slices, zb" in cells
    assert "same plan simulated" in cells
    assert "nothing fits in 4 GiB" in cells
    assert "What would help" not in full.texts("h3")


def test_trials_are_shown_with_the_one_that_was_kept(full: Page) -> None:
    shown = Page(report(dataclasses.replace(sample_report(), plan=explained_plan())))
    cells = shown.texts("td")
    assert {"zb, 4 slices", "240 ms", "250 ms", "−4.0%", "kept", "failed: rank 1 was killed"} <= set(cells)
    assert {"8,192", "37.0 %"} <= set(cells), "the speed of the measured step"
    assert "Plans that were run before one was kept" not in full.texts("h3")


def test_speed_is_per_device_and_as_a_share_of_a_known_peak(full: Page) -> None:
    plan = explained_plan()
    data = dataclasses.replace(sample_report(), plan=plan)
    measured = plan.speed(measured_step_seconds(data))
    assert measured is not None
    shown = Page(report(data))
    per_device = f"{measured.tokens_per_second_per_device:,.0f} per device"
    assert any(
        text.startswith(f"{per_device}, MFU {measured.utilization_text}, median of") for text in shown.texts("dd")
    )
    assert any(text.startswith(f"{per_device}, median of") for text in full.texts("dd"))
    predicted = plan.speed()
    assert predicted is not None
    assert any(text.startswith(f"Speed: {predicted.text}. MFU counts the model's FLOPs") for text in shown.texts("p"))
    assert any(re.fullmatch(r"Speed: [\d,]+ tokens/s per device\.", text) for text in full.texts("p"))


def rows_below(text: str, header: str) -> list[list[str]]:
    """Headers and rows of the first table with that header."""
    found = re.findall(r"<table.*?</table>", text, re.DOTALL)
    listed = next(each for each in found if f">{header}</th>" in each)
    rows = re.findall(r"<tr.*?</tr>", listed, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


def test_every_alternative_has_a_speed_next_to_its_step_time() -> None:
    plan = explained_plan()
    shown = report(dataclasses.replace(sample_report(), plan=plan))
    headers, chosen, *others = rows_below(shown, "why not")
    assert headers == ["plan", "step", "tokens/s per device", "MFU", "slower", "peak memory", "why not"]
    timed = sorted(
        (each for each in plan.alternatives if each.step_seconds is not None), key=lambda each: each.step_seconds or 0.0
    )
    speeds = [plan.speed(), *(each.speed for each in timed[:5])]
    assert [(row[2], row[3]) for row in (chosen, *others)] == [
        (format_rate(each.tokens_per_second_per_device), each.utilization_text) for each in speeds if each is not None
    ]
    cpu = dataclasses.replace(sample_report(), plan=sample_plan())
    headers, *_ = rows_below(report(cpu), "why not")
    assert headers == ["plan", "step", "tokens/s per device", "slower", "peak memory", "why not"], "no peak, no MFU"


def test_the_drawn_steps_have_their_speeds_in_words(full: Page) -> None:
    data = dataclasses.replace(sample_report(), plan=explained_plan())
    assert data.plan is not None
    assert data.predicted is not None
    assert data.measured is not None
    predicted, measured = (data.plan.speed(to_seconds(each.step_ns)) for each in (data.predicted, data.measured))
    assert predicted is not None
    assert measured is not None
    shown = Page(report(data))
    assert any(f"Predicted: {predicted.text}. Measured: {measured.text}." in text for text in shown.texts("p"))
    usual = data.plan.speed(measured_step_seconds(data))
    assert usual is not None
    assert any(usual.text in text for text in shown.texts("figcaption")), "below the time of every step"
    assert not any("MFU" in text for text in (*full.texts("p"), *full.texts("figcaption"), *full.texts("th")))


def test_a_run_without_steps_shows_the_prediction() -> None:
    plan = explained_plan()
    speed = plan.speed()
    assert speed is not None
    shown = Page(report(dataclasses.replace(EMPTY, plan=plan)))
    per_device = f"{format_rate(speed.tokens_per_second_per_device)} per device, MFU {speed.utilization_text}"
    assert f"predicted {per_device}; not measured" in shown.texts("dd")


def test_the_end_names_machine_versions_and_command(full: Page) -> None:
    assert {"build-7", "2.14.1+cpu", "0.22.1", "gloo, torch 2.14.1+cpu"} <= set(full.texts("td"))
    assert full.texts("pre")[-1] == sample_report().command
    assert any(sample_plan().digest[:16] in words for words in full.texts("p"))


def test_sampled_text_shows_its_prompt_once(full: Page) -> None:
    assert full.texts("b")[-2:] == ["def ", "class "]
    assert any(words.startswith("_get_value(self") for words in full.texts("pre"))


def test_an_empty_run_states_what_is_missing_and_why() -> None:
    text = report(EMPTY)
    shown = Page(text)
    assert shown.texts("h2") == TITLES
    left_out = [words for words in shown.texts("p") if words.startswith("Left out: ")]
    assert len(left_out) == len(TITLES) - 1
    assert len(set(left_out)) == len(left_out)
    assert all(sentence.endswith(".") for sentence in left_out)
    assert "<script" not in text
    assert "no step was reported" in shown.texts("dd")
    assert [value for tag, name, value in shown.attributes if tag == "a" and name == "href"] == ["#reproduce"]


MISSING = {
    "plan": ({"plan": None}, ["this run has no plan", "there is no plan to explain"]),
    "metrics": ({"run": RunCurves()}, ["no step of this run was reported"]),
    "memory": ({"memory": ()}, ["no prediction of the ranks' memory"]),
    "fit": ({"fit": (), "profile": None}, ["planned without a measured profile"]),
    "samples": ({"samples": ()}, ["no text was sampled"]),
    "machine": ({"profile": None, "versions": ()}, ["neither a profile nor a list of versions"]),
    "timelines": ({"predicted": None, "measured": None}, ["neither a prediction nor a recorded step"]),
}


@pytest.mark.parametrize("name", MISSING)
def test_each_missing_part_leaves_out_only_its_section(name: str) -> None:
    change, reasons = MISSING[name]
    shown = Page(report(dataclasses.replace(sample_report(), **change)))  # type: ignore[arg-type]
    assert shown.texts("h2") == TITLES
    left_out = [words for words in shown.texts("p") if words.startswith("Left out: ")]
    assert len(left_out) == len(reasons)
    assert all(any(reason in words for words in left_out) for reason in reasons)


def test_a_plan_written_by_hand_has_no_reasons_to_show() -> None:
    data = sample_report()
    assert data.plan is not None
    plan = dataclasses.replace(data.plan, reasons=(), prediction=None, alternatives=())
    shown = Page(report(dataclasses.replace(data, plan=plan)))
    (sentence,) = [words for words in shown.texts("p") if words.startswith("Left out: ")]
    assert "the plan carries no reasons" in sentence


def test_a_single_timeline_is_drawn_with_an_explanation() -> None:
    data = sample_report()
    alone = Page(report(dataclasses.replace(data, measured=None)))
    assert any("only the prediction is shown" in words for words in alone.texts("p"))
    other = Page(report(dataclasses.replace(data, predicted=None)))
    assert any("only the recorded step is shown" in words for words in other.texts("p"))


def test_links_without_a_fit_and_a_fit_without_links_are_shown() -> None:
    data = sample_report()
    assert data.profile is not None
    assert set(figures_of(report(dataclasses.replace(data, fit=())))) >= {"links"}
    bare = dataclasses.replace(data, profile=dataclasses.replace(data.profile, links=()))
    assert "links" not in figures_of(report(bare))


HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&\x00\ud800"


def test_markup_in_data_is_escaped() -> None:
    data = sample_report()
    assert data.plan is not None
    assert data.profile is not None
    alternative = dataclasses.replace(data.plan.alternatives[0], label=HOSTILE, reason=HOSTILE)
    plan = dataclasses.replace(data.plan, reasons=(HOSTILE,), alternatives=(alternative,))
    key = dataclasses.replace(data.profile.key, host=HOSTILE, device=HOSTILE)
    hostile = dataclasses.replace(
        data,
        job=HOSTILE,
        phase=HOSTILE,
        command=HOSTILE,
        plan=plan,
        profile=dataclasses.replace(data.profile, key=key, method=HOSTILE),
        samples=(Sample(prompt=HOSTILE, text=HOSTILE + HOSTILE),),
        versions=((HOSTILE, HOSTILE),),
    )
    shown = Page(report(hostile))
    tags = {tag for tag, _, _ in shown.attributes}
    assert "img" not in tags
    assert not any(name.startswith("on") for _, name, _ in shown.attributes)
    assert len(shown.scripts) == 3
    assert any("alert('x')" in words for words in shown.texts("h1"))


def test_json_cannot_leave_its_script() -> None:
    value = {"name": "</script><!--", "html": "<b>&</b>"}
    text = json_in_html(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON compliant"):
        json_in_html({"loss": float("nan")})


def test_a_diverged_run_still_has_a_report() -> None:
    data = sample_report()
    bad = tuple(
        dataclasses.replace(m, loss=float("nan"), gradient_norm=float("inf"), validation_loss=None)
        if m.step > 90
        else m
        for m in sample_metrics()
    )
    shown = Page(report(dataclasses.replace(data, run=curves_of(bad))))
    assert "nan" in shown.texts("dd")


def test_a_page_without_figures_has_no_script() -> None:
    text = page("a <title>", Markup("<p>text</p>"), {})
    assert "<script" not in text
    assert "a &lt;title&gt;" in text


def test_the_headline_s_numbers_fall_back_to_the_timelines() -> None:
    data = sample_report()
    assert data.predicted is not None
    assert data.measured is not None
    assert data.plan is not None
    assert data.plan.prediction is not None
    plain = dataclasses.replace(data, run=RunCurves(), memory=(), plan=dataclasses.replace(data.plan, prediction=None))
    assert measured_step_seconds(plain) == data.measured.step_ns / 1e9
    assert predicted_step_seconds(plain) == data.predicted.step_ns / 1e9
    assert measured_peak_bytes(plain) is None
    assert predicted_peak_bytes(plain) is None
    assert predicted_peak_bytes(dataclasses.replace(data, memory=())) == max(data.plan.prediction.peak_bytes)
    assert measured_peak_bytes(dataclasses.replace(data, memory=())) == sample_metrics()[0].peak_bytes
    assert predicted_step_seconds(data) == data.plan.prediction.step_seconds


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"run": RunCurves(), "measured": None}, "predicted 231 ms; not measured"),
        ({"run": RunCurves(), "memory": ()}, "predicted 485 MiB; not measured"),
        ({"plan": None, "predicted": None}, "no prediction"),
    ],
)
def test_a_tile_states_which_value_is_missing(change: dict[str, object], note: str) -> None:
    shown = Page(report(dataclasses.replace(sample_report(), **change)))  # type: ignore[arg-type]
    assert note in shown.texts("dd")


def test_memory_adds_up() -> None:
    memory = RankMemory(constant_bytes=4 * MIB, state_bytes=3 * MIB, slot_bytes=2 * MIB, transient_bytes=MIB)
    assert memory.predicted_bytes == 10 * MIB


@pytest.mark.parametrize(
    ("slices", "text"), [((64,), "64"), ((64, 64, 32), "2×64, 32"), ((8, 16, 16, 16, 8), "8, 3×16, 8")]
)
def test_equal_slices_are_counted(slices: tuple[int, ...], text: str) -> None:
    assert slices_text(slices) == text


def test_the_model_is_a_sentence() -> None:
    plan = sample_plan()
    assert model_text(plan) == (
        "A llama of 8 layers, width 256, 8.0 million parameters, trained on 2 ranks with sequences of 1,024 tokens."
    )


def test_the_difference_by_part_of_the_step() -> None:
    data = sample_report()
    assert data.predicted is not None
    slower = dataclasses.replace(data.predicted, source=Source.MEASURED, step_ns=data.predicted.step_ns + 50_000_000)
    assert compute_difference(data.predicted, slower) == (
        "Per rank, computing took 207 ms where 207 ms was predicted, "
        "everything else 73.8 ms where 23.8 ms was predicted. "
        "Bubble: 26.3 % on average, 28.5 % on rank 0; predicted 10.3 % on average, 12.9 % on rank 0."
    )


def test_the_validation_loss_of_a_running_run_is_not_called_final() -> None:
    shown = Page(report(dataclasses.replace(sample_report(), phase="Running")))
    validation = next(text for text in shown.texts("p") if "Validation" in text)
    assert re.search(r"Validation loss is \d\.\d{3} at step [\d,]+; knowing", validation)
    assert "ended" not in validation
