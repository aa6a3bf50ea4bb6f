"""A checkpoint's weights as safetensors, with the names and the config.json that transformers reads.

Our matrices are joined where the trainer multiplies once (queries, keys and values; gate and up). In transformers'
llama they are apart; its gpt2 has them joined but transposed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.cli.writing import newest
from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.model import Family, ModelSpec
from penstock.trainer.checkpoint import read_manifest, read_weights
from penstock.trainer.prepare import open_data
from penstock.trainer.rundir import RunDir

NORM_EPSILON = 1e-5
ROPE_THETA = 10_000.0
LARGEST_POSITIONS = 131_072
"""What is said of llama, whose rotary positions have no bound of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported(Manifest):
    """The files that were written, and the steps the model had taken."""

    files: tuple[str, ...]
    step: int


def export_run(run: RunDir, folder: Path) -> Exported:
    """Write the newest checkpoint of ``run`` into ``folder``, with its tokenizer if there is a file of it.

    Raises:
        UserError: there is no checkpoint, it is corrupt, or the folder cannot be written.
    """
    checkpoint = newest(run)
    spec = read_manifest(checkpoint.folder).model
    weights = to_transformers(spec, read_weights(checkpoint.folder))
    texts = {"config.json": json.dumps(config(spec), indent=1)}
    tokenizer = open_data(run).tokenizer
    if tokenizer is not None and (content := tokenizer.to_json()) is not None:
        texts["tokenizer.json"] = content
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise UserError(
            what=f"cannot be written: {error.strerror}", where=str(folder), remedy="name another folder with --to"
        ) from None
    return Exported(files=("model.safetensors", *texts), step=checkpoint.step)


def to_transformers(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under transformers' names and in its shapes, each with memory of its own."""
    convert = _llama if spec.family is Family.LLAMA else _gpt2
    return {name: tensor.contiguous().clone() for name, tensor in convert(spec, weights).items()}


def _llama(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    widths = (spec.hidden, spec.kv_hidden, spec.kv_hidden)
    named = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(spec.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = torch.split_with_sizes(weights[f"{ours}.attention.qkv.weight"], widths)
        gate, up = weights[f"{ours}.mlp.gate_up.weight"].chunk(2)
        named |= {
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
    return named


_GPT2_NORMS = {"attention.norm": "ln_1", "mlp.norm": "ln_2"}
_GPT2_LINEARS = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _gpt2(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head is the embedding and has no entry of its own; linears are stored as [in, out]."""
    named = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["embedding.position"],
        "transformer.ln_f.weight": weights["head.norm.weight"],
        "transformer.ln_f.bias": weights["head.norm.bias"],
    }
    for layer in range(spec.layers):
        for ours, theirs in (_GPT2_NORMS | _GPT2_LINEARS).items():
            weight = weights[f"layers.{layer}.{ours}.weight"]
            named[f"transformer.h.{layer}.{theirs}.weight"] = weight.T if ours in _GPT2_LINEARS else weight
            named[f"transformer.h.{layer}.{theirs}.bias"] = weights[f"layers.{layer}.{ours}.bias"]
    return named


def config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of transformers' model of this kind."""
    if spec.family is Family.GPT2:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_inner": spec.ffn_hidden,
            "n_positions": spec.positions,
            "vocab_size": spec.vocab,
            "layer_norm_epsilon": NORM_EPSILON,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": LARGEST_POSITIONS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
