"""The ends of a model: the head's loss, gradients and logits; the embedding's rows; and Linear's sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from penstock.core.layout import HEAD_CHUNK_TOKENS, Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.sharding import WHOLE
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import NO_SHARDS, run_pass
from penstock.trainer.units.division import Division
from penstock.trainer.units.embedding import Embedding
from penstock.trainer.units.head import Head
from penstock.trainer.units.linear import Linear, RowParallelLinear, accumulate_product
from penstock.trainer.units.workspace import Workspace, workspace_bytes
from tests.support.reference_model import reference_logits

CPU = torch.device("cpu")
LLAMA = ModelSpec(family=Family.LLAMA, layers=1, hidden=6, heads=1, vocab=7)
GPT2 = ModelSpec(family=Family.GPT2, layers=1, hidden=6, heads=1, vocab=7, positions=9)


def _parameters(spec: ModelSpec, unit: int, precision: Precision = Precision.FP64) -> StageParameters:
    made = StageParameters(spec, unit, unit + 1, precision=precision, device=CPU, seed=0)
    generator = torch.Generator().manual_seed(4)
    (masters,) = made.masters
    masters.copy_(torch.randn(masters.shape, generator=generator))
    made.refresh_compute()
    return made


def _head(spec: ModelSpec, tokens: int, precision: Precision = Precision.FP64) -> tuple[Head, StageParameters]:
    last = spec.num_units - 1
    parameters = _parameters(spec, last, precision)
    workspace = Workspace(workspace_bytes(spec, precision, last, last + 1, tokens), CPU)
    return Head(spec, parameters, Division(WHOLE, 0, workspace), workspace), parameters


def _forward(head: Head, x: Tensor, labels: Tensor, scale: float, dx: Tensor) -> Tensor:
    return run_pass(head.forward(x, labels, scale, dx), NO_SHARDS)


def _expected_logits(spec: ModelSpec, parameters: StageParameters, x: Tensor) -> Tensor:
    """The formula itself."""
    weights = {name: tensor.double() for name, tensor in parameters.master.items()}
    norm = (spec.hidden,), weights["head.norm.weight"]
    if spec.family is Family.LLAMA:
        return functional.rms_norm(x, *norm, spec.norm_epsilon) @ weights["head.weight"].T
    normed = functional.layer_norm(x, *norm, weights["head.norm.bias"], spec.norm_epsilon)
    return normed @ weights["embedding.weight"].T


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
@pytest.mark.parametrize("labels", [[[0, 6, 3], [2, -1, 5]], [[-1, -7, -1], [-1, -1, -1]]], ids=["some", "none valid"])
def test_head_loss_and_gradient_of_its_input(spec: ModelSpec, labels: list[list[int]]) -> None:
    head, parameters = _head(spec, 6)
    x = torch.randn(6, spec.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor(labels)
    leaf = x.clone().requires_grad_()
    kept = torch.where(wanted < 0, -100, wanted).flatten()
    expected = functional.cross_entropy(_expected_logits(spec, parameters, leaf), kept, reduction="sum")
    (dx,) = torch.autograd.grad(expected, leaf)
    found = torch.full_like(x, torch.nan)
    loss = _forward(head, x, wanted, 0.25, found)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, 0.25 * dx)
    torch.testing.assert_close(run_pass(head.loss(x, wanted), NO_SHARDS), expected.detach())


def test_head_evaluation_leaves_gradients_alone() -> None:
    head, parameters = _head(LLAMA, 4)
    x, labels = torch.ones(4, LLAMA.hidden, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.int64)
    run_pass(head.loss(x, labels), NO_SHARDS)
    assert not parameters.gradient_flat.any()


def test_head_survives_logits_far_apart() -> None:
    """The label's probability vanishes in fp32; its loss is the difference of the logits."""
    head, parameters = _head(LLAMA, 1, Precision.FP32)
    parameters.master["head.norm.weight"].fill_(1.0)
    parameters.master["head.weight"].zero_()
    parameters.master["head.weight"][0, 0] = 1000.0
    x = torch.zeros(1, LLAMA.hidden)
    x[0, 0] = 1.0
    found = torch.full_like(x, torch.nan)
    loss = _forward(head, x, torch.tensor([[3]]), 1.0, found)
    assert float(loss) == pytest.approx(1000 * LLAMA.hidden**0.5, rel=1e-4)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("tokens", [HEAD_CHUNK_TOKENS, HEAD_CHUNK_TOKENS + 1])
def test_head_chunks_join_without_a_seam(tokens: int) -> None:
    head, parameters = _head(GPT2, tokens)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, GPT2.hidden, dtype=torch.float64, generator=generator)
    labels = torch.randint(-1, GPT2.vocab, (1, tokens), generator=generator)
    whole = torch.full_like(x, torch.nan)
    loss = _forward(head, x, labels, 1.0, whole)
    gradients = parameters.gradient_flat.clone()
    parameters.gradient_flat.zero_()
    parts, sums = torch.full_like(x, torch.nan), torch.zeros((), dtype=torch.float64)
    for some in (slice(0, 100), slice(100, tokens)):
        sums += _forward(head, x[some], labels[:, some], 1.0, parts[some])
    torch.testing.assert_close(sums, loss)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parameters.gradient_flat, gradients)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_logits_after_a_token(spec: ModelSpec) -> None:
    head, parameters = _head(spec, 6)
    x = torch.randn(6, spec.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _expected_logits(spec, parameters, x)
    for row in range(6):
        torch.testing.assert_close(run_pass(head.logits_at(x, row), NO_SHARDS), expected[row])


@given(batch=st.integers(1, 3), start=st.integers(0, 4), length=st.integers(1, 5), seed=st.integers(0, 99))
def test_embedding_rows_positions_and_their_gradients(batch: int, start: int, length: int, seed: int) -> None:
    parameters = _parameters(GPT2, 0)
    workspace = Workspace(0, CPU)
    embedding = Embedding(parameters, Division(WHOLE, 0, workspace), workspace)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, GPT2.vocab, (batch, length + 2), generator=generator)[:, 1:-1]  # a slice, as of a batch
    y = torch.full((batch * length, GPT2.hidden), torch.nan, dtype=torch.float64)
    run_pass(embedding.forward(ids, start, y), NO_SHARDS)
    rows, positions = parameters.master["embedding.weight"], parameters.master["embedding.position"]
    for b in range(batch):
        for n in range(length):
            assert torch.equal(y[b * length + n], rows[ids[b, n]] + positions[start + n])
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    embedding.backward_weight(ids, start, dy)
    one_hot = functional.one_hot(ids.flatten(), GPT2.vocab).double()
    torch.testing.assert_close(parameters.gradients["embedding.weight"], one_hot.T @ dy)
    expected = torch.zeros_like(positions)
    expected[start : start + length] = dy.view(batch, length, -1).sum(0)
    torch.testing.assert_close(parameters.gradients["embedding.position"], expected)


@pytest.mark.parametrize(("spec", "name"), [(LLAMA, "layers.0.attention.out"), (GPT2, "layers.0.mlp.up")])
def test_linear(spec: ModelSpec, name: str) -> None:
    parameters = _parameters(spec, 1 if "attention" in name else 2)
    linear, weight = Linear(parameters, name), parameters.master[f"{name}.weight"]
    bias = parameters.master.get(f"{name}.bias", torch.zeros(weight.shape[0], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, weight.shape[1], dtype=torch.float64, generator=generator)
    dy = torch.randn(5, weight.shape[0], dtype=torch.float64, generator=generator)
    y, dx = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan)
    linear.forward(x, y)
    torch.testing.assert_close(y, x @ weight.T + bias)
    linear.backward_input(dy, dx)
    torch.testing.assert_close(dx, dy @ weight)
    for _ in range(2):
        linear.backward_weight(dy, x)
    torch.testing.assert_close(parameters.gradients[f"{name}.weight"], 2 * dy.T @ x)
    if spec.family is Family.GPT2:
        torch.testing.assert_close(parameters.gradients[f"{name}.bias"], 2 * dy.sum(0))


@pytest.mark.parametrize(("spec", "name"), [(LLAMA, "layers.0.attention.out"), (GPT2, "layers.0.mlp.down")])
def test_row_parallel_linear_without_other_shards(spec: ModelSpec, name: str) -> None:
    parameters = _parameters(spec, 1 if "attention" in name else 2)
    linear = RowParallelLinear(parameters, name, Division(WHOLE, 0, Workspace(0, CPU)))
    weight = parameters.master[f"{name}.weight"]
    bias = parameters.master.get(f"{name}.bias", torch.zeros(weight.shape[0], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, weight.shape[1], dtype=torch.float64, generator=generator)
    residual = torch.randn(5, weight.shape[0], dtype=torch.float64, generator=generator)
    y = torch.full_like(residual, torch.nan)
    run_pass(linear.forward_onto(residual, x, y), NO_SHARDS)
    torch.testing.assert_close(y, residual + x @ weight.T + bias)
    linear.backward_weight(residual, x)
    torch.testing.assert_close(parameters.gradients[f"{name}.weight"], residual.T @ x)
    if spec.family is Family.GPT2:
        torch.testing.assert_close(parameters.gradients[f"{name}.bias"], residual.sum(0))


def test_products_of_narrow_factors_are_summed_wide() -> None:
    """256 + 1 is 256 in bf16; summed in fp32 nothing is lost."""
    gradient = torch.full((1, 1), 256.0)
    for _ in range(3):
        accumulate_product(gradient, torch.ones(1, 1).bfloat16(), torch.ones(1, 1).bfloat16())
    assert float(gradient) == 259.0


def test_the_reference_logits_agree_with_the_expectations_above() -> None:
    """A llama of one block whose matrices are zero passes the embedding on unchanged."""
    whole = StageParameters(LLAMA, 0, LLAMA.num_units, precision=Precision.FP64, device=CPU, seed=0)
    weights = {name: tensor * ("layers" not in name) for name, tensor in whole.master.items()}
    ids = torch.tensor([[1, 5, 2]])
    parameters = _parameters(LLAMA, LLAMA.num_units - 1)
    parameters.load(weights)
    expected = _expected_logits(LLAMA, parameters, weights["embedding.weight"][ids])
    torch.testing.assert_close(reference_logits(LLAMA, weights, ids), expected)
