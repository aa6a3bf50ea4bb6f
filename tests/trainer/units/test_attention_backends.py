"""Attention kernels against the softmax formula under autograd, and against each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.trainer.units.backends import (
    LARGEST_BLOCK,
    QUERY_BLOCK,
    UNDIVIDED_QUERIES,
    AttentionBackend,
    CpuFlash,
    CudaFlash,
    Operands,
    PlainAttention,
    build_backend,
)

CPU = torch.device("cpu")


def _inputs(
    batch: int, queries: int, prefix: int, heads: int, groups: int, width: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and output gradient; k and v are windows of a longer buffer, as in a slot."""
    generator = torch.Generator().manual_seed(queries * 7 + prefix)
    keys = torch.randn(2, batch, prefix + queries + 3, groups, width, generator=generator, dtype=torch.float64).to(
        dtype
    )
    q, dout = torch.randn(2, batch, queries, heads, width, generator=generator, dtype=torch.float64).to(dtype)
    return q, keys[0, :, : prefix + queries], keys[1, :, : prefix + queries], dout


def _formula(q_BNAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, each query's keys written out as the first S - N + i + 1."""
    repeat = q_BNAD.shape[2] // k_BSGD.shape[2]
    k, v = (tensor.repeat_interleave(repeat, dim=2) for tensor in (k_BSGD, v_BSGD))
    prefix = k.shape[1] - q_BNAD.shape[1]
    rows, sums = [], []
    for i in range(q_BNAD.shape[1]):
        scores = torch.einsum("bad,bsad->bas", q_BNAD[:, i], k[:, : prefix + i + 1]) / q_BNAD.shape[-1] ** 0.5
        rows.append(torch.einsum("bas,bsad->bad", scores.softmax(-1), v[:, : prefix + i + 1]))
        sums.append(scores.logsumexp(-1))
    return torch.stack(rows, 1), torch.stack(sums, 1)


def _check(backend: AttentionBackend, inputs: tuple[Tensor, Tensor, Tensor, Tensor], limit: float) -> None:
    q, k, v, dout = inputs
    leaves = [tensor.detach().double().clone().requires_grad_() for tensor in (q, k, v)]
    expected_out, expected_lse = _formula(*leaves)
    expected = torch.autograd.grad(expected_out, leaves, dout.double())
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, dtype=wide)
    operands = Operands(q, k, v, out, lse)
    backend.forward(operands)
    dq, dk, dv = torch.full_like(q, torch.nan), torch.ones(k.shape, dtype=wide), torch.ones(v.shape, dtype=wide)
    backend.backward(operands, dout, dq, [dk], [dv], fresh=False)
    pairs = [(out, expected_out), (lse, expected_lse), (dq, expected[0]), (dk - 1, expected[1]), (dv - 1, expected[2])]
    first_dk, first_dv = torch.full_like(dk, torch.nan), torch.full_like(dv, torch.nan)
    backend.backward(operands, dout, dq, _pieces(first_dk), _pieces(first_dv), fresh=True)
    pairs += [(first_dk, expected[1]), (first_dv, expected[2])]
    for found, right in pairs:
        error = (found.double() - right.detach()).norm()
        assert float(error) <= limit * float(right.detach().norm().clamp_min(1.0))


def _pieces(tensor_BSGD: Tensor) -> Sequence[Tensor]:
    """The tensor in pieces of 1, 2, 3, ... keys."""
    num_keys, sizes = tensor_BSGD.shape[1], list[int]()
    while sum(sizes) < num_keys:
        sizes.append(min(len(sizes) + 1, num_keys - sum(sizes)))
    return torch.split(tensor_BSGD, sizes, dim=1)


@settings(max_examples=60)
@given(
    backend=st.sampled_from([CpuFlash, PlainAttention]),
    batch=st.integers(1, 3),
    queries=st.integers(1, 9),
    prefix=st.integers(0, 9),
    groups=st.integers(1, 3),
    repeat=st.integers(1, 3),
    width=st.sampled_from([1, 2, 8, 10]),
)
def test_slices_with_prefix_and_shared_keys(
    backend: type[CpuFlash | PlainAttention],
    batch: int,
    queries: int,
    prefix: int,
    groups: int,
    repeat: int,
    width: int,
) -> None:
    made = CpuFlash(torch.float64, 18) if backend is CpuFlash else PlainAttention(CPU, torch.float64, 18)
    _check(made, _inputs(batch, queries, prefix, groups * repeat, groups, width), 1e-13)


@pytest.mark.parametrize("prefix", [0, 1, 300])
@pytest.mark.parametrize(
    "queries",
    [QUERY_BLOCK, QUERY_BLOCK + 1, LARGEST_BLOCK - 1, LARGEST_BLOCK, 2 * QUERY_BLOCK + 50, UNDIVIDED_QUERIES],
)
def test_slices_of_several_query_blocks(queries: int, prefix: int) -> None:
    inputs = _inputs(1, queries, prefix, 2, 1, 4)
    _check(CpuFlash(torch.float64, queries + prefix), inputs, 1e-13)
    _check(PlainAttention(CPU, torch.float64, queries + prefix), inputs, 1e-13)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_narrower_types(dtype: torch.dtype, limit: float) -> None:
    inputs = _inputs(2, 40, 30, 4, 2, 16, dtype)
    _check(CpuFlash(dtype, 70), inputs, limit)
    _check(PlainAttention(CPU, dtype, 70), inputs, limit)


def test_the_choice_of_backend() -> None:
    cuda = torch.device("meta")  # stands for a device that is not the CPU and has no flash kernels
    assert isinstance(build_backend(CPU, torch.float64, 7, 16), CpuFlash)
    assert isinstance(build_backend(cuda, torch.float32, 64, 16), PlainAttention)


def test_the_cuda_calls_fit_the_installed_signatures_and_shapes() -> None:
    """On tensors without content: the kernels themselves need a GPU (test_gpu.py)."""
    meta = torch.device("meta")
    backend = CudaFlash(meta)
    q, k, v, dout = (tensor.to(meta) for tensor in _inputs(2, 16, 16, 4, 2, 8, torch.bfloat16))
    out, lse = torch.empty_like(q), torch.empty(2, 16, 4, device=meta)
    operands = Operands(q, k, v, out, lse)
    backend.forward(operands)
    dk, dv = (torch.zeros(k.shape, device=meta) for _ in range(2))
    backend.backward(operands, dout, torch.empty_like(q), [dk], [dv], fresh=False)
