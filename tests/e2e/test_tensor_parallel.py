"""Shards on two real nodes: a job with tensor parallelism loses a pod, goes on, and learns what it learns here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.lifecycle import Phase
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import PINNED, local_losses, offering, paced, small_spec, small_training, submitted
from tests.support.installed import PAIR_NODES, Installed
from tests.support.losing import BEGUN_STEPS, SAVED_STEPS, delete_a_pod

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

STEPS = 90
SHARDED: dict[str, Any] = {
    "parallelism": {**PINNED, "tp": 2},
    "resources": {"ranks": 4, "memoryPerRank": "1Gi"},
    "kubernetes": {"ranksPerPod": 2},
    "training": small_training(STEPS),
}
"""A pod has the two shards of a pipeline rank, and each node a pod."""

CORES = 4
"""That a node offers: a pod asks for a core for each of its two ranks, and for a little more."""


@pytest.mark.long
def test_a_job_of_shards_goes_on_after_a_pod_is_lost(on: Installed, tmp_path: Path) -> None:
    with offering(on, CORES), paced(on):
        job = submitted(on, "shards", **SHARDED)
        job.wait_for_step(BEGUN_STEPS)
        assert {pod["spec"]["nodeName"] for pod in job.pods(1)} == set(PAIR_NODES)
        delete_a_pod(on, job)
        job.wait_for(Phase.SUCCEEDED, attempt=2)
    assert min(job.losses_of(2)) >= SAVED_STEPS
    assert job.run(1).read_plan().tp == 2
    spec = small_spec(on.cluster.image, **SHARDED)
    assert job.losses() == local_losses(on, tmp_path, spec, job.run(1))
