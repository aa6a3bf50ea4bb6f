"""A job's status in its manifest form, and whose part is whose."""

from __future__ import annotations

import math

import pytest

from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase
from penstock.core.pod import PodBinding
from penstock.core.speed import Speed
from penstock.core.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    JobProgress,
    JobStatus,
    PlanStatus,
    operator_part,
)

SPEED = Speed(tokens_per_second_per_device=4096.0, model_flops_utilization=0.5)
STATUS = JobStatus(
    observed_generation=3,
    phase=Phase.RUNNING,
    reason="Bound",
    attempt=2,
    launched=2,
    ranks=4,
    failures=1,
    phase_entered_at=1_792_000_000.25,
    plan=PlanStatus(digest="ab", summary="pp 4, 8 slices, zb", step_seconds=1.5, speed=SPEED, peak_bytes=2**30),
    conditions=(Condition(type=ConditionType.PLANNED, status=ConditionStatus.TRUE, reason="Planned"),),
    progress=JobProgress(attempt=2, epoch=1, step=7, loss=2.5, speed=SPEED, reported_at=1_792_000_100.0),
)
BINDING = PodBinding(
    pod_uid="u", attempt=2, epoch=1, node_rank=0, num_nodes=2, ranks_per_pod=1, master="10.0.0.1", port=29500
)


def test_round_trip() -> None:
    assert JobStatus.from_manifest(STATUS.to_manifest()) == STATUS
    assert PodBinding.from_manifest(BINDING.to_manifest()) == BINDING


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_json_cannot_represent(loss: float) -> None:
    written = JobProgress(attempt=1, loss=loss).to_manifest()
    assert isinstance(written["loss"], str)
    read = JobProgress.from_manifest(written).loss
    assert read is not None
    assert math.isnan(read) if math.isnan(loss) else read == loss


@pytest.mark.parametrize("loss", ["nothing", "", "1,5"])
def test_a_loss_that_is_no_number_is_refused(loss: str) -> None:
    with pytest.raises(UserError, match=r"status.progress.loss"):
        JobStatus.from_manifest({"progress": {"attempt": 1, "loss": loss}}, "status")


def test_the_operator_leaves_progress_to_the_service() -> None:
    part = operator_part(STATUS)
    assert "progress" not in part
    assert part["plan"] == {
        "digest": "ab",
        "summary": "pp 4, 8 slices, zb",
        "stepSeconds": 1.5,
        "speed": SPEED.to_manifest(),
        "peakBytes": 2**30,
    }


def test_a_condition_by_its_type() -> None:
    assert STATUS.condition(ConditionType.PLANNED) == STATUS.conditions[0]
    assert STATUS.condition(ConditionType.FAILED) is None
