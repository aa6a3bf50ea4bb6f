"""Export of a trained model for transformers: safetensors, its configuration and, if available, its tokenizer.

Tensor names and layouts are those of ``LlamaForCausalLM`` and ``GPT2LMHeadModel``.
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
    """Write ``model.safetensors``, ``config.json`` and, if the tokenizer has a file, ``tokenizer.json`` and
    ``tokenizer_config.json``.

    Weights have the compute type of the training. ``max_position_embeddings`` of a llama is ``sequence_length``, the
    longest sequence of the training. Raises `UserError` if the checkpoint is corrupt or the target cannot be written.
    """
    weights, manifest = read_weights(checkpoint_folder), read_manifest(checkpoint_folder)
    spec, dtype = manifest.model, compute_dtype(manifest.precision)
    tensors = {name: t.to(dtype).contiguous().clone() for name, t in _TENSORS[spec.family](spec, weights).items()}
    own_config = {
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None if tokenizer is None else tokenizer.separator,
    }
    if spec.family is Family.LLAMA:
        own_config["max_position_embeddings"] = sequence_length
    try:
        target_folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            _write_tokenizer(target_folder, tokenizer, sequence_length)
        _write_json(target_folder / "config.json", {**_CONFIGS[spec.family](spec), **own_config})
        path = target_folder / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod((target_folder / "config.json").stat().st_mode)  # safetensors restricts it to its owner
    except (OSError, SafetensorError) as error:
        raise UserError(
            what=f"cannot be written: {getattr(error, 'strerror', None) or error}",
            where=str(target_folder),
            remedy="name another folder, or free space there",
        ) from None


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Write the tokenizer, if it has a file, so that transformers encodes text as it was encoded for training.

    Training adds no token at the start or end of a document, so the post-processor is left out. Special tokens that are
    spelled out in text stay text.
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
    """The tensors of a llama, with joint projections split."""
    tensors = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(spec.layers):
        own_prefix, exported_prefix = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = torch.split(
            weights[f"{own_prefix}.attention.qkv.weight"], [spec.hidden, spec.kv_hidden, spec.kv_hidden]
        )
        gate, up = weights[f"{own_prefix}.mlp.gate_up.weight"].chunk(2)
        tensors |= {
            f"{exported_prefix}.input_layernorm.weight": weights[f"{own_prefix}.attention.norm.weight"],
            f"{exported_prefix}.self_attn.q_proj.weight": q,
            f"{exported_prefix}.self_attn.k_proj.weight": k,
            f"{exported_prefix}.self_attn.v_proj.weight": v,
            f"{exported_prefix}.self_attn.o_proj.weight": weights[f"{own_prefix}.attention.out.weight"],
            f"{exported_prefix}.post_attention_layernorm.weight": weights[f"{own_prefix}.mlp.norm.weight"],
            f"{exported_prefix}.mlp.gate_proj.weight": gate,
            f"{exported_prefix}.mlp.up_proj.weight": up,
            f"{exported_prefix}.mlp.down_proj.weight": weights[f"{own_prefix}.mlp.down.weight"],
        }
    return tensors


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
        "rope_theta": spec.rope_theta,  # transformers 4
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
    """The tensors of a GPT-2. Matrices are [in, out]; the head is the embedding and not written again."""
    tensors = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["embedding.position"],
        "transformer.ln_f.weight": weights["head.norm.weight"],
        "transformer.ln_f.bias": weights["head.norm.bias"],
    }
    for layer in range(spec.layers):
        for own_part, exported_part in _GPT2_PARTS.items():
            for kind in ("weight", "bias"):
                tensor = weights[f"layers.{layer}.{own_part}.{kind}"]
                tensors[f"transformer.h.{layer}.{exported_part}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    return tensors


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
