"""Measuring a model of which no rank can hold much, in launched ranks whose memory is watched."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.agent.launch import LaunchSpec, Outcome, launch
from penstock.core.job import PipelineJob
from penstock.core.layout import num_parameters
from penstock.core.profile import Profile
from penstock.planner.fit import measured_cost
from tests.support.repository import ROOT

MEMORY_BYTES = 512 * 2**20
RANKS = 2
JOB = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "PipelineJob",
    "metadata": {"name": "deep"},
    "spec": {
        "model": {"family": "llama", "layers": 96, "hidden": 256, "heads": 4, "vocab": 300},
        "data": {"source": "nowhere", "sequenceLength": 32},
        "training": {"globalBatch": 1, "steps": 2},
        "resources": {"ranks": RANKS, "memoryPerRank": "512Mi"},
    },
}


def test_measuring_holds_no_more_than_a_plan_may(tmp_path: Path) -> None:
    spec = PipelineJob.from_manifest(JOB).spec
    assert spec.resources.memory_per_rank == MEMORY_BYTES
    assert num_parameters(spec.model) * 16 > RANKS * MEMORY_BYTES, "two ranks must not be able to hold it"
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    ranks = launch(
        LaunchSpec(
            module="tests.support.profiled_rank",
            arguments=(str(tmp_path),),
            num_ranks=RANKS,
            threads_per_rank=1,
            log_folder=tmp_path / "logs",
            status_folder=tmp_path,
            environment={"PYTHONPATH": str(ROOT)},
        )
    )
    assert ranks.wait(300.0) == Outcome(exit_code=0, failure=None)
    peaks = [int((tmp_path / f"peak-{rank}").read_text()) for rank in range(RANKS)]
    assert max(peaks) <= MEMORY_BYTES, [f"{peak >> 20} MiB" for peak in peaks]
    cost = measured_cost(Profile.from_manifest(json.loads((tmp_path / "profile.json").read_text())))
    assert cost.optimizer_seconds(num_parameters(spec.model)) > 0
