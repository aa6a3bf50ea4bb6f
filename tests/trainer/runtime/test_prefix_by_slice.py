"""Plans whose slices have their own keys and values: the same bits as with those of whole micro-batches, in less
memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.core.layout import Precision, prefix_bytes
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.planner.compile import program_of
from penstock.trainer.runtime import Batch, Runtime
from tests.support.pipeline_ranks import GradientKeeper, expected, sample
from tests.support.small_plans import small_plan
from tests.support.stage_pipeline import gradient_error
from tests.support.threaded_run import ThreadedRun

LONG = (3, 1, 5, 2, 4)


def both(plan: Plan) -> tuple[Plan, Plan]:
    """With keys and values of whole micro-batches, and slice by slice."""
    return replace(plan, prefix_by_slice=False), replace(plan, prefix_by_slice=True)


def kept(run: ThreadedRun) -> dict[str, Tensor]:
    keepers = [keeper for own in run.optimizers for keeper in own.values()]
    return {
        name: tensor for keeper in keepers if isinstance(keeper, GradientKeeper) for name, tensor in keeper.kept.items()
    }


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP64])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_losses_and_gradients_have_the_same_bits(family: Family, precision: Precision, schedule: str) -> None:
    plan = small_plan(family=family, schedule=schedule, slices=LONG, num_microbatches=3, precision=precision, layers=4)
    whole, own = (ThreadedRun(each) for each in both(plan))
    assert whole.train_step() == own.train_step()
    theirs, ours = kept(whole), kept(own)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_smaller_last_micro_batch_has_the_same_bits() -> None:
    plan = small_plan(slices=LONG, num_microbatches=3, remainder=1, remainder_slices=(7, 8), precision=Precision.FP32)
    whole, own = (ThreadedRun(each) for each in both(plan))
    assert whole.train_step() == own.train_step()


def test_steps_do_not_leak_into_each_other() -> None:
    """Freed slots are poisoned, and the memory for a unit's keys is that of every action."""
    run = ThreadedRun(both(small_plan(slices=LONG, num_microbatches=4))[1])
    assert run.train_step() == run.train_step()


def test_evaluation_gives_the_loss_of_whole_micro_batches() -> None:
    plan = small_plan(slices=LONG, num_microbatches=2)
    ids, labels = sample(plan.model.vocab, plan.microbatch, plan.sequence_length)

    def loss(_: int, runtime: Runtime) -> float:
        return runtime.evaluate(0, ids, labels)

    whole, own = (ThreadedRun(each).on_every_rank(loss) for each in both(plan))
    assert whole == own


def test_training_continues_after_an_evaluation() -> None:
    run = ThreadedRun(both(small_plan(slices=LONG, num_microbatches=2))[1])
    plan = run.plan
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    batch = Batch(token_ids=ids, labels=labels, num_valid_tokens=int((labels >= 0).sum()))

    def losses(_: int, runtime: Runtime) -> tuple[float, float]:
        first = runtime.train_step(0, batch).loss_sum
        runtime.evaluate(0, ids[: plan.microbatch], labels[: plan.microbatch])
        return first, runtime.train_step(1, batch).loss_sum

    assert all(first == second for first, second in run.on_every_rank(losses))


@pytest.mark.parametrize("num_microbatches", [2, 6])
def test_the_arena_and_the_memory_for_prefixes_are_smaller_together(num_microbatches: int) -> None:
    """With several layers per rank, and slices enough."""
    plan = small_plan(slices=(2,) * 8, num_microbatches=num_microbatches, precision=Precision.FP32, layers=16)
    whole, own = (program_of(each) for each in both(plan))
    needed = prefix_bytes(plan.model, plan.precision, plan.microbatch, plan.slices)
    for ours, theirs in zip(own.ranks, whole.ranks, strict=True):
        assert ours.arena_bytes + needed < theirs.arena_bytes


def test_a_prefix_in_several_copies_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four keys at a time, where slices are longer and shorter than that."""
    monkeypatch.setattr("penstock.trainer.units.build.KEYS_AT_ONCE", 4)
    monkeypatch.setattr("penstock.core.layout.KEYS_AT_ONCE", 4)
    plan = both(small_plan(slices=LONG, num_microbatches=2))[1]
    run, wanted = ThreadedRun(plan), expected(plan.model, plan.global_batch, plan.sequence_length)
    assert run.train_step() == pytest.approx([wanted.loss] * plan.pp, rel=1e-12)
    assert gradient_error(kept(run), wanted.gradients) < 1e-10
