"""Attention over keys in several pieces: as if they were one, however they are grouped."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.trainer.units.backends import CpuFlash, Operands, PlainAttention
from penstock.trainer.units.prefix import PrefixAttention, groups_of
from penstock.trainer.units.workspace import Workspace

CPU = torch.device("cpu")
ENOUGH = 1 << 24
sizes_of_pieces = st.lists(st.integers(1, 7), min_size=1, max_size=8)


@given(sizes=sizes_of_pieces, keys_at_once=st.integers(1, 30))
def test_groups_are_consecutive_and_small_enough(sizes: list[int], keys_at_once: int) -> None:
    groups = groups_of(sizes, keys_at_once)
    assert [piece for group in groups for piece in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[i] for i in group) <= keys_at_once for group in groups)
    for first, second in pairwise(groups):
        assert sizes[first[-1]] + sum(sizes[i] for i in second) > keys_at_once, "the later group has space for more"


def random_tensors(
    sizes: list[int], heads: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and the output's gradient of the last piece's queries, k and v [B, G, S, D]."""
    generator = torch.Generator().manual_seed(sum(sizes))
    q, dout = torch.randn(2, 2, sizes[-1], heads, 8, generator=generator, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 2, groups, sum(sizes), 8, generator=generator, dtype=torch.float64).to(dtype)
    return q, dout, k, v


def in_pieces(tensor: Tensor, sizes: list[int], axis: int) -> list[Tensor]:
    """Return copies in separate memory."""
    return [piece.clone() for piece in torch.split(tensor, sizes, dim=axis)]


@settings(max_examples=60)
@given(
    sizes=sizes_of_pieces,
    keys_at_once=st.integers(1, 30),
    plain=st.booleans(),
    repeat=st.integers(1, 2),
    fresh=st.booleans(),
)
def test_pieces_give_the_same_result_as_one_piece(
    sizes: list[int], keys_at_once: int, plain: bool, repeat: int, fresh: bool
) -> None:
    backend = PlainAttention(CPU, torch.float64, 64) if plain else CpuFlash(torch.float64, 64)
    q, dout, k, v = random_tensors(sizes, 2 * repeat, 2, torch.float64)
    out, lse, dq = torch.empty_like(q), torch.empty(q.shape[:3], dtype=q.dtype), torch.empty_like(q)
    operands = Operands(q, k.transpose(1, 2), v.transpose(1, 2), out, lse)
    backend.forward(operands)
    dk, dv = torch.ones(2, 2, sum(sizes), 2, 8, dtype=q.dtype)
    backend.backward(operands, dout, dq, [dk], [dv], fresh=fresh)
    attention = PrefixAttention(backend, Workspace(ENOUGH, CPU), keys_at_once)
    own_out, own_lse, own_dq = (torch.full_like(tensor, torch.nan) for tensor in (out, lse, dq))
    own_dk, own_dv = (in_pieces(torch.ones_like(dk), sizes, 1) for _ in "kv")
    keys, values = in_pieces(k, sizes, 2), in_pieces(v, sizes, 2)
    attention.forward(q, keys, values, own_out, own_lse)
    attention.backward(q, keys, values, own_out, own_lse, (dout, own_dq, own_dk, own_dv), fresh=fresh)
    pairs = [(own_out, out), (own_lse, lse), (own_dq, dq), (torch.cat(own_dk, 1), dk), (torch.cat(own_dv, 1), dv)]
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys_at_once", [16, 64, 10_000])
def test_joining_adds_little_to_the_rounding_of_bf16(keys_at_once: int) -> None:
    """Every group's result is rounded once more, but sums are in fp32: the error does not grow with their number."""
    sizes = [16] * 32
    q, dout, k, v = random_tensors(sizes, 4, 2, torch.bfloat16)
    keys, values = in_pieces(k, sizes, 2), in_pieces(v, sizes, 2)
    errors = []
    right: list[Tensor] = []
    for dtype, at_once in ((torch.float64, 10_000), (torch.bfloat16, 10_000), (torch.bfloat16, keys_at_once)):
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        attention = PrefixAttention(CpuFlash(dtype, 512), Workspace(ENOUGH, CPU), at_once)
        own_q, own_dout = q.to(dtype), dout.to(dtype)
        out, lse, dq = torch.empty_like(own_q), torch.empty(q.shape[:3], dtype=wide), torch.empty_like(own_q)
        dk, dv = ([torch.zeros(2, 16, 2, 8, dtype=wide) for _ in sizes] for _ in "kv")
        own = own_q, [key.to(dtype) for key in keys], [value.to(dtype) for value in values], out, lse
        attention.forward(*own)
        attention.backward(*own, (own_dout, dq, dk, dv), fresh=True)
        found = [tensor.double() for tensor in (out, dq, torch.cat(dk, 1), torch.cat(dv, 1))]
        right = right or found
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)])
    assert all(several <= 1.5 * one for several, one in zip(errors[2], errors[1], strict=True)), errors


@pytest.mark.parametrize("num_slices", [1, 4, 32])
def test_gradients_of_keys_summed_in_fp32_are_as_exact_with_many_slices(num_slices: int) -> None:
    """They are more exact with many, whose roundings are of smaller numbers. Sums in bf16 lose that."""
    length, (wide, narrow) = 1024, (torch.float32, torch.bfloat16)
    q, dout, k, v = random_tensors([length], 2, 1, narrow)
    right = key_gradients(q.double(), dout.double(), k.double(), v.double(), 1, torch.float64)
    one, several, rounded = (
        (key_gradients(q, dout, k, v, count, dtype) - right).norm() / right.norm()
        for count, dtype in ((1, wide), (num_slices, wide), (num_slices, narrow))
    )
    assert float(several) <= 1.1 * float(one)
    if num_slices == 32:
        assert float(rounded) >= 1.3 * float(several)


def key_gradients(q: Tensor, dout: Tensor, k: Tensor, v: Tensor, num_slices: int, dtype: torch.dtype) -> Tensor:
    """Gradients of keys and values of a sequence in equal slices, summed in ``dtype``, at last in the compute type."""
    backend, length = CpuFlash(q.dtype, q.shape[1]), q.shape[1] // num_slices
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse, dq = torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide), torch.empty_like(q)
    dk, dv = torch.zeros(2, *k.transpose(1, 2).shape, dtype=dtype)
    places = []
    for start, stop in pairwise(accumulate([length] * num_slices, initial=0)):
        own = slice(start, stop)
        keys, values = (tensor[:, :, :stop].transpose(1, 2) for tensor in (k, v))
        places.append((own, Operands(q[:, own], keys, values, out[:, own], lse[:, own])))
    for _, operands in places:
        backend.forward(operands)
    for own, operands in reversed(places):
        up_to = slice(0, own.stop)
        backend.backward(operands, dout[:, own], dq[:, own], [dk[:, up_to]], [dv[:, up_to]], fresh=False)
    return torch.stack([dk, dv]).to(q.dtype).double()
