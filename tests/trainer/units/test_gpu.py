"""The CUDA paths. They need an NVIDIA GPU and say so where there is none: nothing here is covered by other tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import full_remakes
from penstock.planner.compile import program_of
from penstock.trainer import executor
from penstock.trainer.clock import action_timer
from penstock.trainer.graphs import Recorded
from penstock.trainer.local_transport import Fabric
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.network import measure_replay
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from penstock.trainer.units.backends import CudaFlash, Operands, PlainAttention, build_backend
from penstock.trainer.units.linear import Linear
from penstock.trainer.units.norm import FusedRmsNorm, build_norm
from penstock.trainer.units.workspace import Workspace
from tests.support.pipeline_ranks import SEED, GradientKeeper
from tests.support.reference_model import reference_gradients
from tests.support.small_plans import small_plan, widened
from tests.support.stage_pipeline import HandPipeline, gradient_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: CUDA kernels need an NVIDIA GPU"),
]

SPEC = ModelSpec(family=Family.LLAMA, layers=1, hidden=128, heads=4, kv_heads=2, vocab=64, ffn_hidden=128)


@pytest.mark.parametrize(("queries", "prefix"), [(1, 0), (1, 63), (64, 0), (64, 64), (33, 400), (500, 12)])
@pytest.mark.parametrize("groups", [1, 4])
def test_flash_attention_of_a_slice_with_prefix(queries: int, prefix: int, groups: int) -> None:
    cuda, keys = torch.device("cuda"), prefix + queries
    q, dout = torch.randn(2, 2, queries, 4, 64, device=cuda).bfloat16()
    k, v = torch.randn(2, 2, keys + 5, groups, 64, device=cuda).bfloat16()[:, :, :keys]
    flash = build_backend(cuda, torch.bfloat16, 64, keys)
    assert isinstance(flash, CudaFlash)
    results = []
    for backend in (flash, PlainAttention(cuda, torch.bfloat16, keys)):
        out, lse, dq = torch.empty_like(q), torch.empty(q.shape[:3], device=cuda), torch.empty_like(q)
        dk, dv = torch.ones(k.shape, device=cuda), torch.ones(v.shape, device=cuda)
        operands = Operands(q, k, v, out, lse)
        backend.forward(operands)
        backend.backward(operands, dout, dq, [dk], [dv], fresh=False)
        first_dk, first_dv = torch.full_like(dk, torch.nan), torch.full_like(dv, torch.nan)
        backend.backward(operands, dout, dq, [first_dk], [first_dv], fresh=True)
        results.append((out, lse, dq, dk, dv, first_dk, first_dv))
    largest_dq, largest_dk = _without_cancelling(q, k, v, dout)
    least_sizes = (0.0, 0.0, largest_dq, largest_dk, 0.0, largest_dk, 0.0)
    for found, expected, least_size in zip(*results, least_sizes, strict=True):
        size = max(float(expected.float().norm()), least_size)
        assert float((found.float() - expected.float()).norm()) <= 0.02 * size


def _without_cancelling(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[float, float]:
    """The norms of dq and dk if the correction of the scores' gradients were nothing. With one key it takes all of them
    away, and what is left are rounding errors, of this size.
    """
    groups, queries, keys = k.shape[2], q.shape[1], k.shape[1]
    k, v = (each.float().repeat_interleave(q.shape[2] // groups, dim=2) for each in (k, v))
    scores = torch.einsum("bnad,bsad->bans", q.float(), k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    dscores = weights * torch.einsum("bnad,bsad->bans", dout.float(), v) / math.sqrt(q.shape[-1])
    dq, dk = torch.einsum("bans,bsad->bnad", dscores, k), torch.einsum("bans,bnad->bsad", dscores, q.float())
    return float(dq.norm()), float(dk.norm())


def test_weight_gradients_are_summed_in_fp32() -> None:
    cuda = torch.device("cuda")
    parameters = StageParameters(SPEC, 1, 2, precision=Precision.BF16, device=cuda, seed=0)
    linear = Linear(parameters, "layers.0.attention.out")
    x, dy = torch.randn(2, 96, SPEC.hidden, device=cuda).bfloat16()
    for _ in range(3):
        linear.backward_weight(dy, x)
    expected = 3 * dy.double().T @ x.double()
    found = parameters.gradients["layers.0.attention.out.weight"]
    assert float((found.double() - expected).norm()) <= 1e-5 * float(expected.norm())


def test_fused_rms_norm() -> None:
    cuda = torch.device("cuda")
    parameters = StageParameters(SPEC, 2, 3, precision=Precision.BF16, device=cuda, seed=0)
    norm = build_norm(SPEC, parameters, "layers.0.mlp.norm", Workspace(0, cuda))
    assert isinstance(norm, FusedRmsNorm)
    x, dy = torch.randn(2, 40, SPEC.hidden, device=cuda).bfloat16()
    out, dx, statistics = torch.empty_like(x), torch.empty_like(x), {"rstd": torch.empty(40, device=cuda)}
    norm.forward(x, statistics, out)
    norm.backward(dy, x, statistics, None, dx)
    leaf = x.float().requires_grad_()
    expected = torch.nn.functional.rms_norm(leaf, (SPEC.hidden,), eps=SPEC.norm_epsilon)
    (gradient,) = torch.autograd.grad(expected, leaf, dy.float())
    torch.testing.assert_close(out.float(), expected.detach(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(dx.float(), gradient, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize(
    ("precision", "limit"), [(Precision.BF16, 0.05), (Precision.FP32, 1e-3), (Precision.FP64, 1e-10)]
)
def test_whole_steps(family: Family, precision: Precision, limit: float) -> None:
    """Every unit, sliced and staged, against the unsliced model on the CPU."""
    spec = ModelSpec(family=family, layers=2, hidden=64, heads=4, vocab=50, ffn_hidden=48)
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, spec.vocab, (2, 4, 40), generator=generator)
    pipeline = HandPipeline(
        spec, [0, 3, 6], [0, 17, 18, 40], batch=2, precision=precision, device=torch.device("cuda"), recompute=True
    )
    loss = pipeline.step(ids.cuda(), labels.cuda(), 1 / 160)
    weights = {name: tensor.double().cpu() for name, tensor in pipeline.weights.items()}
    expected_loss, expected = reference_gradients(spec, weights, ids, labels, 1 / 160)
    torch.testing.assert_close(loss, expected_loss, rtol=limit, atol=0)
    found = {name: gradient.cpu() for name, gradient in pipeline.gradients.items()}
    assert gradient_error(found, expected) <= limit


NUM_VALID = (240, 40, 97)
"""Labels that count, step by step: the gradient's scale is one over them."""

ADDED_BY_ATOMICS = ("embedding.weight", "head.weight")
"""Rows of tokens, and of targets where the head is divided; in bf16 attention's gradients too."""

PLANS = {
    "slices": small_plan(pp=1, num_microbatches=2, slices=(20, 7, 13)),
    "two stages": small_plan(pp=1, schedule="zbv", num_microbatches=2, slices=(24, 16)),
    "remainder": small_plan(pp=1, num_microbatches=2, slices=(20, 20), remainder=1, remainder_slices=(25, 15)),
    "head in parts": small_plan(pp=1, schedule="zbv", num_microbatches=2, slices=(24, 16), head_parts=3),
}


@dataclass(frozen=True)
class Taken:
    """A step: its loss, its norm, and gradients by stage and name."""

    loss: float
    norm: float
    gradients: dict[tuple[int, str], Tensor]


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("makes_again", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_steps_of_recorded_actions(name: str, makes_again: bool, precision: Precision, family: Family) -> None:
    """Against the same steps launched kernel by kernel. Where nothing adds by atomics, they have the same bits."""
    plan = _plan(PLANS[name], family, precision, makes_again=makes_again)
    limit = 0.02 if precision is Precision.BF16 else 1e-5
    for found, expected in zip(_steps(plan, is_recorded=True), _steps(plan, is_recorded=False), strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=limit)
        assert found.norm == pytest.approx(expected.norm, rel=limit)
        assert math.isfinite(expected.norm)
        for key, gradient in expected.gradients.items():
            if precision is Precision.BF16 or key[1] in ADDED_BY_ATOMICS:
                assert float((found.gradients[key] - gradient).norm()) <= limit * float(gradient.norm()), key
            else:
                assert torch.equal(found.gradients[key], gradient), key


def _plan(plan: Plan, family: Family, precision: Precision, *, makes_again: bool) -> Plan:
    model = replace(plan.model, family=family, kv_heads=2 if family is Family.LLAMA else 0)
    plan = widened(replace(plan, model=model, precision=precision))
    if not makes_again:
        return plan
    return replace(plan, recompute=tuple(full_remakes(plan.model, stage) for stage in plan.stages))


def _steps(plan: Plan, *, is_recorded: bool) -> list[Taken]:
    """Steps with different numbers of labels that count, from the same weights."""
    device, program = torch.device("cuda", 0), program_of(plan)
    with torch.no_grad():
        with mock.patch.object(executor, "can_record", return_value=is_recorded):
            stages = build_stages(plan, program.ranks[0], device=device, seed=SEED)
            keepers = {number: GradientKeeper(stage.parameters) for number, stage in stages.items()}
            transport = Fabric(program, plan.mesh).transport(0)
            runtime = Runtime(plan, program, 0, stages=stages, optimizers=keepers, transport=transport, device=device)
        runtime.warm_up()
        actions = vars(runtime._executor)["_recordable"].values()
        assert len(actions) == is_recorded * sum(each.action.is_compute for each in program.ranks[0].instructions)
        assert all(isinstance(action.run, Recorded) for action in actions)
        taken = []
        for step, num_valid in enumerate(NUM_VALID):
            totals = runtime.train_step(step, _batch(plan, step, num_valid))
            gradients = {
                (number, name): gradient.double().cpu()
                for number, keeper in keepers.items()
                for name, gradient in keeper.kept.items()
            }
            taken.append(Taken(totals.loss_sum, totals.gradient_norm, gradients))
    return taken


def _batch(plan: Plan, step: int, num_valid: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    shape = (plan.num_sequences, plan.sequence_length)
    ids, labels = (torch.randint(plan.model.vocab, shape, generator=generator) for _ in range(2))
    labels.view(-1)[torch.randperm(labels.numel(), generator=generator)[num_valid:]] = -1
    return Batch(token_ids=ids, labels=labels, num_valid_tokens=min(num_valid, labels.numel()))


def test_passes_are_timed_inside_of_a_graph() -> None:
    device = torch.device("cuda", 0)
    small, large = torch.randn(64, 64, device=device), torch.randn(4096, 4096, device=device)
    take = action_timer(device)([partial(torch.mm, each, each) for each in (small, large, small)])
    take()
    first, second, third = (taken.device for taken in take())
    assert 0 < first < second
    assert 0 < third < second
    assert 0 < measure_replay(device) < 1e-3
