"""Overlapped pairs of actions in real processes: gradients are those of the unsliced model, and those of the same order
run one action after the other, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.schedule import CSV, Kind, ScheduleSpec, flatten, parse_schedule
from penstock.planner.compile import program_of
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

STRAIGHT = """\
0F0,0F1,0F2,(0F3;0B0)OVERLAP_F_B,0B1,0B2,0B3
1F0,(1F1;1B0)OVERLAP_F_B,(1B1;1F2)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,1B3
"""
"""1F1B with one more forward in its warm-up, so that each steady pair is of independent actions."""

SPLIT = """\
0F0.0,0F0.1,0F1.0,(0F1.1;0I0.1)OVERLAP_F_B,0W0.1,0I0.0,0W0.0,0I1.1,0W1.1,0I1.0,0W1.0
1F0.0,1F0.1,(1F1.0;1I0.1)OVERLAP_F_B,1W0.1,(1I0.0;1F1.1)OVERLAP_F_B,1W0.0,1I1.1,1W1.1,1I1.0,1W1.0
"""

WAVE = """\
0F0,0F1,3F0,(0F2;3B0)OVERLAP_F_B,3F1,3B1,3F2,3B2,0B0,0B1,0B2
1F0,2F0,1F1,2F1,1F2,(2F2;2B0)OVERLAP_F_B,2B1,2B2,1B0,1B1,1B2
"""
"""A V, whose pairs are of two stages."""


def plan_of(text: str, family: Family, *, tp: int, sequence_parallel: bool) -> Plan:
    """The small model's plan for this schedule."""
    schedule, _ = parse_schedule(text)
    plan = small_plan(
        family=family,
        slices=(12,) if schedule.num_slices == 1 else (7, 5),
        pp=len(schedule.ranks),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        layers=4,
    )
    spec = ScheduleSpec(generator=CSV, text=text)
    return replace(plan, tp=tp, sequence_parallel=sequence_parallel, schedule=spec)


@pytest.mark.parametrize(
    ("text", "family", "tp", "sequence_parallel"),
    [
        (STRAIGHT, Family.LLAMA, 2, True),
        (STRAIGHT, Family.GPT2, 2, False),
        (SPLIT, Family.GPT2, 2, True),
        (SPLIT, Family.LLAMA, 4, False),
        (WAVE, Family.LLAMA, 2, True),
    ],
)
def test_gradients_are_those_of_the_whole_model_and_of_the_serial_order(
    worker_pool: WorkerPool, text: str, family: Family, tp: int, sequence_parallel: bool
) -> None:
    braided = plan_of(text, family, tp=tp, sequence_parallel=sequence_parallel)
    schedule, _ = parse_schedule(text)
    apart = replace(schedule, ranks=tuple(tuple(flatten(row)) for row in schedule.ranks))
    serial = replace(braided, schedule=ScheduleSpec(generator=CSV, text=apart.to_csv()))
    results = []
    for plan in (braided, serial):
        program = program_of(plan)
        kinds = {instruction.action.kind for rank in program.ranks for instruction in rank.instructions}
        assert (Kind.OVERLAP in kinds) == (plan is braided)
        worker_pool.connect(plan, program)
        results.append(worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))
        check_sharded(plan, results[-1])
    for own, other in zip(*results, strict=True):
        assert (own.loss, own.evaluated_loss) == (other.loss, other.evaluated_loss)
        for stage, gradients in own.gradients.items():
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(gradient, other.gradients[stage][name], name)
