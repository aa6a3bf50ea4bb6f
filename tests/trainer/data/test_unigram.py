"""The unigram baseline against its definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.trainer.data.tokens import Tokens
from penstock.trainer.data.unigram import unigram_cross_entropy

ID_LISTS = st.lists(st.integers(0, 9), min_size=1, max_size=50)


def tokens(ids: list[int], *, vocab: int = 10) -> Tokens:
    return Tokens(ids=np.array(ids, dtype=np.uint16), vocab=vocab, path=Path("ids.bin"))


@given(train=ID_LISTS, validation=ID_LISTS)
def test_equals_the_mean_of_each_tokens_surprise(train: list[int], validation: list[int]) -> None:
    surprise = [-math.log((train.count(id_) + 1) / (len(train) + 10)) for id_ in validation]
    expected = math.fsum(surprise) / len(validation)
    assert unigram_cross_entropy(tokens(train), tokens(validation)) == pytest.approx(expected, rel=1e-12)


def test_evenly_spread_tokens_cost_the_log_of_the_vocabulary() -> None:
    even = tokens(list(range(10)) * 7)
    assert unigram_cross_entropy(even, even) == pytest.approx(math.log(10))


def test_a_larger_file_is_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = tokens([1, 2, 2, 3, 9] * 20), tokens([2, 3, 4] * 9)
    whole = unigram_cross_entropy(train, validation)
    monkeypatch.setattr("penstock.trainer.data.unigram._CHUNK_TOKENS", 7)
    assert unigram_cross_entropy(train, validation) == whole


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="token id 12 lies outside the vocabulary of 10"):
        unigram_cross_entropy(tokens([1, 2]), tokens([12], vocab=20))
