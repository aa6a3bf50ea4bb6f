"""`penstock run` with ``device: cuda`` on the fake CUDA runtime: profile, plan, train, checkpoint, report, resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.run.folder import RunDir
from penstock.planner.compile import program_of
from tests.support.command import Command, tiny_job
from tests.support.fakecuda.build import environment
from tests.support.fakecuda.nccl_log import RankLog, check, expected_messages, most_receives_in_a_row, read_logs

GIBIBYTE = 2**30
STEPS = 4
EVERY = 2
CASES: dict[str, dict[str, Any]] = {
    "llama-bf16": {
        "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kvHeads": 2},
        "parallelism": {"dp": 2, "pp": 2, "microBatch": 1, "schedule": "zb-h1", "slices": [20, 12]},
        "precision": "bf16",
    },
    "gpt2-fp32": {
        "model": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4},
        "parallelism": {"dp": 2, "pp": 2, "microBatch": 1, "schedule": "1f1b", "slices": [20, 12]},
        "precision": "fp32",
    },
}


def _job(folder: Path, case: str, steps: int, **checkpoint: Any) -> Path:
    spec = CASES[case]
    return tiny_job(
        folder,
        model=spec["model"],
        parallelism=spec["parallelism"],
        training={"globalBatch": 4, "steps": steps, "precision": spec["precision"]},
        resources={"device": "cuda", "ranks": 4, "memoryPerRank": "768Mi"},
        checkpoint={"everySteps": EVERY, **checkpoint},
        runPolicy={"backoffLimit": 0},
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["llama-bf16", pytest.param("gpt2-fp32", marks=pytest.mark.long)])
def test_a_job_on_cuda_runs_from_profile_to_resume(case: str, tmp_path: Path) -> None:
    log = tmp_path / "nccl"
    log.mkdir()
    command = Command(tmp_path, dict(environment(devices=4, device_bytes=GIBIBYTE, log=log)))
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")

    output, errors = command("run", _job(tmp_path, case, STEPS), "--run-dir", first.root, "--output", "json")
    assert json.loads(output)["phase"] == "Succeeded", errors
    plan = first.read_plan()
    assert (plan.dp, plan.pp, plan.slices) == (2, 2, (20, 12))
    assert [entry.step for entry in first.read_metrics()] == list(range(STEPS))
    assert (first.root / "report.html").exists()
    logs, program = read_logs(log)[-plan.num_ranks :], program_of(plan)
    check(logs, plan, program, STEPS)
    _check_receives(logs, plan, program)

    shutil.rmtree(log)
    log.mkdir()
    newest = max(first.checkpoints.glob("*/*/"), key=lambda path: path.stat().st_mtime_ns)
    job = _job(tmp_path, case, STEPS + EVERY, resumeFrom=str(newest))
    output, errors = command("run", job, "--run-dir", second.root, "--output", "json")
    assert json.loads(output)["phase"] == "Succeeded", errors
    assert "measure" not in errors, "the kept profile is fresh"
    assert [entry.step for entry in second.read_metrics()] == list(range(STEPS, STEPS + EVERY))
    check(read_logs(log), plan, program_of(second.read_plan()), EVERY)


def _check_receives(logs: Sequence[RankLog], plan: Plan, program: Program) -> None:
    """No receive before the actions that it is for draw near: none that a rank's first two actions do not wait for."""
    assert plan.late_receives
    for log in logs:
        pipeline_rank = log.rank % plan.pp
        num_messages = len(list(expected_messages(program, pipeline_rank)))
        for step in islice(log.steps(num_messages), STEPS):
            assert most_receives_in_a_row(step) <= 2
            assert pipeline_rank or step[0].operation == "send", "rank 0's first action needs no receive"
