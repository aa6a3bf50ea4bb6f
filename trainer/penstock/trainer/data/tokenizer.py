"""Tokenizers: byte-level BPE trained on the corpus, an existing ``tokenizer.json``, or raw bytes.

Text that looks like a special token is encoded as text: only `Tokenizer.separator` ends a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as Subwords
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.core.errors import UserError
from penstock.core.job import TokenizerSpec
from penstock.trainer.data.tokens import Ids

SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")  # gpt2, llama 3, llama 2, gemma
_NUM_BYTES = 256


class Tokenizer(Protocol):
    """Converts text to ids and back. ``separator`` is the id after every document. All ids are below ``vocab``."""

    @property
    def vocab(self) -> int: ...

    @property
    def separator(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        """The ids of each text, without separators."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``. Separators are written as ``<|endoftext|>``, or by the tokenizer's own name for them."""

    def to_json(self) -> str | None:
        """The content of a ``tokenizer.json``, or None if the tokenizer has none."""


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    @property
    def vocab(self) -> int:
        return _NUM_BYTES + 1

    @property
    def separator(self) -> int:
        return _NUM_BYTES

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        return (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        documents = np.split(np.asarray(ids), np.flatnonzero(np.equal(ids, self.separator)))
        texts = (bytes(document[document < _NUM_BYTES].tolist()) for document in documents)
        return SEPARATOR.join(text.decode(errors="replace") for text in texts)

    def to_json(self) -> None:
        return None


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, subwords: Subwords, *, separator: int) -> None:
        subwords.no_truncation()
        subwords.no_padding()
        subwords.encode_special_tokens = True
        self._subwords = subwords
        self._separator = separator
        self._vocab = max(subwords.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def vocab(self) -> int:
        return self._vocab

    @property
    def separator(self) -> int:
        return self._separator

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        encodings = self._subwords.encode_batch_fast(list(texts), add_special_tokens=False)
        return (np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._subwords.decode(list(ids), skip_special_tokens=False))

    def to_json(self) -> str:
        return str(self._subwords.to_str(pretty=False))


def identity(choice: TokenizerSpec) -> str:
    """String that is equal for choices that tokenise equal text equally.

    Raises:
        UserError: the tokenizer's file cannot be read.
    """
    if choice.file is not None:
        return f"file {hashlib.sha256(_read(Path(choice.file)).encode()).hexdigest()}"
    return f"bpe {choice.vocab}" if choice.train == "bpe" else "bytes"


def make_tokenizer(choice: TokenizerSpec, texts: Iterator[str]) -> Tokenizer:
    """Load, train or create the chosen tokenizer. Only training reads ``texts``.

    Raises:
        UserError: the tokenizer's file cannot be read or has no token to separate documents.
    """
    if choice.file is not None:
        return load_tokenizer(Path(choice.file))
    if choice.train == "bpe" and choice.vocab is not None:
        return train_bpe(texts, vocab=choice.vocab)
    return ByteTokenizer()


def train_bpe(texts: Iterator[str], *, vocab: int) -> SubwordTokenizer:
    """Train a byte-level BPE as in GPT-2. It is lossless on any text, and equal ``texts`` give equal tokenizers."""
    subwords = Subwords(models.BPE())
    subwords.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    subwords.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    subwords.train_from_iterator(texts, trainer)
    return _with_separator(subwords)


def load_tokenizer(path: Path) -> SubwordTokenizer:
    """Load the ``tokenizer.json`` at ``path``.

    Raises:
        UserError: it cannot be read or has no token to separate documents.
    """
    content = _read(path)
    try:
        subwords = Subwords.from_str(content)
    except Exception as error:  # the library raises plain Exception for everything
        raise UserError(
            what=f"is not a tokenizer.json: {error}",
            where=str(path),
            remedy="give a file saved by the tokenizers or transformers library",
        ) from error
    try:
        return _with_separator(subwords)
    except LookupError as error:
        raise UserError(
            what=str(error), where=str(path), remedy=f"add one of {', '.join(_SEPARATORS)} to it as a special token"
        ) from error


def _with_separator(subwords: Subwords) -> SubwordTokenizer:
    for name in _SEPARATORS:
        if (separator := subwords.token_to_id(name)) is not None:
            return SubwordTokenizer(subwords, separator=separator)
    raise LookupError("has no token that separates documents")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            what=f"the tokenizer cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="give the path of a tokenizer.json in spec.data.tokenizer.file",
        ) from error
