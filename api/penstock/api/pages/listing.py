"""The list of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlencode

from penstock.api.pages.shell import Page
from penstock.api.store.jobs import Query, StoredJob
from penstock.core.lifecycle import Phase
from penstock.core.speed import speed_columns
from penstock.core.units import format_age, format_seconds
from penstock.view.markup import Markup, element, join
from penstock.view.tables import card, heading, phase_badge, scroll

SORTS = {
    "-created": "newest first",
    "created": "oldest first",
    "name": "by name",
    "-priority": "by priority",
    "phase": "by phase",
}
HEADERS = ("", "job", "phase", "progress", "loss", "per step")


def listing(page_jobs: Sequence[StoredJob], query: Query, following: str | None, now: float) -> Page:
    """Return the page with ``page_jobs``, a part of the result of ``query``; ``following`` is the next cursor."""
    parts = [
        element(
            "div",
            element("h1", "Jobs"),
            element("div", element("a", "Submit a job", href="/submit", class_="button strong"), class_="actions"),
            class_="head",
        ),
        _filters(query),
        _table(page_jobs, now) if page_jobs else _nothing(query),
    ]
    if following or query.cursor:
        parts.append(_pages(query, following))
    return Page(title="Jobs", here="/", body=join(parts), stream="/v1/events")


def _filters(query: Query) -> Markup:
    name = element("input", name="name", value=query.name, placeholder="part of a name", aria_label="part of the name")
    phases = [_option("", "all phases", not query.phases)]
    phases += [_option(phase.value, phase.value, phase in query.phases) for phase in Phase]
    sorts = [_option(key, text, key == query.sort) for key, text in SORTS.items()]
    return element(
        "form",
        name,
        element("select", *phases, name="phase", aria_label="phase"),
        element("select", *sorts, name="sort", aria_label="order"),
        element("button", "Show"),
        method="get",
        action="/",
        class_="filters",
    )


def _option(value: str, text: str, chosen: bool) -> Markup:
    return element("option", text, value=value, **({"selected": ""} if chosen else {}))


def _table(page_jobs: Sequence[StoredJob], now: float) -> Markup:
    speeds = speed_columns([job.speed for job in page_jobs])
    head = (heading(text) for text in (*HEADERS, *speeds.headers, "age"))
    rows = (
        element("tr", *_cells(job, zip(speeds.headers, speed, strict=True), now), id=f"job-{job.uid}")
        for job, speed in zip(page_jobs, speeds.rows, strict=True)
    )
    content = Markup(element("thead", element("tr", *head)) + element("tbody", *rows))
    table = scroll(element("table", content, class_="jobs"), "jobs")
    compare = element("p", element("button", "Compare"), element("span", "two to four marked jobs"), class_="compare")
    return element("form", card(table), compare if len(page_jobs) > 1 else Markup(), method="get", action="/compare")


def _cells(job: StoredJob, speed: Iterable[tuple[str, str]], now: float) -> list[Markup]:
    name = element("a", job.name, href=path_of(job))
    space = element("small", f" {job.namespace}") if job.namespace != "default" else Markup()
    progress = job.progress
    steps = job.num_steps
    bar = Markup()
    if progress is not None:
        done = f"{progress.step:,} of {steps:,}"
        bar = join(
            (
                element("progress", value=progress.step, max=steps, aria_label=f"step {done}"),
                element("small", done),
            )
        )
    mark = element("input", type="checkbox", name="job", value=f"{job.namespace}/{job.name}", aria_label=job.name)
    return [
        element("td", mark, class_="mark"),
        element("td", name, space, class_="name"),
        element("td", phase_badge(job.phase.value)),
        element("td", bar, class_="done"),
        element("td", f"{progress.loss:.3f}" if progress and progress.loss is not None else "", data_name="loss"),
        element(
            "td",
            format_seconds(progress.step_seconds) if progress and progress.step_seconds else "",
            data_name="per step",
        ),
        *(element("td", text, data_name=name) for name, text in speed),
        element("td", format_age(now - job.created_at), data_name="age"),
    ]


def path_of(job: StoredJob) -> str:
    """Path of the job's page."""
    return f"/jobs/{job.namespace}/{job.name}"


def _nothing(query: Query) -> Markup:
    if query.name or query.phases:
        message = element("p", "No job matches. ", element("a", "Show all", href="/"))
    else:
        message = Markup(
            element("p", "No jobs yet. Submit a manifest here, or from a terminal:")
            + element("p", element("code", "penstock submit job.yaml"))
        )
    return card(message, class_="empty")


def _pages(query: Query, following: str | None) -> Markup:
    parameters = [("name", query.name), ("sort", query.sort), *(("phase", phase.value) for phase in query.phases)]
    links = []
    if query.cursor:
        links.append(element("a", "First page", href=f"/?{urlencode(parameters)}", class_="button"))
    if following:
        links.append(element("a", "Next", href=f"/?{urlencode([*parameters, ('cursor', following)])}", class_="button"))
    return element("div", *links, class_="pages")
