"""Page of a job: its status, its loss, its plan and the plan's accuracy, its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from penstock.api.auth.identity import Identity, Role
from penstock.api.pages.job_data import JobData
from penstock.api.pages.job_files import JobFiles, checkpoints_section, files_section
from penstock.api.pages.shell import Page
from penstock.api.store.ingest import BUSY, MOST_RANKS, PEAK
from penstock.api.store.jobs import StoredJob, last_lines
from penstock.core.curves import Curve
from penstock.core.errors import UserError
from penstock.core.failure import Failure, read_failure
from penstock.core.job import JobSpec
from penstock.core.lifecycle import LOSSES, Phase
from penstock.core.units import format_age, format_count, format_seconds
from penstock.view import charts
from penstock.view.axis import utc
from penstock.view.charts import Figure
from penstock.view.markup import Markup, element, join
from penstock.view.report import figures_of_merit
from penstock.view.report_plan import plan_section, step_section, why_section
from penstock.view.report_run import loss_section, memory_section
from penstock.view.section import Section, left_out
from penstock.view.tables import card, chart, paragraphs, phase_badge, scroll

NOT_YET = {
    "loss": "The first step has not been reported yet.",
    "plan": "The planner decides once the job has its devices and the machine is measured.",
}


def job_page(data: JobData, files: JobFiles, identity: Identity, now: float) -> Page:
    """Return the page with the parts that ``identity`` may use."""
    job = data.stored
    sections = [
        *_sections(data),
        _events(data.events),
        _log(data.lines),
        checkpoints_section(files, job.uid),
        files_section(files, f"/v1/jobs/{job.namespace}/{job.name}"),
    ]
    body = join(
        (
            _head(data, identity),
            element("div", id="problem", class_="card", role="alert", hidden="", data_keep=""),
            _failure(job, last_lines(data.events)),
            _outdated(data.mistakes),
            _progress(job, now),
            figures_of_merit(data.report) if data.report.run else Markup(),
            *(section.markup for section in sections),
        )
    )
    return Page(
        title=f"{job.name}, {job.phase}",
        body=body,
        stream=f"/v1/jobs/{job.namespace}/{job.name}/events?after={job.last_event}",
        figures={name: figure for section in sections for name, figure in section.figures.items()},
    )


def _sections(data: JobData) -> list[Section]:
    """Return the sections with data; a sentence replaces a plan that does not exist yet."""
    report = data.report
    if report.plan is None:
        return [left_out("plan", "The plan", NOT_YET["plan"])]
    loss = loss_section(report) if report.run else left_out("loss", "Loss and speed", NOT_YET["loss"])
    sections = [plan_section(report), step_section(report, _sampled(data)), memory_section(report)]
    sections += [_ranks(data.charts), why_section(report)]
    return [loss, *(section for section in sections if not section.is_missing)]


def _ranks(curves: Mapping[tuple[str, int], Curve]) -> Section:
    """Section with busy seconds and peak memory, a line for each rank; empty for a single rank."""
    anchor, title = "ranks", "Rank by rank"
    busy, peak = _of_ranks(curves, BUSY, 1e3), _of_ranks(curves, PEAK, 1 / 2**20)
    if len(busy) < 2:
        return left_out(anchor, title, "no step of several ranks was sampled.")
    text = f"Sampled steps of up to {MOST_RANKS} ranks. A rank whose line is above the others delays them."
    places = [chart("rank-busy", "Computing, in a step", class_="half")]
    figures: dict[str, Figure] = {"rank-busy": charts.by_rank(busy, "milliseconds")}
    if peak:
        places.append(chart("rank-peak", "Peak memory, up to a step", class_="half"))
        figures["rank-peak"] = charts.by_rank(peak, "MiB")
    body = Markup(paragraphs([text]) + element("div", *places, class_="grid"))
    return Section(anchor=anchor, title=title, body=body, figures=figures)


def _of_ranks(curves: Mapping[tuple[str, int], Curve], name: str, scale: float) -> dict[int, list[tuple[int, float]]]:
    return {
        rank: [(point.step, scale * point.mean) for point in curve.points]
        for (of, rank), curve in curves.items()
        if of == name and rank >= 0
    }


def _sampled(data: JobData) -> Markup:
    """Links to every step that can be drawn."""
    if len(data.sampled.steps) < 2:
        return Markup()
    displayed_step = data.report.measured.step if data.report.measured else None
    links = []
    for step in data.sampled.steps:
        name = f"{step:,} (typical)" if step == data.sampled.typical else f"{step:,}"
        current = {"aria_current": "true"} if step == displayed_step else {}
        links.append(element("a", name, href=f"?step={step}#step", **current))
    return element("nav", "Sampled steps: ", *links, class_="steps", aria_label="Sampled steps")


def _head(data: JobData, identity: Identity) -> Markup:
    job, title = data.stored, element("h1", data.stored.name)
    actions = (
        element("div", *_actions(data), class_="actions") if identity.may(Role.EDITOR, job.namespace) else Markup()
    )
    facts = [f"{job.namespace}, submitted by {job.created_by}, {utc(job.created_at)}"]
    if job.attempt > 1:
        facts.append(f"attempt {job.attempt}")
    if job.deleted_at is not None:
        facts.append("deleted")
    head = element("div", title, phase_badge(job.phase.value), actions, class_="head")
    model = element("p", job_text(data.spec), class_="lead") if data.spec else Markup()
    return join((head, element("p", " · ".join(facts), class_="under"), model))


def job_text(spec: JobSpec) -> str:
    """Describe the job in a sentence."""
    model = spec.model
    return (
        f"A {model.family.value} of {format_count(model.layers, 'layer')}, width {model.hidden:,}, "
        f"on {format_count(spec.resources.ranks, 'rank')}: "
        f"{spec.training.steps:,} steps of {spec.training.global_batch:,} sequences of "
        f"{spec.data.sequence_length:,} tokens."
    )


def _actions(data: JobData) -> list[Markup]:
    job = data.stored
    place = f"/v1/jobs/{job.namespace}/{job.name}"
    if job.deleted_at is not None:
        return []
    buttons = []
    if not job.phase.terminal:
        verb = ("Resume", "resume") if job.suspend else ("Suspend", "suspend")
        buttons.append(element("button", verb[0], data_call=f"{place}/{verb[1]}"))
    elif not data.mistakes:
        buttons.append(element("button", "Retry", data_call=f"{place}/retry", data_next="job"))
    if data.spec:
        buttons.append(element("a", "What if", href=f"/whatif?job={job.namespace}/{job.name}", class_="button"))
    question = f"Delete {job.name}? The job ends, and its name becomes free. Its history stays."
    attributes = {"data_call": place, "data_method": "DELETE", "data_confirm": question, "data_next": "/"}
    buttons.append(element("button", "Delete", class_="danger", **attributes))
    return buttons


def _failure(job: StoredJob, last_lines: Sequence[str]) -> Markup:
    """Cause and remedy of the failure, at the top of the page."""
    if job.phase not in (Phase.FAILED, Phase.RECOVERING) or not job.phase_message:
        return Markup()
    diagnosis = read_failure(job.phase_message, last_lines)
    parts = [element("strong", diagnosis.what)]
    if diagnosis.evidence:
        parts.append(element("p", element("code", diagnosis.evidence)))
    parts += [element("p", line) for line in (*diagnosis.more, *diagnosis.remedies)]
    if not diagnosis.remedies and job.phase_reason in LOSSES:
        parts.append(_remedy(job, diagnosis))
    if last_lines:
        summary = element("summary", "Last lines of its output")
        parts.append(element("details", summary, element("pre", "\n".join(last_lines), class_="log", tabindex="0")))
    return card(*parts, class_="failure")


def _outdated(mistakes: Sequence[UserError]) -> Markup:
    """Reasons why this version cannot continue a job that an older version or the cluster accepted."""
    if not mistakes:
        return Markup()
    title = element("strong", "This version starts no further attempt of the job.")
    return card(
        title, *(element("p", line) for mistake in mistakes for line in str(mistake).split("\n")), class_="failure"
    )


def _remedy(job: StoredJob, failure: Failure) -> Markup:
    """Default remedy of a failure."""
    whose = "" if failure.rank is None else f" of rank {failure.rank}"
    continuation = "Retry continues" if job.phase is Phase.FAILED else "the job continues"
    log = element("a", f"the log{whose}", href="#log")
    return element("p", "Read the ", log, f"; {continuation} from the last checkpoint.")


def _progress(job: StoredJob, now: float) -> Markup:
    progress = job.progress
    if progress is None:
        reason = f", {job.phase_reason}" if job.phase_reason else ""
        waited = format_age(now - job.phase_entered_at)
        return Markup() if job.phase.terminal else element("p", f"{job.phase}{reason}, for {waited}.", class_="lead")
    steps = job.num_steps
    line = element("div", element("b", f"Step {progress.step:,} of {steps:,}"), element("span", _left(job, steps, now)))
    bar = element("progress", value=progress.step, max=steps, aria_label=f"step {progress.step} of {steps}")
    return element("div", line, bar, class_="progress")


def _left(job: StoredJob, steps: int, now: float) -> str:
    progress = job.progress
    if job.finished_at is not None and job.started_at is not None:
        return f"took {format_seconds(job.finished_at - job.started_at)}"
    if job.phase is not Phase.RUNNING or progress is None or progress.step_seconds is None:
        return job.phase.value.lower()
    remaining = max(0.0, (steps - progress.step) * progress.step_seconds)
    silent = now - progress.reported_at
    stale = f", last report {format_age(silent)} ago" if silent > max(10.0, 3 * progress.step_seconds) else ""
    return f"about {format_seconds(remaining)} left{stale}"


def _events(events: Sequence[Row[Any]]) -> Section:
    rows = (
        element("tr", element("td", element("time", utc(row.at))), element("td", event_text(row.kind, row.body)))
        for row in reversed(events)
    )
    table = scroll(element("table", element("tbody", *rows), class_="events"), "events")
    return Section(anchor="events", title="Events", body=card(table))


def event_text(kind: str, body: Mapping[str, Any]) -> str:
    """Describe an event in a sentence; an unknown one by its name and fields."""
    text = EVENT_TEXTS.get(kind)
    return text(body) if text else f"{kind}: {', '.join(str(value) for value in body.values())}"


def _why(body: Mapping[str, Any]) -> str:
    why = ": ".join(text for text in (body["reason"], body["message"].partition("\n")[0]) if text)
    return f" ({why})" if why else ""


EVENT_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "created": lambda body: f"Submitted by {body['by']}",
    "delete-requested": lambda body: f"Deletion requested by {body['by']}",
    "suspend-requested": lambda body: f"Suspension requested by {body['by']}",
    "resume-requested": lambda body: f"Resumption requested by {body['by']}",
    "deleted": lambda body: "Deleted",
    "phase": lambda body: f"{body['phase']}{_why(body)}",
    "planned": lambda body: f"Plan {body['digest'][:12]} for attempt {body['attempt']}",
    "replanning": lambda body: f"Attempt {body['attempt']}: {body['message']}",
    "launched": lambda body: f"Attempt {body['attempt']} launched on {format_count(body['ranks'], 'rank')}",
    "condition": lambda body: f"{body['type']} is {body['status'].lower()}{_why(body)}",
    "changed": lambda body: f"Changed by {body['by']}, generation {body['generation']}",
}


def _log(lines: Sequence[Row[Any]]) -> Section:
    if not lines:
        return left_out("log", "Log", "the ranks have printed nothing.")
    texts = (join((element("b", f"{row.rank} "), row.message)) for row in lines)
    return Section(anchor="log", title="Log", body=card(element("pre", join(texts, "\n"), class_="log", tabindex="0")))
