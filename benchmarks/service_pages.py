"""Times of pages: 50 of 10,000 jobs by every sort and filter, and the data of a job with a million points.

Run as ``python -m benchmarks.service_pages``; writes ``benchmarks/results/service_pages.{md,json}``. Times are those of
a client on the same machine, one request after the other. A job's data need six requests, its page needs one.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from benchmarks.service_load import KINDS, database, summary
from benchmarks.support import write_results
from sqlalchemy import Connection, insert, select

from penstock.api.store import plans
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.ingest import Batch, take
from penstock.api.store.schema import job_labels, jobs, progress
from penstock.api.store.series import ALL_RANKS, Point, add_points
from penstock.core.lifecycle import Phase
from penstock.core.records import LogLine, Record, RecordKind
from tests.support.load import NUM_TEAMS, RECORDED_AT, Load, Target, prepare, uid_of
from tests.support.load_service import lone_services
from tests.support.sample_run import sample_plan, sample_schedule, sample_timeline

NUM_JOBS, NUM_POINTS, NUM_LINES = 10_000, 1_000_000, 2_000
SERIES = ("loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes")
STEPS_PER_CHANGE = 5_000
REPEATS = 20
PHASES = tuple(phase.value for phase in Phase)
SORTS = ("created", "-created", "name", "-name", "priority", "-priority", "phase", "-phase")
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a phase": {"phase": "Running"},
    "two phases": {"phase": ["Queued", "Failed"]},
    "a label": {"label": "team=t3"},
    "part of a name": {"name": "77"},
    "a name that no job has": {"name": "nowhere"},
    "a namespace": {"namespace": "default"},
}
PARTS = ("", "/metrics", "/timeline", "/events?limit=200", "/plans", "/logs?tail=true")
OF_JOB = "/v1/jobs/default/job-0"
PAGE_OF_JOB = "/jobs/default/job-0"


def fill(target: Target) -> None:
    """Create ten thousand jobs as copies of the first one, which has a lot of data."""
    engine = make_engine(parse_url(target.database))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        _copy(connection)
        _plan_and_report(connection)
    steps = range(NUM_POINTS // len(SERIES))
    for start in range(0, len(steps), STEPS_PER_CHANGE):
        new = [
            Point(name, ALL_RANKS, step, 1 / (step + 1)) for name in SERIES for step in steps[start:][:STEPS_PER_CHANGE]
        ]
        with engine.connect().execution_options(writes=True) as connection, connection.begin():
            add_points(connection, {(uid_of(0), 1): new}, RECORDED_AT)
    engine.dispose()


def _copy(connection: Connection) -> None:
    first = dict(connection.execute(select(jobs)).one()._mapping)
    del first["number"]
    others = range(1, NUM_JOBS)
    named = [{"uid": uid_of(job), "name": f"job-{job}", "phase": PHASES[job % len(PHASES)]} for job in others]
    connection.execute(insert(jobs), [{**first, **row, "priority": i % 7} for i, row in enumerate(named)])
    labels = [{"uid": uid_of(job), "key": "team", "value": f"t{job % NUM_TEAMS}"} for job in others]
    connection.execute(insert(job_labels), labels)
    report = {"attempt": 1, "step": 5, "loss": 2.0, "step_seconds": 1.0, "reported_at": RECORDED_AT}
    connection.execute(insert(progress), [{"uid": uid_of(job), **report} for job in others])


def _plan_and_report(connection: Connection) -> None:
    for attempt in range(1, 4):
        plans.keep_plan(connection, uid_of(0), attempt, sample_plan(), RECORDED_AT)
    timeline = replace(sample_timeline(sample_schedule(4, 8, 4)), step=5)
    contents: list[dict[str, Any]] = [
        {"log": LogLine(rank=i % 4, level="INFO", message=f"line {i}")} for i in range(NUM_LINES)
    ]
    contents.append({"timeline": timeline})
    same: dict[str, Any] = {"uid": uid_of(0), "attempt": 1, "source": "rank-0", "recorded_at": RECORDED_AT}
    records = [
        Record(**same, sequence=i, kind=RecordKind(next(iter(content))), **content)
        for i, content in enumerate(contents)
    ]
    assert take(connection, [Batch.of(records, RECORDED_AT)]) == [NUM_LINES]


def measure(kind: str) -> dict[str, Any]:
    """Measure all pages on one kind of database."""
    with tempfile.TemporaryDirectory(prefix="penstock-pages-") as folder, database(kind) as url:
        target = prepare(Load(num_jobs=1, num_reports=0), Path(folder), url)
        fill(target)
        with lone_services(target) as (service,):
            bearer = {"Authorization": f"Bearer {target.viewer}"}
            with httpx.Client(base_url=service.url, headers=bearer, trust_env=False, timeout=30) as client:
                pages = {f"{sort}, {name}": times for sort, name, times in _pages(client)}
                data = [sum(_milliseconds(client, OF_JOB + part) for part in PARTS) for _ in range(5 * REPEATS)]
                shown = [_milliseconds(client, PAGE_OF_JOB) for _ in range(5 * REPEATS)]
                parts = {
                    part: statistics.median(_milliseconds(client, OF_JOB + part) for _ in range(5)) for part in PARTS
                }
    slowest = max(pages, key=lambda case: statistics.median(pages[case]))
    return {
        "database": kind,
        "page_milliseconds": summary(time for times in pages.values() for time in times),
        "slowest_page": slowest,
        "slowest_page_milliseconds": summary(pages[slowest]),
        "job_milliseconds": summary(data),
        "job_page_milliseconds": summary(shown),
        "part_milliseconds": parts,
    }


def _pages(client: httpx.Client) -> Iterator[tuple[str, str, list[float]]]:
    """For each sort and filter, the times of the first page and of the next one, if any."""
    for sort, (name, wanted) in product(SORTS, FILTERS.items()):
        query = {"sort": sort, "limit": 50, **wanted}
        following = client.get("/v1/jobs", params=query).raise_for_status().json()["next"]
        cursors = [{}] if following is None else [{}, {"cursor": following}]
        yield (
            sort,
            name,
            [_milliseconds(client, "/v1/jobs", **query, **cursor) for cursor in cursors for _ in range(REPEATS)],
        )


def _milliseconds(client: httpx.Client, path: str, **query: Any) -> float:
    begin = time.perf_counter()
    client.get(path, params=query or None).raise_for_status()
    return 1000 * (time.perf_counter() - begin)


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = results["rows"]
    return "\n".join(
        [
            "# Pages of the service",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. A list of 50 among {NUM_JOBS:,} jobs by "
            f"{len(SORTS)} orders and {len(FILTERS)} filters, and all data of a job with {NUM_POINTS:,} points, "
            f"{NUM_LINES:,} log lines, three plans and a timeline.",
            "",
            "| | " + " | ".join(row["database"] for row in rows) + " | target, p99 |",
            "|---|" + "---:|" * len(rows) + "---|",
            *(f"| {name} | " + " | ".join(map(show, rows)) + f" | {target} |" for name, show, target in FIGURES),
            "",
        ]
    )


def _three(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: " / ".join(f"{row[key][which]:.1f}" for which in ("p50", "p99", "max"))


FIGURES: tuple[tuple[str, Callable[[dict[str, Any]], str], str], ...] = (
    ("a list of 50, ms: p50 / p99 / max", _three("page_milliseconds"), "under 50"),
    ("the slowest order and filter", lambda row: str(row["slowest_page"]), ""),
    ("its list", _three("slowest_page_milliseconds"), "under 50"),
    ("a job's data, six requests", _three("job_milliseconds"), "under 150"),
    ("the page of the job, HTML", _three("job_page_milliseconds"), "under 150"),
)


def main() -> None:
    """Measure and write both files."""
    load = os.getloadavg()[0]
    write_results("service_pages", json.dumps({"load_before": load, "rows": [measure(k) for k in KINDS]}), markdown)


if __name__ == "__main__":
    main()
