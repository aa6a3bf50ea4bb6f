"""Summary of all jobs in a few queries, whose results stay small for any number of past jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from penstock.api.store.jobs import num_steps, spec_part
from penstock.api.store.schema import jobs, progress, rollups, series
from penstock.api.store.series import ALL_RANKS, ROLLUP_STEPS
from penstock.core.errors import UserError
from penstock.core.job import ResourcesSpec
from penstock.core.lifecycle import Phase
from penstock.core.manifest import limits_lifted


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Jobs of a phase: the number of existing ones, and of those, deleted or not, that ended since some time."""

    now: int = 0
    ended: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSummary:
    """Unfinished job with the newest report of its newest attempt; fields without a report are none."""

    namespace: str
    name: str
    phase: Phase
    phase_entered_at: float
    attempt: int
    failures: int
    num_steps: int
    memory_limit_bytes: int
    plan_digest: str | None
    step: int | None
    loss: float | None
    step_seconds: float | None
    reported_at: float | None
    tokens_per_second: float | None
    peak_bytes: float | None


def counts(connection: Connection, since: float) -> dict[Phase, Count]:
    """Count jobs for every phase, and those that ended at ``since`` or later."""
    present = func.sum(case((jobs.c.deleted_at.is_(None), 1), else_=0))
    ended = func.sum(case((jobs.c.finished_at >= since, 1), else_=0))
    rows = connection.execute(select(jobs.c.phase, present, ended).group_by(jobs.c.phase))
    count_by_phase = {phase: Count(now=now, ended=ended) for phase, now, ended in rows}
    return {phase: count_by_phase.get(phase.value, Count()) for phase in Phase}


def failed(connection: Connection, most: int) -> list[tuple[str, str, float]]:
    """Return namespace, name and time of failure of failed jobs that are not deleted, the newest ones."""
    chosen = select(jobs.c.namespace, jobs.c.name, jobs.c.finished_at).where(
        jobs.c.phase == Phase.FAILED.value, jobs.c.deleted_at.is_(None), jobs.c.finished_at.is_not(None)
    )
    rows = connection.execute(chosen.order_by(jobs.c.finished_at.desc(), jobs.c.number.desc()).limit(most))
    return [(namespace, name, at) for namespace, name, at in rows]


def job_summaries(connection: Connection, most: int) -> list[JobSummary]:
    """Return unfinished jobs, the one with the newest report first."""
    reported = and_(progress.c.uid == jobs.c.uid, progress.c.attempt == jobs.c.attempt)
    row, latest = jobs.c, progress.c
    columns = (row.namespace, row.name, row.phase, row.phase_entered_at, row.attempt, row.failures, row.plan_digest)
    chosen = select(*columns, latest.step, latest.loss, latest.step_seconds, latest.reported_at, row.manifest)
    chosen = chosen.add_columns(_newest("tokens_per_second"), _newest("peak_bytes"))
    unfinished = and_(row.deleted_at.is_(None), row.phase.not_in([phase.value for phase in Phase if phase.terminal]))
    order = (latest.reported_at.desc().nulls_last(), row.number.desc())
    chosen = chosen.select_from(jobs.outerjoin(progress, reported)).where(unfinished).order_by(*order).limit(most)
    return [_summary(dict(result._mapping)) for result in connection.execute(chosen)]


def _newest(name: str) -> ColumnElement[float]:
    """Expression of the last value of a job's series in its newest attempt, by the key of the coarsest roll-ups."""
    value = select(rollups.c.last).join(series, series.c.id == rollups.c.series)
    mine = (series.c.uid == jobs.c.uid, series.c.name == name, series.c.rank == ALL_RANKS)
    value = value.where(*mine, rollups.c.steps == ROLLUP_STEPS[-1], rollups.c.attempt == jobs.c.attempt)
    newest: ColumnElement[float] = (
        value.order_by(rollups.c.bucket.desc()).limit(1).correlate(jobs).scalar_subquery().label(name)
    )
    return newest


def _summary(fields: dict[str, Any]) -> JobSummary:
    """Return the summary of a row. Only two parts of the spec are read: all of it takes twenty times as long."""
    manifest = fields.pop("manifest")
    fields["phase"] = Phase(fields["phase"])
    return JobSummary(**fields, num_steps=num_steps(manifest), memory_limit_bytes=_memory_limit(manifest))


def _memory_limit(manifest: Mapping[str, Any]) -> int:
    """Memory limit of a rank; 0 for a job that its cluster accepted and core refuses."""
    try:
        with limits_lifted():
            resources: ResourcesSpec = ResourcesSpec.from_manifest(spec_part(manifest, "resources"))
    except UserError:
        return 0
    return resources.memory_per_rank
