"""The CUDA paths. They need an NVIDIA GPU and say so where there is none: nothing here is covered by other tests."""

from __future__ import annotations

import pytest
import torch

from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.backends import CudaFlash, Operands, PlainAttention, build_backend
from penstock.trainer.units.linear import Linear
from penstock.trainer.units.norm import FusedRmsNorm, build_norm
from penstock.trainer.units.workspace import Workspace
from tests.support.reference_model import reference_gradients
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
        backend.backward(operands, dout, dq, dk, dv, fresh=False)
        first_dk, first_dv = torch.full_like(dk, torch.nan), torch.full_like(dv, torch.nan)
        backend.backward(operands, dout, dq, first_dk, first_dv, fresh=True)
        results.append((out, lse, dq, dk, dv, first_dk, first_dv))
    for found, expected in zip(*results, strict=True):
        assert float((found.float() - expected.float()).norm()) <= 0.02 * float(expected.float().norm())


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
