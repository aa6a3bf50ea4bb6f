"""Exported folders, loaded by transformers: the same logits, the same text, the same tokens."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.layout import Precision, num_parameters
from penstock.core.model import Family, ModelSpec
from penstock.trainer import checkpoint
from penstock.trainer.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from penstock.trainer.export import export
from penstock.trainer.generate import Generator
from penstock.trainer.parameters import StageParameters
from tests.support.checkpoint_ranks import file_size_limit
from tests.support.reference_model import reference_logits
from tests.support.small_plans import small_model

CPU = torch.device("cpu")
LENGTH = 20


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings of transformers about its own code are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model_of(family: Family) -> ModelSpec:
    """Unusual numbers, so that no value is right only because it is a default."""
    changes: dict[str, Any] = {"norm_epsilon": 3e-3, "positions": 48}
    if family is Family.LLAMA:
        changes["rope_theta"] = 500.0
    return dataclasses.replace(small_model(family), **changes)


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    parameters = StageParameters(spec, 0, spec.num_units, precision=Precision.FP32, device=CPU, seed=1)
    generator = torch.Generator().manual_seed(0)
    return {name: w + 0.2 * torch.randn(w.shape, generator=generator) for name, w in parameters.master.items()}


def stored(root: Path, spec: ModelSpec, weights: dict[str, Tensor]) -> Path:
    return checkpoint.save(root, 1, 3, {"weights": weights}, spec, Precision.FP32, keep=1).folder


@pytest.mark.parametrize("family", Family)
def test_transformers_gives_the_same_logits_and_text(tmp_path: Path, family: Family) -> None:
    from transformers import AutoModelForCausalLM

    spec = model_of(family)
    weights = random_weights(spec)
    export(stored(tmp_path, spec, weights), tmp_path / "model", None, LENGTH)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    theirs, report = loaded
    assert type(theirs).__name__ == {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[family.value]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == num_parameters(spec)
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}
    assert theirs.config.max_position_embeddings == {"llama": LENGTH, "gpt2": spec.positions}[family.value]

    ids = torch.randint(0, spec.vocab, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = theirs.eval()(ids).logits
    torch.testing.assert_close(logits, reference_logits(spec, weights, ids), rtol=1e-5, atol=1e-5)

    prompt = ids[0, :5].tolist()
    ours = list(Generator(spec, weights, LENGTH).continue_from(prompt, temperature=0.0, seed=0))
    text = theirs.generate(torch.tensor([prompt]), max_length=LENGTH, do_sample=False, pad_token_id=0)
    assert text[0, 5:].tolist() == ours


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    spec = dataclasses.replace(small_model(Family.LLAMA), vocab=300)
    ours = train_bpe(iter(["def turbine(water): return water * 2\n", "the water turns the wheel\n"] * 20), vocab=300)
    folder = stored(tmp_path, spec, random_weights(spec))
    export(folder, tmp_path / "model", ours, LENGTH)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    text = "def wheel(turns):\n    return 'größer'\t"
    (expected,) = ours.encode([text])
    assert theirs(text)["input_ids"] == expected.tolist()
    assert theirs.decode(expected.tolist()) == text
    assert theirs.eos_token_id == ours.separator
    assert AutoConfig.from_pretrained(tmp_path / "model", local_files_only=True).eos_token_id == ours.separator


def test_text_becomes_the_ids_of_training_whatever_it_spells(tmp_path: Path) -> None:
    """Neither a special token by its name, nor one that a foreign tokenizer's template adds at the start."""
    from tokenizers import Tokenizer as Subwords
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    subwords = Subwords.from_str(train_bpe(iter(["the water turns\n"] * 20), vocab=280).to_json())
    subwords.add_special_tokens(["<s>"])
    begin = subwords.token_to_id("<s>")
    subwords.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    (tmp_path / "foreign.json").write_text(subwords.to_str())
    ours = load_tokenizer(tmp_path / "foreign.json")
    spec = dataclasses.replace(small_model(Family.LLAMA), vocab=300)
    export(stored(tmp_path, spec, random_weights(spec)), tmp_path / "model", ours, LENGTH)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    text = "the <|endoftext|> water <s> turns ü"
    (expected,) = ours.encode([text])
    assert theirs(text)["input_ids"] == expected.tolist()
    assert begin not in expected
    assert theirs.model_max_length == LENGTH


def test_bytes_say_where_a_document_ends(tmp_path: Path) -> None:
    spec = dataclasses.replace(small_model(Family.LLAMA), vocab=257)
    export(stored(tmp_path, spec, random_weights(spec)), tmp_path / "model", ByteTokenizer(), LENGTH)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 256
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_weights_have_the_type_in_which_the_model_computed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = model_of(Family.LLAMA)
    weights = random_weights(spec)
    saved = checkpoint.save(tmp_path, 1, 3, {"weights": weights}, spec, Precision.BF16, keep=1)
    export(saved.folder, tmp_path / "model", None, LENGTH)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}
    assert torch.equal(theirs.lm_head.weight, weights["head.weight"].bfloat16())


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_have_the_mode_that_the_user_s_mask_gives(tmp_path: Path, mask: int) -> None:
    spec = dataclasses.replace(small_model(Family.LLAMA), vocab=300)
    folder = stored(tmp_path, spec, random_weights(spec))
    before = os.umask(mask)
    try:
        export(folder, tmp_path / "model", train_bpe(iter(["water\n"] * 9), vocab=270), LENGTH)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {0o666 & ~mask}


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    spec = small_model(Family.LLAMA)
    folder = stored(tmp_path, spec, random_weights(spec))
    for _ in range(2):
        export(folder, tmp_path / "model", None, LENGTH)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    spec = small_model(Family.LLAMA)
    folder = stored(tmp_path, spec, random_weights(spec))
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="taken: cannot be written: File exists") as caught:
        export(folder, tmp_path / "taken", None, LENGTH)
    assert caught.value.remedy


def test_a_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
    spec = small_model(Family.LLAMA)
    folder = stored(tmp_path, spec, random_weights(spec))
    with file_size_limit(4096), pytest.raises(UserError, match=r"model: cannot be written: .*File too large"):
        export(folder, tmp_path / "model", None, LENGTH)


def test_a_corrupt_checkpoint_is_refused(tmp_path: Path) -> None:
    spec = small_model(Family.LLAMA)
    folder = stored(tmp_path, spec, random_weights(spec))
    (folder / "__0_0.distcp").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="is corrupt"):
        export(folder, tmp_path / "model", None, LENGTH)
    assert not (tmp_path / "model").exists()
