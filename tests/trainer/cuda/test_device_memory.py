"""Launched ranks whose job may take more memory than their device has, as in a pod, where no command checked before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.core.job import Device, PipelineJob
from penstock.core.schedule import Kind
from tests.support.fakecuda.build import environment
from tests.support.training_run import TIMEOUT_SECONDS, make_run, start, tiny_job, tiny_plan, write_corpus

MEBIBYTE = 2**20


def _on_cuda(job: PipelineJob, memory_per_rank: int) -> PipelineJob:
    resources = dataclasses.replace(
        job.spec.resources, device=Device.CUDA, ranks=1, memory_per_rank=memory_per_rank, min_ranks=None
    )
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, resources=resources))


@pytest.mark.parametrize("command", ["profile", "train"])
def test_more_memory_than_the_device_has_is_refused_at_the_start(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = _on_cuda(tiny_job(write_corpus(tmp_path / "corpus"), steps=2), 768 * MEBIBYTE)
    run = make_run(tmp_path / "run", job, tiny_plan(job, pp=1))
    for name, value in environment(devices=1, device_bytes=512 * MEBIBYTE).items():
        monkeypatch.setenv(name, value)
    ranks = start(run, command, 1, *(("--attempt", "1") if command == "train" else ()))
    outcome = ranks.wait(TIMEOUT_SECONDS)
    ranks.kill()
    assert outcome is not None
    assert outcome.failure is not None, "the ranks went on"
    assert outcome.failure.refused, "a retry would come to the same"
    assert outcome.failure.message == (
        "spec.resources.memoryPerRank: 768 MiB is more than the 512 MiB of a device here\n"
        "  remedy: write at most 512Mi, minus the memory of the CUDA context"
    )


def test_a_profile_has_the_launches_and_the_graphs_of_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of the fake runtime take no memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = _on_cuda(tiny_job(write_corpus(tmp_path / "corpus"), steps=2), 768 * MEBIBYTE)
    run = make_run(tmp_path / "run", job, tiny_plan(job, pp=1))
    for name, value in environment(devices=1, device_bytes=1024 * MEBIBYTE).items():
        monkeypatch.setenv(name, value)
    ranks = start(run, "profile", 1)
    outcome = ranks.wait(TIMEOUT_SECONDS)
    ranks.kill()
    assert outcome is not None
    assert outcome.failure is None, outcome.failure
    profile = run.read_profile()
    assert all((record.host_seconds or 0.0) > 0 for record in profile.units)
    assert profile.memory.most_graph_bytes == 8 * MEBIBYTE
    recorded = {(record.unit, record.kind) for record in profile.memory.graphs}
    assert recorded == {(record.unit, record.kind) for record in profile.units if record.kind is not Kind.R}
