"""Loss of a unigram model, which knows only the frequencies of tokens: the baseline that training has to beat."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from penstock.trainer.data.tokens import Ids, Tokens

_CHUNK_TOKENS = 1 << 18


def unigram_cross_entropy(train: Tokens, validation: Tokens) -> float:
    """Nats per validation token under the training tokens' frequencies with add-one smoothing.

    H = -sum_v m_v / M * ln((n_v + 1) / (N + V)) for counts n of the N training tokens, m of the M validation
    tokens, and V the vocabulary.

    Raises:
        UserError: a token id lies outside the training tokens' vocabulary.
    """
    smoothed = _counts(train, train.vocab) + 1
    held_out = _counts(validation, train.vocab)
    nats = np.log(smoothed.sum()) - np.log(smoothed)
    return float(held_out @ nats / held_out.sum())


def _counts(tokens: Tokens, vocab: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab, dtype=np.int64)
    for first in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens.read(slice(first, first + _CHUNK_TOKENS), vocab=vocab)
        counts += np.bincount(chunk, minlength=vocab)
        _release_pages(tokens.ids)
    return counts


def _release_pages(ids: Ids) -> None:
    """Release the pages of a mapped file that were read: they would count as memory of this process."""
    base: object = ids
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
