"""Steps and evaluations of whole plans, ranks as threads."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.core.errors import RunError, UserError
from penstock.core.job import TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Instruction
from penstock.core.schedule import COMPUTE_KINDS, Kind, Part
from penstock.trainer.executor import StageExecutor
from penstock.trainer.interpreter import Operation
from penstock.trainer.optimizer import AdamW
from penstock.trainer.optimizer_step import Totals, finite_norm, loss_of
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stage import Stage
from tests.support.pipeline_ranks import GradientKeeper, expected, sample
from tests.support.reference_model import reference_logits, reference_loss
from tests.support.small_plans import looped_schedule, remade_units, small_plan
from tests.support.stage_pipeline import fill_rows
from tests.support.threaded_run import ThreadedRun


def batch_of(plan: Plan, rank: int, ids: Tensor, labels: Tensor) -> Batch:
    share = plan.global_batch // plan.dp
    first = plan.mesh.replica(rank) * share
    own = slice(first, first + share)
    return Batch(token_ids=ids[own], labels=labels[own], num_valid_tokens=int((labels >= 0).sum()))


def train(run: ThreadedRun, *, num_steps: int, first: int = 0) -> list[list[Totals]]:
    """The totals of every step, of every rank."""
    ids, labels = sample(run.plan.model.vocab, run.plan.global_batch, run.plan.sequence_length)

    def steps(rank: int, runtime: Runtime) -> list[Totals]:
        return [
            runtime.train_step(step, batch_of(run.plan, rank, ids, labels)) for step in range(first, first + num_steps)
        ]

    return [list(each) for each in zip(*run.on_every_rank(steps), strict=True)]


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("dp", [1, 2])
def test_every_rank_learns_the_same_totals(family: Family, dp: int) -> None:
    run = ThreadedRun(small_plan(family=family, dp=dp, pp=3, num_microbatches=2))
    wanted = expected(run.plan.model, run.plan.global_batch, run.plan.sequence_length)
    (totals,) = train(run, num_steps=1)
    assert len({each.loss_sum for each in totals}) == 1
    assert totals[0].loss_sum == pytest.approx(wanted.loss, rel=1e-12)
    assert [each.gradient_norm for each in totals] == pytest.approx([wanted.norm] * len(totals), rel=1e-12)
    assert all(each.peak_bytes == totals[0].peak_bytes for each in totals)
    assert len(totals[0].peak_bytes) == run.mesh.num_ranks
    assert min(totals[0].peak_bytes) > 2**20
    assert not totals[0].stop


def test_steps_do_not_leak_into_each_other() -> None:
    """Poisoned slots and cleared gradients: the same batch gives the same gradients, bit for bit."""
    run = ThreadedRun(small_plan(schedule="zb", pp=2, num_microbatches=3, slices=(5, 1, 6)))
    first, second = train(run, num_steps=2)
    assert first[0].loss_sum == second[0].loss_sum
    assert first[0].gradient_norm == second[0].gradient_norm


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize(("pp", "num_stages"), [(2, 4), (2, 6), (1, 3)])
def test_reductions_next_to_compute_give_the_bits_of_those_at_the_end(family: Family, pp: int, num_stages: int) -> None:
    """In fp32, where another order of summands would show; a tied matrix is summed over its copies before replicas."""
    order = looped_schedule(num_ranks=pp, num_stages=num_stages, num_microbatches=2, num_slices=3)
    plan = small_plan(
        family=family,
        schedule=order,
        dp=2,
        pp=pp,
        num_stages=num_stages,
        num_microbatches=2,
        precision=Precision.FP32,
    )
    kept: list[list[dict[str, Tensor]]] = []
    num_early = []
    for late in (False, True):
        run = ThreadedRun(replace(plan, late_receives=late))
        actions = [instruction.action for instruction in run.program.ranks[0].instructions]
        end = max(at for at, action in enumerate(actions) if action.is_compute)
        num_early.append(sum(action.kind is Kind.START_REDUCE for action in actions[:end]))
        train(run, num_steps=1)
        keepers = [keeper for own in run.optimizers for keeper in own.values()]
        kept.append([keeper.kept for keeper in keepers if isinstance(keeper, GradientKeeper)])
    assert num_early[0] > num_early[1] == 0
    for early, at_end in zip(*kept, strict=True):
        assert early.keys() == at_end.keys()
        assert all(torch.equal(early[name], at_end[name]) for name in early)


def test_one_request_stops_all_ranks_after_the_same_step() -> None:
    run = ThreadedRun(small_plan(dp=2, pp=2), stop_requests={3})
    (totals,) = train(run, num_steps=1)
    assert all(each.stop for each in totals)


@pytest.mark.parametrize("family", Family)
def test_training_is_the_same_however_the_model_is_divided(family: Family) -> None:
    """Six steps of AdamW with clipping at work: pipelines, replicas and stages that share a rank agree."""
    training = TrainingSpec(steps=6, clip=0.1, global_batch=4)

    def losses(plan: Plan) -> list[float]:
        run = ThreadedRun(plan, make_optimizer=lambda stage: AdamW(stage.parameters, training))
        return [totals[0].loss_sum for totals in train(run, num_steps=6)]

    looped = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3)
    alone = losses(small_plan(family=family, pp=1, num_microbatches=2))
    assert alone[-1] < alone[0]
    for plan in (
        small_plan(family=family, pp=3, num_microbatches=2),
        small_plan(family=family, pp=2, dp=2, num_microbatches=1, slices=(7, 5)),
        small_plan(family=family, pp=2, dp=2, num_microbatches=1, slices=(7, 5), zero=1),
        small_plan(family=family, pp=2, num_stages=4, num_microbatches=2, schedule=looped),
    ):
        assert losses(plan) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "recompute", "parts"])
@pytest.mark.parametrize(("dp", "zero", "family"), [(1, 0, Family.LLAMA), (2, 0, Family.GPT2), (2, 1, Family.GPT2)])
def test_a_warm_up_runs_every_shape_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, schedule: str, dp: int, zero: int, family: Family
) -> None:
    """Also over an arena that holds NaN, like memory that was never cleared, and in the middle of training."""
    training = TrainingSpec(steps=3, clip=0.1, global_batch=4)
    plan = small_plan(family=family, dp=dp, zero=zero, pp=2, schedule="zb", num_microbatches=2)
    if schedule in ("recompute", "parts"):
        units = remade_units(4) if schedule == "parts" else ()
        order = looped_schedule(
            num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3, recompute=True, num_units=units
        )
        plan = small_plan(family=family, dp=dp, zero=zero, pp=2, num_stages=4, num_microbatches=2, schedule=order)
    run: list[tuple[Kind, int, int | None, Part | None]] = []  # of all ranks' threads: an append is atomic
    launched = StageExecutor.launched

    def counting(self: StageExecutor, instruction: Instruction) -> Operation:
        operation, action = launched(self, instruction), instruction.action

        def counted() -> None:
            run.append((action.kind, action.stage, action.slice, action.part))
            operation()

        return counted

    def weights_after_three_steps(*, warm: bool) -> list[Tensor]:
        threads = ThreadedRun(plan, make_optimizer=lambda stage: AdamW(stage.parameters, training))
        for step in range(3):
            if warm:
                threads.on_every_rank(lambda rank, runtime: runtime.warm_up())
            train(threads, num_steps=1, first=step)
        return [stage.parameters.compute_flat for own in threads.stages for stage in own.values()]

    cold = weights_after_three_steps(warm=False)
    warm = weights_after_three_steps(warm=True)
    assert all(torch.equal(one, other) for one, other in zip(cold, warm, strict=True))
    monkeypatch.setattr(StageExecutor, "launched", counting)
    program = ThreadedRun(plan).program
    threads = ThreadedRun(plan)
    threads.on_every_rank(lambda rank, runtime: runtime.warm_up())
    actions = [i.action for own in program.ranks for i in own.instructions if i.action.kind in COMPUTE_KINDS]
    assert Counter(run) == dict.fromkeys(((a.kind, a.stage, a.slice, a.part) for a in actions), plan.dp)


@pytest.mark.parametrize("num_sequences", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_evaluation_takes_any_number_of_sequences(num_sequences: int, schedule: str) -> None:
    """Micro-batches hold two; what is missing counts for nothing."""
    run = ThreadedRun(small_plan(pp=3, schedule=schedule, num_microbatches=3, slices=(5, 1, 6)))
    ids, labels = sample(run.plan.model.vocab, num_sequences, run.plan.sequence_length)
    losses = run.on_every_rank(lambda rank, runtime: runtime.evaluate(0, ids, labels))
    weights = {name: w for own in run.stages for stage in own.values() for name, w in stage.parameters.master.items()}
    assert losses == pytest.approx([float(reference_loss(run.plan.model, weights, ids, labels))] * 3, rel=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_evaluation_between_steps_changes_nothing(recompute: bool) -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3, recompute=recompute)
    plan = small_plan(pp=2, num_stages=4, num_microbatches=2, schedule=schedule)
    run = ThreadedRun(plan)
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    (before,) = train(run, num_steps=1)
    evaluated = run.on_every_rank(lambda rank, runtime: runtime.evaluate(0, ids, labels))
    (after,) = train(run, num_steps=1)
    assert evaluated == pytest.approx([before[0].loss_sum] * 2, rel=1e-12)
    assert before[0].loss_sum == after[0].loss_sum
    assert before[0].gradient_norm == after[0].gradient_norm


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prompt_tokens", [1, 5, 11])
def test_a_text_is_continued_by_the_stages_that_are_there(prompt_tokens: int, recompute: bool) -> None:
    """On every plan the most likely tokens are the reference's, and training goes on as if nothing had been."""
    looped = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3, recompute=recompute)
    for plan in (
        small_plan(pp=1, family=Family.GPT2),
        small_plan(pp=3, dp=2, num_microbatches=2, slices=(5, 1, 6)),
        small_plan(pp=2, schedule="zbv", num_microbatches=3, slices=(12,)),
        small_plan(pp=2, num_stages=4, num_microbatches=2, schedule=looped),
        small_plan(pp=2, num_stages=4, num_microbatches=2, schedule=looped, head_parts=3, layers=1),
        small_plan(pp=2, dp=2, schedule="zbv", family=Family.GPT2, head_parts=2, layers=1),
    ):
        run = ThreadedRun(plan)
        (before,) = train(run, num_steps=1)
        prompt = [(11 * i + 3) % plan.model.vocab for i in range(prompt_tokens)]
        texts = run.on_every_rank(lambda rank, runtime: runtime.continue_from(1, prompt, 12, greedy))  # noqa: B023
        assert texts == [_continued(run, prompt, 12)] * run.mesh.num_ranks
        (after,) = train(run, num_steps=1)
        assert (before[0].loss_sum, before[0].gradient_norm) == (after[0].loss_sum, after[0].gradient_norm)


def greedy(logits: Tensor) -> int:
    assert logits.dim() == 1
    return int(logits.argmax())


def _continued(run: ThreadedRun, prompt: list[int], length: int) -> list[int]:
    weights: dict[str, Tensor] = {}
    for own in run.stages:
        for stage in own.values():
            for name, tensor in stage.parameters.master.items():
                fill_rows(stage.parameters.declared[name], weights, tensor)
    ids = list(prompt)
    while len(ids) < length:
        ids.append(int(reference_logits(run.plan.model, weights, torch.tensor([ids]))[0, -1].argmax()))
    return ids


def test_a_text_ends_for_all_ranks_when_the_one_that_chooses_says_so() -> None:
    run = ThreadedRun(small_plan(pp=3, dp=2))
    chosen = iter([7, 0, None])
    texts = run.on_every_rank(lambda rank, runtime: runtime.continue_from(0, [1, 2], 12, lambda logits: next(chosen)))
    assert texts == [[1, 2, 7, 0]] * 6
    assert run.on_every_rank(lambda rank, runtime: runtime.continue_from(0, [1] * 12, 12, greedy)) == [[1] * 12] * 6


def test_replicas_evaluate_their_own_shares() -> None:
    run = ThreadedRun(small_plan(dp=2, pp=2))
    ids, labels = sample(run.plan.model.vocab, 4, run.plan.sequence_length)

    def evaluate(rank: int, runtime: Runtime) -> float:
        share = slice(0, 2) if rank < 2 else slice(2, 4)
        return runtime.evaluate(0, ids[share], labels[share])

    wanted = expected(run.plan.model, 4, run.plan.sequence_length).loss
    assert run.on_every_rank(evaluate) == pytest.approx([wanted] * 4, rel=1e-12)


def test_a_rank_that_fails_is_named_and_its_peers_do_not_hang() -> None:
    """Rank 1's optimizer fails. In the next step rank 0's messages are not received."""
    run = ThreadedRun(small_plan(pp=2), make_optimizer=FullDisk, timeout_seconds=0.2)
    ids, labels = sample(run.plan.model.vocab, run.plan.global_batch, run.plan.sequence_length)

    def step(rank: int, runtime: Runtime) -> str:
        try:
            for number in (5, 6):
                runtime.train_step(number, batch_of(run.plan, rank, ids, labels))
        except RunError as error:
            return str(error)
        return ""

    assert run.on_every_rank(step) == [
        "rank 0, step 6: 0WAIT_SEND_F0.0 on channel 0->1F failed: 0->1F carried nothing for 0.2 s",
        "rank 1, step 5: 1STEP failed: no room",
    ]


class FullDisk(GradientKeeper):
    """An optimizer that fails on the last stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.parameters)
        self._fails = stage.stop == stage.spec.num_units

    def step(self, step: int, squared_norm: Tensor) -> None:
        if self._fails:
            raise OSError("no room")
        super().step(step, squared_norm)


@pytest.mark.parametrize("squared_norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_the_user_s_to_change(squared_norm: float) -> None:
    with pytest.raises(UserError, match=r"training diverged: the gradient's norm in step 7 is (nan|inf)"):
        finite_norm(7, squared_norm)


def test_a_negative_sum_of_squares_says_what_is_wrong_and_may_be_tried_again() -> None:
    with pytest.raises(RunError, match=r"the sum of squared gradients over all ranks is -2\.5, which is impossible"):
        finite_norm(7, -2.5)


def test_a_diverged_step_changes_no_weight() -> None:
    training = TrainingSpec(steps=1, global_batch=4)
    run = ThreadedRun(small_plan(pp=2), make_optimizer=lambda stage: AdamW(stage.parameters, training))
    flat = [stage.parameters.compute_flat for own in run.stages for stage in own.values()]
    flat[1][0] = math.nan
    before = [each.clone() for each in flat]
    ids, labels = sample(run.plan.model.vocab, run.plan.global_batch, run.plan.sequence_length)

    def step(rank: int, runtime: Runtime) -> None:
        with pytest.raises(UserError, match=f"rank {rank}, step 0: training diverged"):
            runtime.train_step(0, batch_of(run.plan, rank, ids, labels))

    run.on_every_rank(step)
    for now, then in zip(flat, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_loss_is_per_token() -> None:
    totals = Totals(loss_sum=10.0, gradient_norm=1.0, stop=False, peak_bytes=())
    assert loss_of(totals, 4) == 2.5
    assert math.isnan(loss_of(totals, 0))


def test_bf16_gradients_are_near_those_of_fp64() -> None:
    """The same weights rounded to bf16: the whole gradient points the same way."""
    run = ThreadedRun(small_plan(precision=Precision.BF16, pp=2, num_microbatches=2))
    train(run, num_steps=1)
    wanted = expected(run.plan.model, run.plan.global_batch, run.plan.sequence_length)
    dot = found = 0.0
    for keepers in run.optimizers:
        for keeper in keepers.values():
            assert isinstance(keeper, GradientKeeper)
            for name, gradient in keeper.kept.items():
                assert gradient.dtype == torch.float32
                dot += float((gradient.double() * wanted.gradients[name]).sum())
                found += float(gradient.double().square().sum())
    assert dot / (math.sqrt(found) * wanted.norm) > 0.999
