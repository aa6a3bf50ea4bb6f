"""Tokenizers: lossless, deterministic, and clear about what they cannot read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Subwords
from tokenizers import models, processors

from penstock.core.errors import UserError
from penstock.core.job import TokenizerSpec
from penstock.trainer.data.tokenizer import (
    SEPARATOR,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    identity,
    load_tokenizer,
    make_tokenizer,
    train_bpe,
)

SAMPLE = ["def add(first, second):\n    return first + second\n", "the theme of the thesis\n"] * 30
UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BPE = train_bpe(iter(SAMPLE), vocab=300)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode([text])
    return [int(id_) for id_ in ids]


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
@given(text=UTF8_TEXT | st.sampled_from(["", SEPARATOR, f"a{SEPARATOR}b", "\0\x7f\n\r\t "]))
def test_text_round_trips_and_cannot_contain_a_separator(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.separator not in ids
    assert all(0 <= id_ < tokenizer.vocab for id_ in ids)


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
@given(texts=st.lists(UTF8_TEXT, max_size=4))
def test_separators_show_between_documents(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids = [id_ for text in texts for id_ in (*ids_of(tokenizer, text), tokenizer.separator)]
    assert tokenizer.decode(ids) == "".join(text + SEPARATOR for text in texts)


def test_a_batch_is_encoded_text_by_text() -> None:
    texts = ["the thesis", "", "def add"]
    assert [ids.tolist() for ids in BPE.encode(texts)] == [ids_of(BPE, text) for text in texts]


def test_half_a_character_is_shown_as_such() -> None:
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_training_learns_common_words_within_the_vocabulary() -> None:
    assert 257 < BPE.vocab <= 300
    assert len(ids_of(BPE, " first second the")) < 8
    assert ByteTokenizer().vocab == 257


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    tiny = train_bpe(iter(["ab ab ab"]), vocab=4096)
    assert 257 <= tiny.vocab < 270


def test_training_is_equal_in_another_process() -> None:
    script = (
        "import sys, json; from penstock.trainer.data.tokenizer import train_bpe;"
        "sys.stdout.write(train_bpe(iter(json.load(sys.stdin)), vocab=300).to_json())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(SAMPLE), capture_output=True, text=True, check=True
    )
    assert other.stdout == BPE.to_json()


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.to_json())
    loaded = make_tokenizer(TokenizerSpec(file=str(path)), iter(()))
    assert loaded.to_json() == BPE.to_json()
    assert (loaded.vocab, loaded.separator) == (BPE.vocab, BPE.separator)


def test_settings_choose_the_tokenizer() -> None:
    assert isinstance(make_tokenizer(TokenizerSpec(train="bytes"), iter(())), ByteTokenizer)
    trained = make_tokenizer(TokenizerSpec(train="bpe", vocab=300), iter(SAMPLE))
    assert isinstance(trained, SubwordTokenizer)
    assert trained.to_json() == BPE.to_json()


def test_identity_follows_settings_and_content(tmp_path: Path) -> None:
    for name, content in (("a", "{}"), ("same", "{}"), ("b", "[]")):
        (tmp_path / name).write_text(content)
    a, same, b = (identity(TokenizerSpec(file=str(tmp_path / name))) for name in ("a", "same", "b"))
    others = [
        identity(TokenizerSpec(train="bytes")),
        *(identity(TokenizerSpec(train="bpe", vocab=v)) for v in (300, 301)),
    ]
    assert a == same
    assert len({a, b, *others}) == 5


def word_level(vocab: dict[str, int]) -> Subwords:
    return Subwords(models.WordLevel(vocab, unk_token=next(iter(vocab))))


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_known_separators_are_found(tmp_path: Path, name: str) -> None:
    word_level({"[UNK]": 0, name: 7}).save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.separator == 7
    assert loaded.vocab == 8


def test_what_a_file_adds_for_other_uses_is_undone(tmp_path: Path) -> None:
    """Truncation, padding and a template with special tokens would all corrupt a stream of documents."""
    subwords = Subwords.from_str(BPE.to_json())
    subwords.enable_truncation(4)
    subwords.enable_padding(length=64)
    subwords.post_processor = processors.TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
    subwords.save(str(tmp_path / "tokenizer.json"))
    text = "return the thesis of the first theme"
    assert ids_of(load_tokenizer(tmp_path / "tokenizer.json"), text) == ids_of(BPE, text)


def write_unseparated(path: Path) -> None:
    word_level({"[UNK]": 0}).save(str(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "the tokenizer cannot be read: No such file"),
        (lambda path: path.mkdir(), "the tokenizer cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "the tokenizer cannot be read"),
        (lambda path: path.write_text("{}"), "is not a tokenizer.json"),
        (lambda path: path.write_text("not json"), "is not a tokenizer.json"),
        (write_unseparated, "has no token that separates documents"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, make: Any, reason: str) -> None:
    path = tmp_path / "tokenizer.json"
    make(path)
    with pytest.raises(UserError, match=reason) as refusal:
        load_tokenizer(path)
    assert refusal.value.where == str(path)
    assert refusal.value.remedy
