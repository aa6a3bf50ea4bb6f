"""A job that fits only with recomputation and a divided optimizer state loses a pod on two real nodes, and resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.job import API_VERSION, JobSpec, PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.remaking import Recompute
from penstock.core.units import MEBIBYTE
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import local_losses, offering, small_spec, small_training, submitted
from tests.support.installed import Installed
from tests.support.losing import BEGUN_STEPS, SAVED_STEPS, delete_a_pod

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS), pytest.mark.long]

STEPS = 60
ROOMY_BYTES = 4096 * MEBIBYTE
CORES = 4
"""That a node offers: a pod asks for a core for each of its two ranks, and for a little more."""

MESH = {"dp": 2, "tp": 1, "pp": 2, "microBatch": 1, "slices": 1, "schedule": "1f1b", "stages": [4, 4]}
WIDE: dict[str, Any] = {
    "model": {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "ffnHidden": 1024},
    "data": {**small_spec("")["data"], "sequenceLength": 512},
    "kubernetes": {"ranksPerPod": 2},
    "parallelism": MESH,
}


def spec_with(steps: int, memory_bytes: int) -> dict[str, Any]:
    """Fields of the job's spec with so much memory for a rank."""
    resources = {"ranks": 4, "memoryPerRank": f"{memory_bytes // MEBIBYTE}Mi"}
    return {**WIDE, "resources": resources, "training": small_training(steps)}


def roomy_job(on: Installed) -> PipelineJob:
    """The job with much memory; its vocabulary is that of its tokenizer."""
    spec = small_spec(on.cluster.image, **spec_with(STEPS, ROOMY_BYTES))
    head = {"apiVersion": API_VERSION, "kind": "PipelineJob", "metadata": {"name": "roomy"}}
    return PipelineJob.from_manifest({**head, "spec": spec})


def least_bytes(spec: JobSpec, profile: Profile) -> int:
    """The least memory of a rank, to a MiB, with which the job can be planned."""
    low, high = 1, ROOMY_BYTES // MEBIBYTE
    while high - low > 1:
        middle = (low + high) // 2
        resources = dataclasses.replace(spec.resources, memory_per_rank=middle * MEBIBYTE)
        try:
            decide(problem_from_profile(dataclasses.replace(spec, resources=resources), profile))
            high = middle
        except UserError:
            low = middle
    return high * MEBIBYTE


def only_with_both(spec: JobSpec, profile: Profile) -> int:
    """A limit between the least memory with recomputation and zero 1, and the least memory without one of them."""
    pins = spec.parallelism
    without = (dataclasses.replace(pins, zero=0), dataclasses.replace(pins, recompute=Recompute.NONE))
    free = least_bytes(spec, profile)
    others = min(least_bytes(dataclasses.replace(spec, parallelism=pin), profile) for pin in without)
    assert others - free > 4 * MEBIBYTE, "the job needs both features by a clear margin"
    return (free + others) // 2


def test_a_job_that_fits_only_with_both_goes_on_after_a_pod_is_lost(on: Installed, tmp_path: Path) -> None:
    with offering(on, CORES):
        measured = submitted(on, "roomy", **spec_with(1, ROOMY_BYTES))
        measured.wait_for(Phase.SUCCEEDED)
        limit = only_with_both(roomy_job(on).spec, measured.run(1).read_profile())

        tight = spec_with(STEPS, limit)
        job = submitted(on, "tight", **tight)
        job.wait_for_step(BEGUN_STEPS)
        delete_a_pod(on, job)
        job.wait_for(Phase.SUCCEEDED, attempt=2)
    assert min(job.losses_of(2)) >= SAVED_STEPS
    for attempt in (1, 2):
        plan = job.run(attempt).read_plan()
        assert plan.zero == 1
        assert any(plan.recompute)
    assert job.losses() == local_losses(on, tmp_path, small_spec(on.cluster.image, **tight), job.run(1))
