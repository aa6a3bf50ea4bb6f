"""Text, token by token with kept keys and values, against whole forwards of the reference model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.trainer.generate import Generator
from penstock.trainer.parameters import StageParameters
from tests.support.reference_model import reference_logits
from tests.support.small_plans import small_model

LENGTH = 24


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Large enough that the likeliest token stands out and changes."""
    parameters = StageParameters(spec, 0, spec.num_units, precision=Precision.FP32, device=torch.device("cpu"), seed=3)
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + (3.0 if name == "embedding.position" else 0.3) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in parameters.master.items()
    }


def argmax_continuation(spec: ModelSpec, weights: dict[str, Tensor], prompt: list[int], length: int) -> list[int]:
    """The slow way: every token from a whole forward in fp64."""
    wide = {name: tensor.double() for name, tensor in weights.items()}
    ids = list(prompt)
    while len(ids) < length:
        ids.append(int(reference_logits(spec, wide, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("prompt_tokens", [1, 2, 7, LENGTH - 1])
def test_the_likeliest_tokens_are_the_reference_s(family: Family, prompt_tokens: int) -> None:
    spec = small_model(family)
    weights = weights_of(spec)
    prompt = torch.randint(0, spec.vocab, (prompt_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = argmax_continuation(spec, weights, prompt, LENGTH)
    generator = Generator(spec, weights, LENGTH)
    assert list(generator.continue_from(prompt, temperature=0.0, seed=0)) == expected
    assert len(set(expected)) > 2 or prompt_tokens > LENGTH - 4
    assert list(generator.continue_from(prompt, temperature=0.0, seed=0)) == expected, "of a second call"


@pytest.mark.parametrize("surplus", [0, 1, 10])
def test_of_a_prompt_that_is_too_long_the_end_counts(surplus: int) -> None:
    spec = small_model(Family.LLAMA)
    weights = weights_of(spec)
    prompt = [(7 * i) % spec.vocab for i in range(LENGTH + surplus)]
    generator = Generator(spec, weights, LENGTH)
    expected = argmax_continuation(spec, weights, prompt[surplus + 1 :], LENGTH)
    assert list(generator.continue_from(prompt, temperature=0.0, seed=0)) == expected
    assert len(expected) == 1


def test_an_empty_prompt_is_refused() -> None:
    generator = Generator(small_model(Family.LLAMA), weights_of(small_model(Family.LLAMA)), LENGTH)
    with pytest.raises(UserError, match="prompt: is empty"):
        next(generator.continue_from([], temperature=0.0, seed=0))


def test_chance_follows_seed_and_temperature() -> None:
    spec = small_model(Family.LLAMA)
    weights = weights_of(spec)
    generator = Generator(spec, weights, LENGTH)

    def text(temperature: float, seed: int) -> list[int]:
        return list(generator.continue_from([1, 2], temperature=temperature, seed=seed))

    assert text(1.0, 0) == text(1.0, 0)
    assert text(1.0, 0) != text(1.0, 1)
    assert text(1e-4, 0) == text(0.0, 0)


def test_chances_are_those_of_the_model() -> None:
    spec = small_model(Family.LLAMA)
    weights = weights_of(spec)
    generator = Generator(spec, weights, 3)
    expected = reference_logits(spec, weights, torch.tensor([[5, 6]]))[0, -1].div(2.0).softmax(0)
    counts = torch.zeros(spec.vocab)
    num_draws = 400
    for seed in range(num_draws):
        (drawn,) = generator.continue_from([5, 6], temperature=2.0, seed=seed)
        counts[drawn] += 1
    error = (counts / num_draws - expected).abs()
    assert bool((error < 5 * (expected * (1 - expected) / num_draws).sqrt() + 1e-3).all())


def test_too_many_positions_and_foreign_weights_are_refused() -> None:
    gpt2 = small_model(Family.GPT2)
    with pytest.raises(UserError, match="65 tokens exceed the model's 64 positions"):
        Generator(gpt2, weights_of(gpt2), 65)
    Generator(small_model(Family.LLAMA), weights_of(small_model(Family.LLAMA)), 65)
    with pytest.raises(UserError, match="checkpoint: "):
        Generator(gpt2, weights_of(small_model(Family.LLAMA)), 8)
