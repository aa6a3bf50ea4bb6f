"""Whole steps whose ranks are divided over shards: the unsliced model's gradients, losses and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.job import TrainingSpec
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.planner.compile import program_of
from penstock.trainer.optimizer import AdamW
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded, check_threads
from tests.support.small_plans import looped_schedule, small_plan
from tests.support.threaded_run import ThreadedRun
from tests.support.worker_pool import WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")


def sharded(plan: Plan, tp: int, *, sequence_parallel: bool = True, kv_heads: int | None = None) -> Plan:
    """The plan with shards, and other key/value heads where given."""
    model = plan.model if kv_heads is None else replace(plan.model, kv_heads=kv_heads)
    return replace(plan, model=model, tp=tp, sequence_parallel=sequence_parallel)


LOOPED = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3, recompute=True)

PLANS = {
    "by tokens": sharded(small_plan(pp=2, num_microbatches=2), 2),
    "whole hidden states": sharded(small_plan(pp=2, num_microbatches=2), 2, sequence_parallel=False),
    "four shards, copied heads": sharded(small_plan(pp=1, num_microbatches=2, slices=(5, 1, 6)), 4),
    "one head on all": sharded(small_plan(pp=1, slices=(12,)), 4, kv_heads=1),
    "copied heads, whole hidden states": sharded(small_plan(pp=1), 4, sequence_parallel=False),
    "tied, replicas": sharded(small_plan(family=Family.GPT2, pp=2, dp=2, slices=(7, 5)), 2),
    "tied, whole hidden states": sharded(small_plan(family=Family.GPT2, pp=2), 2, sequence_parallel=False),
    "tied on one rank": sharded(small_plan(family=Family.GPT2, pp=1, num_stages=1), 2),
    "split backward": sharded(small_plan(schedule="zb", pp=2, num_microbatches=3, slices=(5, 1, 6)), 2),
    "early reductions, replicas": sharded(
        small_plan(family=Family.GPT2, schedule=LOOPED, pp=2, dp=2, num_stages=4, num_microbatches=2), 2
    ),
    "a smaller last micro-batch": sharded(
        small_plan(pp=2, num_microbatches=2, microbatch=3, remainder=1, remainder_slices=(7, 5)), 2
    ),
}
NAMES = list(PLANS)


@pytest.mark.parametrize("name", NAMES)
def test_threads_find_the_whole_models_gradients(name: str) -> None:
    check_threads(PLANS[name])


@POOLED
@pytest.mark.parametrize("name", ["by tokens", "four shards, copied heads", "tied, replicas", "whole hidden states"])
def test_processes_find_the_whole_models_gradients(worker_pool: WorkerPool, name: str) -> None:
    plan = PLANS[name]
    program = program_of(plan)
    worker_pool.connect(plan, program)
    check_sharded(plan, worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", Family)
def test_training_is_the_same_however_many_shards_there_are(family: Family, sequence_parallel: bool) -> None:
    """Four steps of AdamW with clipping at work."""
    training = TrainingSpec(steps=4, clip=0.1, global_batch=4)

    def losses(plan: Plan) -> list[float]:
        run = ThreadedRun(plan, make_optimizer=lambda stage: AdamW(stage.parameters, training))
        run.on_every_rank(lambda rank, runtime: runtime.warm_up())
        return [run.train_step(step)[0] for step in range(4)]

    plan = small_plan(family=family, pp=2, num_microbatches=2)
    alone = losses(plan)
    assert alone[-1] < alone[0]
    for tp in (2, 4):
        assert losses(sharded(plan, tp, sequence_parallel=sequence_parallel)) == pytest.approx(alone, rel=1e-9)


def test_shards_continue_a_text_as_one_rank_does() -> None:
    """The likeliest token at each place."""

    def continued(plan: Plan) -> list[list[int]]:
        run = ThreadedRun(plan)
        return run.on_every_rank(
            lambda rank, runtime: runtime.continue_from(0, [3, 1, 2], 9, lambda logits: int(logits.argmax()))
        )

    plan = small_plan(pp=2)
    (alone, *_) = continued(plan)
    assert len(alone) == 9
    for sequence_parallel in (False, True):
        found = continued(sharded(plan, 2, sequence_parallel=sequence_parallel))
        assert found == [alone] * 4
