"""Recomputation just above and just below the memory that plans need without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from tests.support.planning import TINY_LLAMA, cluster, problem

ROOMY = 2**30
CLOSE = 200
"""The least peak is known up to one part in so many."""


def planned(memory: int, **pins: Any) -> Plan | None:
    """Four ranks with long sequences, whose activations are most of the memory; None if nothing fits."""
    fields = {"model": TINY_LLAMA, "sequence_length": 512, "global_batch": 8, "ranks": 4, "memory": memory}
    try:
        return decide(problem(cluster(num_nodes=1, devices_per_node=4), dp=1, tp=1, pp=4, **fields, **pins)).plan
    except UserError:
        return None


def seconds(plan: Plan | None) -> float:
    """The predicted step."""
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def peak_bytes(plan: Plan | None) -> int:
    """The predicted peak."""
    assert plan is not None
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param({"schedule": "1f1b"}, marks=pytest.mark.long),
        {"schedule": "1f1b", "slices": 1},
        pytest.param({"schedule": "zb"}, marks=pytest.mark.long),
    ],
)
def test_only_buffers_that_do_not_fit_are_recomputed(pins: dict[str, Any]) -> None:
    roomy = planned(ROOMY, **pins)
    at_its_peak = planned(peak_bytes(roomy), **pins)
    assert at_its_peak is not None
    assert not at_its_peak.recompute
    assert seconds(at_its_peak) == seconds(roomy)
    low, high = 1, peak_bytes(roomy)
    while high - low > high // CLOSE:
        middle = (low + high) // 2
        plan = planned(middle, recompute=Recompute.NONE, **pins)
        low, high = (middle, high) if plan is None else (low, peak_bytes(plan))
    above, kept_above, below = (
        planned(high, **pins),
        planned(high, recompute=Recompute.NONE, **pins),
        planned(low, **pins),
    )
    assert seconds(roomy) <= seconds(above) <= seconds(kept_above)
    assert below is not None
    assert any(below.recompute)
    assert peak_bytes(below) <= low
    assert seconds(roomy) <= seconds(below)


GPT_7B = ModelSpec(family=Family.GPT2, layers=32, hidden=4096, heads=32, vocab=51_200, positions=2048)


def test_close_to_the_least_memory_no_pin_is_faster() -> None:
    """Such steps took 9 to 23 s, of 191 slices that fit without recomputation, where 1.6 s fit with all of it: outlines
    that recompute were hardly looked at once anything fitted.
    """
    limit_bytes = int(33.9 * 2**30)

    def planned_pipeline(recompute: Recompute | None) -> Plan:
        job = JobSpec(
            model=GPT_7B,
            data=DataSpec(source="corpus", sequence_length=2048),
            training=TrainingSpec(global_batch=8, steps=1, precision=Precision.BF16),
            resources=ResourcesSpec(ranks=4, memory_per_rank=limit_bytes),
            parallelism=ParallelismSpec(dp=1, tp=1, pp=4, recompute=recompute),
        )
        described = replace(cluster_of(device_kind("a100-80"), 1), devices_per_node=4, nics_per_node=4)
        return decide(problem_from_cluster(job, described)).plan

    free = planned_pipeline(None)
    assert peak_bytes(free) <= limit_bytes
    assert seconds(free) <= seconds(planned_pipeline(Recompute.FULL))
