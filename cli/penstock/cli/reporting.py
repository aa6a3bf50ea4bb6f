"""The report of a run: everything its directory holds, and the plan simulated again for the picture."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.cli.attempt import read_result
from penstock.cli.manifests import read_timeline
from penstock.cli.state import read_state
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.planner.comparison import rank_memory
from penstock.planner.fit import fit_points
from penstock.planner.replay import MOST_ACTIONS, num_actions, simulated
from penstock.trainer.rundir import RunDir, write_atomically
from penstock.view.data import ReportData, Sample
from penstock.view.report import report
from penstock.view.trace import trace

PACKAGES = ("penstock", "torch", "numpy", "numba", "tokenizers")


def report_data(run: RunDir, phase: Phase | None = None) -> ReportData:
    """What ``run`` holds; raises `UserError` if it is no run or something in it is corrupt.

    ``phase`` is told by a service, which keeps the phases of its jobs; without it the run's own state tells.
    """
    job, result = run.read_job(), read_result(run)
    plan = run.read_plan() if run.plan.exists() else None
    profile = run.read_profile() if run.profile.exists() else None
    measured = read_timeline(run.timeline) if run.timeline.exists() else None
    sample = result.get("sample")
    return ReportData(
        job=job.metadata.name,
        phase=(phase or read_state(run.root).phase).value,
        command=f"penstock run {run.job} --run-dir {run.root}-again",
        plan=plan,
        profile=profile,
        metrics=tuple(run.read_metrics()),
        unigram_loss=result.get("unigram_loss"),
        predicted=_predicted(plan, profile),
        measured=measured,
        memory=rank_memory(plan, profile.memory.constant_bytes, measured) if plan and profile else (),
        memory_limit_bytes=job.spec.resources.memory_per_rank,
        fit=fit_points(profile) if profile else (),
        samples=(Sample(prompt=str(result.get("prompt", "")), text=sample),) if isinstance(sample, str) else (),
        versions=versions(),
    )


def write_report(run: RunDir, phase: Phase | None = None) -> None:
    """Make report.html and, beside it, trace.json for Perfetto; see `report_data`."""
    data = report_data(run, phase)
    write_atomically(run.report, report(data))
    timelines = [timeline for timeline in (data.predicted, data.measured) if timeline is not None]
    if timelines:
        write_atomically(trace_path(run), trace(timelines))


def trace_path(run: RunDir) -> Path:
    """The step, predicted and measured, as Perfetto and chrome://tracing open it."""
    return run.root / "trace.json"


def versions() -> tuple[tuple[str, str], ...]:
    """Python and the packages that a run depends on, as far as they are installed."""
    found = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def _predicted(plan: Plan | None, profile: Profile | None) -> Timeline | None:
    """The plan's step, simulated; none where there is nothing to simulate from or too much to draw."""
    if plan is None or profile is None:
        return None
    if num_actions(plan) > MOST_ACTIONS:
        return None
    return simulated(plan, profile).timeline
