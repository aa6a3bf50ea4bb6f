"""The yardstick itself against transformers, with equal weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from tests.support.reference_model import reference_gradients, reference_logits

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=24, heads=6, kv_heads=2, vocab=31, ffn_hidden=20)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=24, heads=3, vocab=31, positions=10)


def _weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Weights large enough that every part of the model matters; norms and biases away from 1 and 0."""
    named = StageParameters(
        spec, 0, spec.num_units, precision=Precision.FP64, device=torch.device("cpu"), seed=3
    ).master
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in named.items()
    }


def _transformers_llama(weights: dict[str, Tensor]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=LLAMA.vocab,
            hidden_size=LLAMA.hidden,
            intermediate_size=LLAMA.ffn_hidden,
            num_hidden_layers=LLAMA.layers,
            num_attention_heads=LLAMA.heads,
            num_key_value_heads=LLAMA.kv_heads,
            rms_norm_eps=LLAMA.norm_epsilon,
            tie_word_embeddings=False,
        )
    ).double()
    state = {"model.embed_tokens.weight": weights["embedding.weight"], "model.norm.weight": weights["head.norm.weight"]}
    state["lm_head.weight"] = weights["head.weight"]
    widths = [LLAMA.hidden, LLAMA.kv_hidden, LLAMA.kv_hidden]
    for layer in range(LLAMA.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = torch.split(weights[f"{ours}.attention.qkv.weight"], widths)
        gate, up = weights[f"{ours}.mlp.gate_up.weight"].chunk(2)
        state |= {
            f"{theirs}.input_layernorm.weight": weights[f"{ours}.attention.norm.weight"],
            f"{theirs}.self_attn.q_proj.weight": q,
            f"{theirs}.self_attn.k_proj.weight": k,
            f"{theirs}.self_attn.v_proj.weight": v,
            f"{theirs}.self_attn.o_proj.weight": weights[f"{ours}.attention.out.weight"],
            f"{theirs}.post_attention_layernorm.weight": weights[f"{ours}.mlp.norm.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": weights[f"{ours}.mlp.down.weight"],
        }
    model.load_state_dict(state)
    return model


def _transformers_gpt2(weights: dict[str, Tensor]) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=GPT2.vocab,
            n_positions=GPT2.positions,
            n_embd=GPT2.hidden,
            n_layer=GPT2.layers,
            n_head=GPT2.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    state = {"transformer.wte.weight": weights["embedding.weight"], "lm_head.weight": weights["embedding.weight"]}
    state["transformer.wpe.weight"] = weights["embedding.position"]
    for suffix in ("weight", "bias"):
        state[f"transformer.ln_f.{suffix}"] = weights[f"head.norm.{suffix}"]
        for layer in range(GPT2.layers):
            ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
            state[f"{theirs}.ln_1.{suffix}"] = weights[f"{ours}.attention.norm.{suffix}"]
            state[f"{theirs}.ln_2.{suffix}"] = weights[f"{ours}.mlp.norm.{suffix}"]
            for mine, other in (
                ("attention.qkv", "attn.c_attn"),
                ("attention.out", "attn.c_proj"),
                ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):
                state[f"{theirs}.{other}.{suffix}"] = weights[f"{ours}.{mine}.{suffix}"].t()  # its Conv1D is transposed
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("spec", "build", "tolerance"),
    [
        pytest.param(LLAMA, _transformers_llama, 1e-5, id="llama"),  # its rotary angles are always fp32
        pytest.param(GPT2, _transformers_gpt2, 1e-10, id="gpt2"),
    ],
)
def test_logits_loss_and_gradients_are_those_of_transformers(
    spec: ModelSpec, build: Callable[[dict[str, Tensor]], PreTrainedModel], tolerance: float
) -> None:
    weights = _weights(spec)
    model = build(weights)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, spec.vocab, (2, 10), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(reference_logits(spec, weights, ids), logits, rtol=tolerance, atol=tolerance)

    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(expected, [next(model.parameters())])  # the token embedding comes first
    loss, gradients = reference_gradients(spec, weights, ids, labels, scale=1.0)
    torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients["embedding.weight"], gradient, rtol=tolerance, atol=tolerance)
