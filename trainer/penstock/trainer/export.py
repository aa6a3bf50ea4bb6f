"""A trained model as a folder that transformers reads: safetensors, its configuration and, if there is one, tokenizer.

The names and layouts on the other side are those of ``LlamaForCausalLM`` and ``GPT2LMHeadModel``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.model import Family, ModelSpec
from penstock.trainer.checkpoint import read_manifest, read_weights
from penstock.trainer.data.tokenizer import Tokenizer
from penstock.trainer.dtypes import compute_dtype

Weights = Mapping[str, Tensor]


def export(checkpoint_folder: Path, target_folder: Path, tokenizer: Tokenizer | None, sequence_length: int) -> None:
    """Write ``model.safetensors``, ``config.json`` and, if the tokenizer has such a file, ``tokenizer.json``.

    Weights have the type in which the model computed. A llama's ``max_position_embeddings`` is ``sequence_length``, the
    longest sequence that it was trained on. Raises `UserError` if the checkpoint is corrupt or the target cannot be
    written.
    """
    weights, manifest = read_weights(checkpoint_folder), read_manifest(checkpoint_folder)
    spec, dtype = manifest.model, compute_dtype(manifest.precision)
    tensors = {name: t.to(dtype).contiguous().clone() for name, t in _TENSORS[spec.family](spec, weights).items()}
    own = {
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None if tokenizer is None else tokenizer.separator,
    }
    if spec.family is Family.LLAMA:
        own["max_position_embeddings"] = sequence_length
    try:
        target_folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            _write_tokenizer(target_folder, tokenizer, sequence_length)
        _write_json(target_folder / "config.json", {**_CONFIGS[spec.family](spec), **own})
        path = target_folder / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod((target_folder / "config.json").stat().st_mode)  # safetensors makes it for its owner alone
    except (OSError, SafetensorError) as error:
        raise UserError(
            what=f"cannot be written: {getattr(error, 'strerror', None) or error}",
            where=str(target_folder),
            remedy="name another folder, or free space there",
        ) from None


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Write it, if it has a file, so that transformers turns text into the ids that the model was trained on.

    Training adds no token at the start or end of a text, so what would add one is left out; and text that spells a
    special token stays text.
    """
    content = tokenizer.to_json()
    if content is None:
        return
    _write_json(folder / "tokenizer.json", {**json.loads(content), "post_processor": None})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([tokenizer.separator]),
        "split_special_tokens": True,
        "model_max_length": sequence_length,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _llama_tensors(spec: ModelSpec, weights: Weights) -> dict[str, Tensor]:
    """The joint projections in their parts."""
    found = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(spec.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = torch.split(weights[f"{ours}.attention.qkv.weight"], [spec.hidden, spec.kv_hidden, spec.kv_hidden])
        gate, up = weights[f"{ours}.mlp.gate_up.weight"].chunk(2)
        found |= {
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
    return found


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,  # up to version 4
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


_GPT2_PARTS = {
    "attention.norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _gpt2_tensors(spec: ModelSpec, weights: Weights) -> dict[str, Tensor]:
    """Matrices are [in, out] there; the head is the embedding and not written again."""
    found = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["embedding.position"],
        "transformer.ln_f.weight": weights["head.norm.weight"],
        "transformer.ln_f.bias": weights["head.norm.bias"],
    }
    for layer in range(spec.layers):
        for ours, theirs in _GPT2_PARTS.items():
            for kind in ("weight", "bias"):
                tensor = weights[f"layers.{layer}.{ours}.{kind}"]
                found[f"transformer.h.{layer}.{theirs}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    return found


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab,
        "n_positions": spec.positions,
        "n_embd": spec.hidden,
        "n_inner": spec.ffn_hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_epsilon,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }


_TENSORS: dict[Family, Callable[[ModelSpec, Weights], dict[str, Tensor]]] = {
    Family.LLAMA: _llama_tensors,
    Family.GPT2: _gpt2_tensors,
}
_CONFIGS: dict[Family, Callable[[ModelSpec], dict[str, Any]]] = {
    Family.LLAMA: _llama_config,
    Family.GPT2: _gpt2_config,
}
