"""Reads what users write: jobs and clusters, with every reference in a job resolved.

After reading, a job stands for itself: paths are absolute (they are relative to the manifest's folder), a schedule file
is part of the manifest, and a vocabulary that only the tokenizer's file knows is filled in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.core.cluster import ClusterSpec
from penstock.core.job import STDLIB_CORPUS, PipelineJob
from penstock.core.run.documents import named, read_text
from penstock.core.schedule import ScheduleSpec

Warn = Callable[[str], None]

SCHEDULE_SUFFIX = ".csv"
_PATHS = (("data", "source"), ("data", "tokenizer", "file"), ("checkpoint", "resumeFrom"))


def read_job(path: Path, warn: Warn) -> PipelineJob:
    """The job in ``path``, resolved; ``warn`` is told what was dropped from an imported schedule.

    Raises:
        UserError: it cannot be read, or something in it is wrong.
    """
    manifest = _load_yaml(path)
    if isinstance(manifest, Mapping) and isinstance(manifest.get("spec"), Mapping):
        manifest = {**manifest, "spec": _resolved(manifest["spec"], path.absolute().parent)}
    job = PipelineJob.from_manifest(manifest)
    return _with_schedule(job, warn)


def read_for_service(path: Path, warn: Warn) -> PipelineJob:
    """The job in ``path`` as a service reads it: a schedule file becomes part of it, URIs are the service's to resolve.

    Raises:
        UserError: it cannot be read, or something in it is wrong.
    """
    manifest = _load_yaml(path)
    if isinstance(manifest, Mapping) and isinstance(manifest.get("spec"), Mapping):
        spec = dict(manifest["spec"])
        _make_schedule_absolute(spec, path.absolute().parent)
        manifest = {**manifest, "spec": spec}
    return _with_schedule(PipelineJob.from_manifest(manifest), warn)


def read_cluster(path: Path) -> ClusterSpec:
    """The described hardware in ``path``."""
    return named(path, ClusterSpec.from_manifest, _load_yaml(path))


def _load_yaml(path: Path) -> Any:
    from penstock.core.serialization import yamltext

    return yamltext.load(read_text(path), str(path))


def _resolved(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``spec`` with absolute paths and, where only a tokenizer's file knows it, the vocabulary."""
    resolved = dict(spec)
    for *parents, name in _PATHS:
        _make_absolute(resolved, parents, name, folder)
    _make_schedule_absolute(resolved, folder)
    return _with_vocab(resolved)


def _make_schedule_absolute(spec: dict[str, Any], folder: Path) -> None:
    schedule = _at(spec, ["parallelism"]).get("schedule")
    if isinstance(schedule, str) and schedule.endswith(SCHEDULE_SUFFIX):
        _make_absolute(spec, ["parallelism"], "schedule", folder)


def _at(place: Mapping[str, Any], path: list[str]) -> Mapping[str, Any]:
    """What lies at ``path``; nothing where the manifest has another form, which reading it will refuse."""
    for name in path:
        found = place.get(name)
        if not isinstance(found, Mapping):
            return {}
        place = found
    return place


def _make_absolute(spec: dict[str, Any], parents: list[str], name: str, folder: Path) -> None:
    value = _at(spec, parents).get(name)
    if not isinstance(value, str) or value == STDLIB_CORPUS or "://" in value:
        return
    place = spec
    for parent in parents:
        place[parent] = dict(place[parent])
        place = place[parent]
    place[name] = str(folder / Path(value).expanduser())


def _with_vocab(spec: dict[str, Any]) -> dict[str, Any]:
    model, file = _at(spec, ["model"]), _at(spec, ["data", "tokenizer"]).get("file")
    if not model or "vocab" in model or not isinstance(file, str) or "://" in file:
        return spec
    from penstock.trainer.data.tokenizer import load_tokenizer

    return {**spec, "model": {**model, "vocab": load_tokenizer(Path(file)).vocab}}


def _with_schedule(job: PipelineJob, warn: Warn) -> PipelineJob:
    schedule = job.spec.parallelism.schedule
    if not isinstance(schedule, str) or not schedule.endswith(SCHEDULE_SUFFIX):
        return job
    spec = import_schedule(Path(schedule), warn)
    return job.with_spec(parallelism=dataclasses.replace(job.spec.parallelism, schedule=spec))


def import_schedule(path: Path, warn: Warn) -> ScheduleSpec:
    """The schedule in a CSV file as a recipe; ``warn`` is told what was dropped."""
    from penstock.planner.schedules.imported import import_spec

    spec, warnings = import_spec(read_text(path), str(path))
    for warning in warnings:
        warn(warning)
    return spec
