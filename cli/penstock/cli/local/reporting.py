"""Report of a run: all data of its directory, and a new simulation of the plan for the picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock import core
from penstock.agent.run_state import read_state
from penstock.core.curves import Usual, curves_of
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.documents import read_timeline
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_atomically
from penstock.core.timeline import Timeline
from penstock.core.units import to_seconds
from penstock.planner.comparison import rank_memory
from penstock.planner.fit import fit_points
from penstock.planner.replay import MOST_ACTIONS, num_actions, simulated
from penstock.view.data import ReportData, Sample
from penstock.view.report import report
from penstock.view.trace import trace

PACKAGES = ("torch", "numpy", "numba", "tokenizers")


def report_data(run: RunDir, phase: Phase | None = None) -> ReportData:
    """Return report data of ``run``; raises `UserError` if it is not a run or one of its files is corrupt.

    ``phase`` is that of a service's job, which is in the service's database; by default it is read from state.json.
    """
    job, result = run.read_recorded_job(), run.read_result()
    plan = run.read_plan() if run.plan.exists() else None
    profile = run.read_profile() if run.profile.exists() else None
    last = read_timeline(run.timeline) if run.timeline.exists() else None
    curves = curves_of(run.read_metrics())
    measured, others = typical(sampled(run, last), curves.step_seconds)
    sample = result.get("sample")
    return ReportData(
        job=job.metadata.name,
        phase=(phase or read_state(run.root).phase).value,
        command=f"penstock run {run.job} --run-dir {run.root}-again",
        plan=plan,
        profile=profile,
        run=curves,
        unigram_loss=result.get("unigram_loss"),
        predicted=_predicted(plan, profile),
        measured=measured,
        sampled=others,
        memory=rank_memory(plan, profile.memory.constant_bytes, last) if plan and profile else (),
        memory_limit_bytes=job.spec.resources.memory_per_rank,
        fit=fit_points(profile) if profile else (),
        samples=(Sample(prompt=str(result.get("prompt", "")), text=sample),) if isinstance(sample, str) else (),
        versions=versions(),
    )


def sampled(run: RunDir, last: Timeline | None) -> list[Timeline]:
    """Return the timelines of all sampled steps, in order."""
    timelines = [read_timeline(path) for path in run.timelines.glob("step-*.json")]
    return sorted(timelines, key=lambda timeline: timeline.step or 0) or ([last] if last else [])


def typical(timelines: Sequence[Timeline], usual: Usual | None) -> tuple[Timeline | None, tuple[Timeline, ...]]:
    """Return the timeline whose duration is nearest to ``usual``, the last if that is unknown; and the others."""
    if not timelines:
        return None, ()
    chosen = timelines[-1]
    if usual is not None:
        chosen = min(timelines, key=lambda timeline: abs(to_seconds(timeline.step_ns) - usual.value))
    return chosen, tuple(timeline for timeline in timelines if timeline is not chosen)


def write_report(run: RunDir, phase: Phase | None = None) -> None:
    """Write report.html and trace.json for Perfetto; raises as `report_data` does."""
    data = report_data(run, phase)
    write_atomically(run.report, report(data))
    timelines = [timeline for timeline in (data.predicted, data.measured) if timeline is not None]
    if timelines:
        write_atomically(trace_path(run), trace(timelines))


def trace_path(run: RunDir) -> Path:
    """File with the predicted and the measured step, for Perfetto and chrome://tracing."""
    return run.root / "trace.json"


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Python, penstock, and the packages that a run depends on, as far as installed."""
    installed = [("python", platform.python_version()), ("penstock", core.__version__)]
    for package in PACKAGES:
        try:
            installed.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(installed)


def _predicted(plan: Plan | None, profile: Profile | None) -> Timeline | None:
    """Simulate the plan's step; none without a plan or profile, and for a step that is too large to draw."""
    if plan is None or profile is None:
        return None
    if num_actions(plan) > MOST_ACTIONS:
        return None
    return simulated(plan, profile).timeline
