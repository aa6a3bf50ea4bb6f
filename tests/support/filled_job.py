"""A job in the store that has done everything: planned, trained, measured a step, printed lines, been suspended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from penstock.api.service import Service
from penstock.api.store import jobs, plans, profiles
from penstock.api.store.ingest import Batch, take
from penstock.api.store.jobs import StoredJob
from penstock.core.lifecycle import Phase
from penstock.core.records import LogLine, Record, RecordKind
from tests.support.sample_report import sample_report
from tests.support.sample_run import sample_metrics
from tests.support.service import add_job

PHASES = (Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING)


def enter(service: Service, uid: str, phase: Phase, message: str = "") -> StoredJob:
    """The job in its next phase."""
    now = service.clock()
    return service.write(uid, lambda connection: jobs.enter_phase(connection, uid, phase, "Because", message, now))


def running_job(service: Service, name: str = "tiny", steps: int = 8, line: str = "compiled") -> StoredJob:
    """A job in phase Running that reported so many steps."""
    return run_job(service, add_job(service, name).uid, steps, line)


def run_job(service: Service, uid: str, steps: int = 8, line: str = "compiled") -> StoredJob:
    """The same of a job that was only submitted."""
    for phase in PHASES:
        enter(service, uid, phase)
    report = sample_report()
    assert report.plan is not None
    assert report.profile is not None
    profile, measured = report.profile, report.measured
    plan = replace(report.plan, profile_digest=profile.digest)

    def fill(connection: Connection) -> None:
        profiles.keep(connection, profile)
        plans.keep_plan(connection, uid, 0, plan, service.clock(), report.predicted)
        found: list[dict[str, Any]] = [
            {"kind": RecordKind.METRICS, "metrics": each} for each in sample_metrics()[:steps]
        ]
        found.append({"kind": RecordKind.TIMELINE, "timeline": measured})
        logs = (LogLine(rank=rank, level="info", message=line) for rank in range(2))
        found += [{"kind": RecordKind.LOG, "log": log} for log in logs]
        now = service.clock()
        records = [
            Record(uid=uid, attempt=0, source="rank-0", sequence=number, recorded_at=now, **content)
            for number, content in enumerate(found)
        ]
        take(connection, [Batch.of(records, now)])

    service.write(uid, fill)
    return service.read(lambda connection: jobs.get(connection, uid))


def report_step(service: Service, uid: str, step: int) -> None:
    """One step more."""
    told = jobs.Reported(attempt=0, step=step, loss=3.0, step_seconds=0.5, reported_at=service.clock())
    service.write(uid, lambda connection: jobs.report(connection, [(uid, told)]))
