"""Comparison of two to four jobs: loss, speed, and differences of their plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from penstock.api.pages.job_data import JobData
from penstock.api.pages.listing import path_of
from penstock.api.pages.shell import Page
from penstock.core.curves import Curve
from penstock.core.plan import Plan, Prediction
from penstock.core.speed import Speed
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, format_seconds
from penstock.view import charts
from penstock.view.data import ReportData
from penstock.view.markup import Markup, element, join
from penstock.view.report import (
    measured_peak_bytes,
    measured_step_seconds,
    predicted_peak_bytes,
    predicted_step_seconds,
)
from penstock.view.tables import card, chart, heading, phase_badge, scroll

V = TypeVar("V")
FEWEST, MOST = 2, 4
NOTHING = "–"


def comparison(jobs: Sequence[JobData]) -> Page:
    """Return the page; namespaces distinguish jobs of one name."""
    names = names_of(jobs)
    runs = {name: job.report.run.curves for name, job in zip(names, jobs, strict=True) if job.report.run}
    figures = {
        "loss": charts.compared(curves_named(runs, "loss"), "nats per token"),
        "throughput": charts.compared(curves_named(runs, "tokens_per_second"), "tokens per second"),
    }
    curves_section = Markup()
    if runs:
        places = (chart("loss", "Loss", class_="half"), chart("throughput", "Tokens per second", class_="half"))
        curves_section = join((element("h2", "Curves", class_="apart"), element("div", *places, class_="grid")))
    body = join(
        (
            element("div", element("h1", "Comparison"), class_="head"),
            element("p", "Differences are highlighted.", class_="under"),
            curves_section,
            _table(names, jobs),
        )
    )
    return Page(title=f"{', '.join(names)} compared", body=body, figures=figures if runs else {})


def curves_named(runs: Mapping[str, Mapping[str, Curve]], name: str) -> dict[str, Curve]:
    """Return the curves of one metric, by the run that reported it."""
    return {run: curves[name] for run, curves in runs.items() if name in curves}


def names_of(jobs: Sequence[JobData]) -> list[str]:
    """Return the jobs' names, with namespaces where names are not unique."""
    short = [job.stored.name for job in jobs]
    if len(set(short)) == len(short):
        return short
    return [f"{job.stored.namespace}/{job.stored.name}" for job in jobs]


def _table(names: Sequence[str], jobs: Sequence[JobData]) -> Markup:
    links = (element("th", element("a", name, href=path_of(job.stored))) for name, job in zip(names, jobs, strict=True))
    phases = (element("td", phase_badge(job.stored.phase.value)) for job in jobs)
    head = element("thead", element("tr", heading(""), *links))
    rows = [element("tr", element("td", "phase", class_="key"), *phases)]
    rows += [_row(name, [value(job) for job in jobs]) for name, value in chain(RESULTS.items(), PLANS.items())]
    return card(scroll(element("table", head, element("tbody", *rows), class_="compared"), "comparison"))


def _row(name: str, values: Sequence[str]) -> Markup:
    cells = (element("td", value) for value in values)
    differs = {"class_": "differs"} if len(set(values)) > 1 else {}
    return element("tr", element("td", name, class_="key"), *cells, **differs)


def _steps(job: JobData) -> str:
    progress = job.stored.progress
    return f"{progress.step if progress else 0:,} of {job.stored.num_steps:,}"


def _reported(of: Callable[[ReportData], V | None], text: Callable[[V], str]) -> Callable[[JobData], str]:
    """Return the text of a value in the report, where that has one."""

    def value(job: JobData) -> str:
        reported = of(job.report)
        return NOTHING if reported is None else text(reported)

    return value


def _speed(of: Callable[[ReportData], float | None]) -> Callable[[JobData], str]:
    def speed(report: ReportData) -> Speed | None:
        seconds = of(report)
        return report.plan.speed(seconds) if report.plan and seconds else None

    return _reported(speed, lambda known: known.text)


def _bubble(of: Callable[[ReportData], Timeline | Prediction | None]) -> Callable[[JobData], str]:
    return _reported(lambda report: step.bubble if (step := of(report)) else None, lambda bubble: bubble.text)


def _microbatches(plan: Plan) -> str:
    last = f" and one of {plan.remainder}" if plan.remainder else ""
    return f"{plan.num_alike} of {plan.microbatch}{last}"


def _plan(text: Callable[[Plan], str]) -> Callable[[JobData], str]:
    return _reported(lambda report: report.plan, text)


RESULTS: dict[str, Callable[[JobData], str]] = {
    "steps": _steps,
    "loss": _reported(lambda report: report.run.last("loss"), lambda last: f"{last.value:.3f}"),
    "throughput": _reported(lambda report: report.run.tokens_per_second, lambda usual: f"{usual.value:,.0f} tokens/s"),
    "step, measured": _reported(measured_step_seconds, format_seconds),
    "step, predicted": _reported(predicted_step_seconds, format_seconds),
    "speed, measured": _speed(measured_step_seconds),
    "speed, predicted": _speed(predicted_step_seconds),
    "bubble, measured": _bubble(lambda report: report.measured),
    "bubble, predicted": _bubble(lambda report: report.plan.prediction if report.plan else None),
    "memory, measured": _reported(measured_peak_bytes, format_bytes),
    "memory, predicted": _reported(predicted_peak_bytes, format_bytes),
}
PLANS: dict[str, Callable[[JobData], str]] = {
    "mesh": _plan(lambda plan: plan.mesh_text),
    "schedule": _plan(lambda plan: plan.schedule.generator or "imported"),
    "micro-batches": _plan(_microbatches),
    "slices": _plan(lambda plan: plan.slices_text),
    "stages": _plan(lambda plan: ", ".join(f"{stop - first}" for first, stop in plan.stages) + " units"),
    "plan": _plan(lambda plan: plan.digest[:12]),
}
