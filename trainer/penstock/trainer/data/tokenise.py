"""Turns a scanned corpus into a training and a validation token file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.core.job import TokenizerSpec
from penstock.core.preparing import Reporter
from penstock.trainer.data.corpus import Corpus, Event, Scan, split_events
from penstock.trainer.data.prepared import Part, write_prepared
from penstock.trainer.data.tokenizer import Tokenizer, make_tokenizer
from penstock.trainer.data.tokens import TokenWriter

TOKENIZER_BYTES = 32 << 20
"""Approximate amount of text that a tokenizer is trained on. More hardly changes a vocabulary and takes minutes."""

_BATCH_CHARACTERS = 2 << 20  # tokenised in one call: enough to keep all cores busy, with few offsets in memory

_SplitEvent: TypeAlias = tuple[bool, Event]


def tokenise(corpus: Corpus, scanned: Scan, choice: TokenizerSpec, folder: Path, reporter: Reporter) -> None:
    """Fill ``folder`` with prepared data.

    Raises:
        UserError: the tokenizer cannot be loaded, or the corpus changed since it was scanned.
    """
    texts = _sample(_training_texts(corpus, scanned), scanned.num_bytes)
    tokenizer = make_tokenizer(choice, _reported(texts, scanned, reporter))
    train = TokenWriter(folder / "train.bin", vocab=tokenizer.vocab)
    validation = TokenWriter(folder / "validation.bin", vocab=tokenizer.vocab)
    done_bytes = 0
    with train, validation:
        for batch in _batches(split_events(corpus, scanned)):
            done_bytes += _append(batch, tokenizer, train=train, validation=validation)
            reporter.progress("tokenising", done_bytes, scanned.num_bytes)
        headers = train.finish(), validation.finish()
    write_prepared(
        folder,
        train=Part(path="train.bin", header=headers[0], start=0, stop=headers[0].count),
        validation=Part(path="validation.bin", header=headers[1], start=0, stop=headers[1].count),
        tokenizer=tokenizer,
        origin={
            "documents": scanned.documents,
            "bytes": scanned.num_bytes,
            "sha256": scanned.sha256,
            "python": scanned.python,
        },
    )


def _training_texts(corpus: Corpus, scanned: Scan) -> Iterator[str]:
    events = split_events(corpus, scanned)
    return (event for held_out, event in events if not held_out and event is not None)


def _sample(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Every k-th piece, with the smallest k for which the sample has about `TOKENIZER_BYTES` or less."""
    every = math.ceil(num_bytes / TOKENIZER_BYTES)
    return (text for number, text in enumerate(texts) if number % every == 0)


def _reported(texts: Iterable[str], scanned: Scan, reporter: Reporter) -> Iterator[str]:
    total_bytes = min(scanned.num_bytes, TOKENIZER_BYTES)
    done_bytes = 0
    for text in texts:
        yield text
        done_bytes += len(text.encode())
        reporter.progress("training the tokenizer", min(done_bytes, total_bytes), total_bytes)


def _batches(events: Iterable[_SplitEvent]) -> Iterator[list[_SplitEvent]]:
    batch: list[_SplitEvent] = []
    characters = 0
    for item in events:
        batch.append(item)
        characters += len(item[1] or "")
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _append(batch: list[_SplitEvent], tokenizer: Tokenizer, *, train: TokenWriter, validation: TokenWriter) -> int:
    """Write each event of ``batch`` to its file. Returns the number of bytes of text."""
    separator = np.array([tokenizer.separator])
    texts = [event for _, event in batch if event is not None]
    encoded = tokenizer.encode(texts)
    for held_out, event in batch:
        writer = validation if held_out else train
        writer.append(separator if event is None else next(encoded))
    return sum(len(text.encode()) for text in texts)
