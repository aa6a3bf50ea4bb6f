"""Summary of a run on one screen, from its directory, for a terminal or as data; and plans in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.cli import output
from penstock.cli.output import Lines, printable
from penstock.core.comparison import prediction_error
from penstock.core.curves import curves_of
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.run.folder import RunDir
from penstock.core.speed import Speed, format_rate
from penstock.core.units import format_bytes, format_seconds

SAMPLE_LINES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary(Manifest):
    """Plan, prediction and result of a run. Losses are in nats per token; measured times are medians after warm-up."""

    job: str
    phase: str
    attempt: int
    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    unigram_loss: float | None = None
    predicted_step_seconds: float | None = None
    measured_step_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    tokens_per_second: float | None = None
    predicted_speed: Speed | None = None
    measured_speed: Speed | None = None
    plan: str = ""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sample: str = ""
    report: str = ""


def plan_line(plan: Plan) -> str:
    """Describe a plan in a line."""
    return f"{plan.mesh_text}, {plan.microbatches_text}, slices {plan.slices_text}, schedule {plan.schedule.generator}"


def search_text(
    candidates: int, best_step_seconds: float | None, best_speed: Speed | None = None, change: str = ""
) -> str:
    """Describe the progress of a search for a plan, or for one with a ``change``.

    The best plan so far may still be improved: only the final plan has the final step time.
    """
    best = "" if best_step_seconds is None else f", best so far {format_seconds(best_step_seconds)} per step"
    speed = "" if best_speed is None else f", {best_speed.text}"
    return f"{change}{': ' if change else ''}{candidates} simulated{best}{speed}"


def summarise(run: RunDir, phase: str, attempt: int) -> Summary:
    """Summarise ``run`` and the result of its last attempt."""
    job, metrics, result = run.read_recorded_job(), run.read_metrics(), run.read_result()
    curves = curves_of(metrics)
    plan = run.read_plan() if run.plan.exists() else None
    prediction = plan.prediction if plan else None
    measured = curves.step_seconds.value if curves.step_seconds else None
    return Summary(
        job=job.metadata.name,
        phase=phase,
        attempt=attempt,
        steps=metrics[-1].step + 1 if metrics else 0,
        first_loss=metrics[0].loss if metrics else None,
        last_loss=metrics[-1].loss if metrics else None,
        validation_loss=_number(result, "validation_loss"),
        unigram_loss=_number(result, "unigram_loss"),
        predicted_step_seconds=prediction.step_seconds if prediction else None,
        measured_step_seconds=measured,
        predicted_peak_bytes=max(prediction.peak_bytes, default=None) if prediction else None,
        measured_peak_bytes=max((m.peak_bytes for m in metrics), default=None),
        tokens_per_second=curves.tokens_per_second.value if curves.tokens_per_second else None,
        predicted_speed=plan.speed() if plan else None,
        measured_speed=plan.speed(measured) if plan and measured else None,
        plan=plan_line(plan) if plan else "",
        reasons=plan.reasons if plan else (),
        warnings=(*(prediction.warnings if prediction else ()), *run.damaged_metrics()),
        sample=str(result.get("sample", "")),
        report=str(run.report) if run.report.exists() else "",
    )


def _number(result: dict[str, Any], name: str) -> float | None:
    value = result.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def rendered(summary: Summary) -> Lines:
    """Return the summary for a terminal."""
    parts: Lines = ["", output.text(("Plan", "bold"))]
    parts += [f"  {line}" for line in summary.reasons or (summary.plan,)]
    table = output.table("", "predicted", "measured", "error", padding=(0, 2), header_style="bold")
    for name, predicted, measured, form in (
        ("step time", summary.predicted_step_seconds, summary.measured_step_seconds, format_seconds),
        ("peak memory", summary.predicted_peak_bytes, summary.measured_peak_bytes, format_bytes),
    ):
        table.add_row(*_compared(name, predicted, measured, form))
    for row in _speeds(summary):
        table.add_row(*row)
    parts += ["", table, *(f"warning: {warning}" for warning in summary.warnings)]
    parts += ["", output.text(("Result", "bold")), *(f"  {line}" for line in _results(summary))]
    if summary.sample:
        lines = printable(summary.sample).splitlines()[:SAMPLE_LINES]
        parts += ["", output.text(("Sample", "bold")), *(output.text((f"  {line}", "italic")) for line in lines)]
    if summary.report:
        parts += ["", output.text(("Report ", "bold"), summary.report)]
    return parts


def _compared(name: str, predicted: float | None, measured: float | None, form: Callable[[float], str]) -> list[str]:
    """Return a row of the table, with a dash for a missing value."""
    texts = ["–" if value is None else form(value) for value in (predicted, measured)]
    error = f"{100 * prediction_error(predicted, measured):+.1f} %" if predicted and measured else "–"
    return [name, *texts, error]


def _speeds(summary: Summary) -> Iterator[list[str]]:
    """Tokens per second per device, and the share of the devices' peak where that is known."""
    predicted, measured = summary.predicted_speed, summary.measured_speed
    for name, field, form in (
        ("tokens/s per device", "tokens_per_second_per_device", format_rate),
        ("MFU", "model_flops_utilization", "{:.1%}".format),
    ):
        values = getattr(predicted, field, None), getattr(measured, field, None)
        if any(values):
            yield _compared(name, *values, form)


def _results(summary: Summary) -> list[str]:
    """Speed and learning, a line each."""
    lines = [f"{summary.steps} steps, attempt {summary.attempt}"]
    if summary.tokens_per_second is not None:
        lines[0] += f", {summary.tokens_per_second:,.0f} tokens/s"
    if summary.first_loss is not None and summary.last_loss is not None:
        lines.append(f"loss {summary.first_loss:.3f} at first, {summary.last_loss:.3f} at last")
    if summary.validation_loss is not None:
        text = f"validation loss {summary.validation_loss:.3f}"
        unigram = summary.unigram_loss
        lines.append(text if unigram is None else f"{text}; guessing by token frequency gives {unigram:.3f}")
    return lines
