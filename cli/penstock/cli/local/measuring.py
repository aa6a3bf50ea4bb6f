"""Measuring this machine outside of a run: `penstock profile`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.agent.local_launch import holding
from penstock.agent.probe import identify
from penstock.agent.profiles import Profiles
from penstock.agent.progress_files import profile_progress
from penstock.agent.workers import LocalWorkers, finish
from penstock.cli import output
from penstock.cli.lines import Line, line
from penstock.cli.local.runs import require_unused
from penstock.cli.output import Lines, say
from penstock.core.host.stopping import listening
from penstock.core.job import PipelineJob
from penstock.core.profile import Profile
from penstock.core.run.folder import RunDir
from penstock.core.units import format_bytes, format_count, format_seconds
from penstock.planner.fit import FitReport, measured_cost


def measure(job: PipelineJob, root: Path | None) -> Profile:
    """Measure the machine for ``job``; store the profile in the cache and, if given, in the run directory ``root``.

    Raises:
        UserError: this machine lacks the job's device or it is in use, or the directory cannot be written.
        RunError: a rank failed.
    """
    with holding(job.spec, "penstock profile") as devices:
        identity = identify(job.spec, devices)
        with _folder(root) as run, listening() as requests, closing(line()) as shown:
            run.create()
            require_unused(run)
            run.write_job(job)
            finish(LocalWorkers(devices).profile(job, run, 0), requests, lambda: _report(run, shown))
            profile = run.read_profile()
    path = Profiles().keep(profile, identity)
    say(f"wrote the profile to {path}")
    return profile


@contextmanager
def _folder(root: Path | None) -> Iterator[RunDir]:
    """Yield the run directory ``root``, or a temporary one."""
    if root is not None:
        yield RunDir(root.absolute())
        return
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as folder:
        yield RunDir(Path(folder))


def _report(run: RunDir, shown: Line) -> None:
    done, total = profile_progress(run)
    text = f"measured {done} of {total} points" if total else "measuring this machine"
    shown.update(text, done / total if total else None)


def _reports(profile: Profile) -> list[FitReport]:
    """Return a fit report of every measured unit."""
    reports = (report for degrees in profile.degrees for report in measured_cost(profile, *degrees).reports)
    return list({(fit.unit, fit.kind, fit.tp, fit.head_parts): fit for fit in reports}.values())


def profile_lines(profile: Profile) -> Lines:
    """Return the profile for a terminal: costs of a block, errors of the fit, links and memory."""
    key, ranks = profile.key, format_count(profile.num_ranks, "rank")
    lines: Lines = [
        f"{key.device}, {key.num_cores} cores, {format_bytes(key.memory_bytes)}; PyTorch {key.torch_version}",
        f"{ranks}, {format_count(key.threads_per_rank, 'thread')} each, {profile.precision.value}",
        "",
    ]
    table = output.table("unit", "pass", "longest", "points", "fit error", "held out", padding=(0, 2))
    for report in _reports(profile):
        key_of = (report.unit, report.kind, report.tp, report.head_parts)
        records = [r for r in profile.units if (r.unit, r.kind, r.tp, r.head_parts) == key_of]
        longest = max(records, key=lambda r: (r.length, r.batch))
        part = f" part of {report.head_parts}" if report.head_parts > 1 else ""
        table.add_row(
            f"{report.unit.value}{part}{f' / {report.tp}' if report.tp > 1 else ''}",
            report.kind.value,
            f"{format_seconds(longest.together_seconds)} for {longest.batch} x {longest.length}",
            str(report.num_records),
            f"{report.fitted_error:.1%}",
            "–" if report.held_out_error != report.held_out_error else f"{report.held_out_error:.1%}",
        )
    lines += [table, ""]
    lines += [
        f"link {link.source} -> {link.target}: {format_seconds(link.latency_seconds)}, "
        f"{'at least ' if link.bounded else ''}{format_bytes(link.bytes_per_second)}/s"
        for link in profile.links
    ]
    lines.append(f"a rank's process takes {format_bytes(profile.memory.constant_bytes)} before any parameter")
    lines += [f"warning: {warning}" for warning in profile.warnings]
    return lines
