"""The report of a run: one HTML file that needs nothing else.

Its sections, in order: result, plan and its reasons, predicted and measured step, training curves, memory and costs
against their prediction, text that the model generated, and how to repeat the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.core.comparison import prediction_error
from penstock.core.lifecycle import Phase
from penstock.core.speed import Speed, format_rate
from penstock.core.units import format_bytes, to_seconds
from penstock.view.axis import signed, time_unit
from penstock.view.charts import Figure
from penstock.view.data import ReportData
from penstock.view.markup import Markup, element, join
from penstock.view.page import page
from penstock.view.report_plan import model_text, plan_section, step_section, why_section
from penstock.view.report_run import (
    command_section,
    fit_section,
    loss_section,
    machine_section,
    memory_section,
    samples_section,
)
from penstock.view.tables import phase_badge

SUCCEEDED, RUNNING = Phase.SUCCEEDED.value, Phase.RUNNING.value

_SECTIONS: Final = (
    plan_section,
    why_section,
    step_section,
    loss_section,
    memory_section,
    fit_section,
    samples_section,
    machine_section,
    command_section,
)


def report(data: ReportData) -> str:
    """``data`` as one self-contained HTML document (plotly's JavaScript inlined once, about 5 MB, no network)."""
    sections = [make(data) for make in _SECTIONS]
    figures: dict[str, Figure] = {name: figure for section in sections for name, figure in section.figures.items()}
    links = (element("a", s.title, href=f"#{s.anchor}") for s in sections if not s.is_missing)
    body = join(
        (
            element("header", *_headline(data), element("nav", *links, aria_label="Sections")),
            element("main", *(section.markup for section in sections)),
            element("footer", "Everything shown is inside this file. Point at a bar or a mark for its numbers."),
        ),
        Markup("\n"),
    )
    return page(f"{data.job}: penstock report", body, figures)


def _headline(data: ReportData) -> list[Markup]:
    phase = phase_badge(data.phase)
    parts = [
        element("p", "penstock report", class_="brand"),
        element("div", element("h1", data.job), phase, class_="title"),
    ]
    if data.plan:
        parts.append(element("p", model_text(data.plan), class_="lead"))
    return [*parts, figures_of_merit(data)]


def figures_of_merit(data: ReportData) -> Markup:
    """Loss, throughput, step time and memory at a glance."""
    tiles = (_loss(data), _speed(data), _step(data), _memory(data))
    return element("dl", *(tile.markup for tile in tiles), class_="figures-of-merit")


@dataclass(frozen=True, slots=True)
class _Tile:
    """One number of the headline, its unit, and the line below it."""

    name: str
    value: str
    unit: str
    note: str

    @property
    def markup(self) -> Markup:
        number = element("dd", self.value, *((element("small", self.unit),) if self.unit else ()), class_="value")
        return element("div", element("dt", self.name), number, element("dd", self.note, class_="detail"))


def _loss(data: ReportData) -> _Tile:
    last = data.run.last("loss")
    name = "Final loss" if data.phase == SUCCEEDED else "Loss so far" if data.phase == RUNNING else "Last loss"
    if last is None:
        return _Tile(name, "–", "", "no step was reported")
    validated = data.run.last("validation_loss")
    note = f"validation {validated.value:.3f}" if validated else f"at step {last.step:,}"
    if validated and data.unigram_loss is not None:
        note += f", unigram {data.unigram_loss:.3f}"
    return _Tile(name, f"{last.value:.3f}", "nats per token", note)


def _speed(data: ReportData) -> _Tile:
    usual, predicted_speed = data.run.tokens_per_second, data.plan.speed() if data.plan else None
    if usual is None:
        note = (
            "no step was reported"
            if predicted_speed is None
            else f"predicted {_per_device(predicted_speed)}; not measured"
        )
        return _Tile("Throughput", "–", "", note)
    seconds = measured_step_seconds(data)
    speed = data.plan.speed(seconds) if data.plan and seconds else None
    if speed is None:
        return _Tile("Throughput", f"{usual.value:,.0f}", "tokens/s", usual.origin)
    predicted = "" if predicted_speed is None else f"; predicted {_per_device(predicted_speed)}"
    return _Tile("Throughput", f"{usual.value:,.0f}", "tokens/s", f"{_per_device(speed)}, {usual.origin}{predicted}")


def _per_device(speed: Speed) -> str:
    share = f", MFU {speed.utilization_text}" if speed.utilization_text else ""
    return f"{format_rate(speed.tokens_per_second_per_device)} per device{share}"


def _step(data: ReportData) -> _Tile:
    measured, predicted = measured_step_seconds(data), predicted_step_seconds(data)
    if measured is None:
        note = "not measured" if predicted is None else f"predicted {_milliseconds(predicted)}; not measured"
        return _Tile("Step time", "–", "", note)
    value, unit = _milliseconds(measured).split(" ")
    if predicted is None:
        return _Tile("Step time", value, unit, "no prediction")
    return _Tile("Step time", value, unit, _against(_milliseconds(predicted), predicted, measured))


def _memory(data: ReportData) -> _Tile:
    measured, predicted = measured_peak_bytes(data), predicted_peak_bytes(data)
    if measured is None:
        note = "not measured" if predicted is None else f"predicted {format_bytes(predicted)}; not measured"
        return _Tile("Peak memory", "–", "", note)
    value, unit = format_bytes(measured).split(" ")
    if predicted is None:
        return _Tile("Peak memory", value, unit, "no prediction")
    return _Tile("Peak memory", value, unit, _against(format_bytes(predicted), predicted, measured))


def _against(text: str, predicted: float, measured: float) -> str:
    error = prediction_error(predicted, measured) if measured else 0.0
    return f"predicted {text}, error {signed(error)}"


def _milliseconds(seconds: float) -> str:
    return time_unit(seconds * 1e9).text(seconds * 1e9)


def measured_step_seconds(data: ReportData) -> float | None:
    """The run's typical step time (`penstock.core.curves.Usual`), else that of the measured timeline."""
    if data.run.step_seconds:
        return data.run.step_seconds.value
    return to_seconds(data.measured.step_ns) if data.measured else None


def predicted_step_seconds(data: ReportData) -> float | None:
    """The plan's prediction, else the predicted timeline's."""
    if data.plan and data.plan.prediction:
        return data.plan.prediction.step_seconds
    return to_seconds(data.predicted.step_ns) if data.predicted else None


def measured_peak_bytes(data: ReportData) -> int | None:
    """The largest measured peak of a rank, else the largest that a step reported."""
    ranks = [rank.measured_bytes for rank in data.memory if rank.measured_bytes is not None]
    if ranks:
        return max(ranks)
    reported = data.run.curves.get("peak_bytes")
    return round(reported.max) if reported else None


def predicted_peak_bytes(data: ReportData) -> int | None:
    """The largest predicted peak of a rank."""
    if data.memory:
        return max(rank.predicted_bytes for rank in data.memory)
    return max(data.plan.prediction.peak_bytes, default=None) if data.plan and data.plan.prediction else None
