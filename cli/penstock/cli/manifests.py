"""Reads the files that users write: cluster descriptions, and jobs for a service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.cluster import ClusterSpec
from penstock.core.cost_table import parse_cost_table
from penstock.core.errors import UserError
from penstock.core.job import STDLIB_CORPUS, PipelineJob
from penstock.core.run.documents import named, read_text
from penstock.core.schedule import ScheduleSpec, import_spec

Warn = Callable[[str], None]
Resolve = Callable[[Mapping[str, Any], Path], dict[str, Any]]
"""A job's spec with its references resolved; paths are relative to the folder."""

SCHEDULE_SUFFIX = ".csv"


def read_for_service(path: Path, warn: Warn) -> PipelineJob:
    """Read the job in ``path`` for a service: a schedule file becomes part of it, and the service resolves URIs.

    Raises:
        UserError: it cannot be read, or something in it is wrong.
    """
    return read_resolved(path, warn, with_absolute_schedule)


def read_resolved(path: Path, warn: Warn, resolve: Resolve) -> PipelineJob:
    """The job in ``path`` with ``resolve`` applied to its spec, and a schedule file made a part of it.

    ``warn`` gets notes on the dropped parts of an imported schedule.

    Raises:
        UserError: it cannot be read, or something in it is wrong.
    """
    manifest = _load_yaml(path)
    if isinstance(manifest, Mapping) and isinstance(manifest.get("spec"), Mapping):
        manifest = {**manifest, "spec": resolve(manifest["spec"], path.absolute().parent)}
    return _with_schedule(PipelineJob.from_manifest(manifest), warn)


def require_cluster(costs: Path | None, cluster: Path | None) -> None:
    """Raise `UserError` if a cost table is named without a described cluster."""
    if costs is not None and cluster is None:
        raise UserError(
            what="--costs needs --cluster: a table of costs has the times of units alone",
            remedy="describe links and memory in a file (penstock cluster init), and name it with --cluster",
        )


def read_cluster(path: Path, costs: Path | None = None) -> ClusterSpec:
    """Read the described hardware in ``path``, with the cost table in ``costs`` if one is named."""
    cluster = named(path, ClusterSpec.from_manifest, _load_yaml(path))
    if costs is None:
        return cluster
    return dataclasses.replace(cluster, costs=parse_cost_table(read_text(costs), str(costs)))


def _load_yaml(path: Path) -> Any:
    from penstock.core.serialization import yamltext

    return yamltext.load(read_text(path), str(path))


def with_absolute_schedule(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``spec`` with the absolute path of its schedule file, if it names one."""
    schedule = part(spec, ["parallelism"]).get("schedule")
    if isinstance(schedule, str) and schedule.endswith(SCHEDULE_SUFFIX):
        return with_absolute_path(spec, ["parallelism", "schedule"], folder)
    return dict(spec)


def part(spec: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    """The section below ``keys``; empty where the manifest has another form, which the reader refuses later."""
    section = spec
    for key in keys:
        below = section.get(key)
        if not isinstance(below, Mapping):
            return {}
        section = below
    return section


def with_absolute_path(spec: Mapping[str, Any], keys: Sequence[str], folder: Path) -> dict[str, Any]:
    """``spec`` in which the path below ``keys``, if there is one, is absolute; URIs stay."""
    *parents, name = keys
    value = part(spec, parents).get(name)
    if not isinstance(value, str) or value == STDLIB_CORPUS or "://" in value:
        return dict(spec)
    return _replaced(spec, keys, str(folder / Path(value).expanduser()))


def _replaced(spec: Mapping[str, Any], keys: Sequence[str], value: str) -> dict[str, Any]:
    first, *rest = keys
    return {**spec, first: _replaced(spec[first], rest, value) if rest else value}


def _with_schedule(job: PipelineJob, warn: Warn) -> PipelineJob:
    schedule = job.spec.parallelism.schedule
    if not isinstance(schedule, str) or not schedule.endswith(SCHEDULE_SUFFIX):
        return job
    spec = import_schedule(Path(schedule), warn)
    return job.with_spec(parallelism=dataclasses.replace(job.spec.parallelism, schedule=spec))


def import_schedule(path: Path, warn: Warn) -> ScheduleSpec:
    """The schedule in a CSV file as a recipe; ``warn`` gets notes on the dropped parts."""
    spec, warnings = import_spec(read_text(path), str(path))
    for warning in warnings:
        warn(warning)
    return spec
