"""Windows, training batches and validation batches over tokens that are their own positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.trainer.data.batches import TrainingBatches, ValidationBatches, Windows
from penstock.trainer.data.tokens import Tokens, open_tokens, write_tokens


def counting(count: int, *, vocab: int | None = None) -> Tokens:
    return Tokens(ids=np.arange(count, dtype=np.uint32), vocab=vocab or count, path=Path("counting.bin"))


def windows(count: int, sequence_length: int) -> Windows:
    return Windows(tokens=counting(count), sequence_length=sequence_length, vocab=count)


def batches(count: int, sequence_length: int, *, global_batch: int, seed: int = 0) -> TrainingBatches:
    return TrainingBatches(windows=windows(count, sequence_length), global_batch=global_batch, seed=seed)


def test_labels_are_the_next_tokens() -> None:
    tokens, labels = windows(100, 8).read(np.array([0, 5]))
    assert tokens.tolist() == [list(range(8)), list(range(40, 48))]
    assert np.array_equal(labels, tokens + 1)


def test_arrays_are_contiguous_int64() -> None:
    for array in batches(100, 8, global_batch=4).batch(0, 0, 3):
        assert array.shape == (3, 8)
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.flags.writeable


@given(count=st.integers(2, 500), sequence_length=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_an_epoch_predicts_every_token_of_whole_windows_once(count: int, sequence_length: int, seed: int) -> None:
    if count <= sequence_length:
        return
    num_windows = (count - 1) // sequence_length
    _, labels = batches(count, sequence_length, global_batch=num_windows, seed=seed).batch(0, 0, num_windows)
    assert sorted(labels.ravel()) == list(range(1, num_windows * sequence_length + 1))


@given(
    dp=st.sampled_from([1, 2, 3, 4]),
    micro_batch=st.sampled_from([1, 2, 5]),
    num_microbatches=st.integers(1, 4),
    step=st.integers(0, 1000),
    seed=st.integers(0, 2**63),
)
def test_samples_do_not_depend_on_the_reading_rank(
    dp: int, micro_batch: int, num_microbatches: int, step: int, seed: int
) -> None:
    global_batch = dp * micro_batch * num_microbatches
    source = batches(700, 10, global_batch=global_batch, seed=seed)
    per_replica = global_batch // dp
    parts = [
        source.batch(step, replica * per_replica + first, micro_batch)
        for replica in range(dp)
        for first in range(0, per_replica, micro_batch)
    ]
    whole = source.batch(step, 0, global_batch)
    for column in (0, 1):
        assert np.array_equal(np.concatenate([part[column] for part in parts]), whole[column])


@given(st.integers(1, 30), st.integers(0, 10))
def test_steps_follow_each_other_through_one_stream(global_batch: int, step: int) -> None:
    """The stream does not depend on how many samples a step has."""
    one_by_one = batches(500, 10, global_batch=1)
    expected = np.concatenate([one_by_one.batch(step * global_batch + i, 0, 1)[0] for i in range(global_batch)])
    assert np.array_equal(batches(500, 10, global_batch=global_batch).batch(step, 0, global_batch)[0], expected)


def test_a_batch_may_hold_several_epochs() -> None:
    tokens, _ = batches(31, 10, global_batch=9).batch(0, 0, 9)
    for epoch in range(3):
        assert sorted(tokens[3 * epoch : 3 * epoch + 3, 0]) == [0, 10, 20]


def test_a_mapped_file_gives_the_same_batches(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", [np.arange(500)], vocab=500)
    mapped = Windows(tokens=open_tokens(tmp_path / "tokens.bin"), sequence_length=16, vocab=500)
    expected = batches(500, 16, global_batch=8, seed=3).batch(2, 1, 5)
    for got, want in zip(TrainingBatches(windows=mapped, global_batch=8, seed=3).batch(2, 1, 5), expected, strict=True):
        assert np.array_equal(got, want)


def test_samples_outside_the_global_batch_are_refused() -> None:
    source = batches(100, 8, global_batch=4)
    for first, count in ((0, 5), (4, 1), (-1, 2)):
        with pytest.raises(ValueError, match="not within a batch of 4"):
            source.batch(0, first, count)


def test_validation_is_fixed_even_and_ends() -> None:
    validation = ValidationBatches(windows=windows(1001, 10), limit=4)
    assert len(validation) == 4
    assert validation.batch(0, 3)[0][:, 0].tolist() == [0, 250, 500]
    assert validation.batch(3, 3)[0][:, 0].tolist() == [750]


@given(count=st.integers(11, 400), limit=st.integers(1, 50))
def test_validation_windows_are_distinct_and_all_when_few(count: int, limit: int) -> None:
    validation = ValidationBatches(windows=windows(count, 10), limit=limit)
    starts = validation.batch(0, limit)[0][:, 0]
    assert len(np.unique(starts)) == len(validation) == min(limit, (count - 1) // 10)


def test_a_sequence_longer_than_the_data_is_refused() -> None:
    assert len(windows(9, 8)) == 1
    with pytest.raises(UserError, match="8 and its next token are longer than the data: 8 tokens") as refusal:
        windows(8, 8)
    assert refusal.value.where == "spec.data.sequenceLength"


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary of 100 exceeds the model's of 99") as refusal:
        Windows(tokens=counting(100), sequence_length=8, vocab=99)
    assert refusal.value.where == "spec.model.vocab"


def test_an_id_outside_the_vocabulary_is_refused_when_read() -> None:
    lying = Windows(tokens=counting(100, vocab=50), sequence_length=10, vocab=60)
    assert lying.read(np.array([4]))[1].max() == 50
    with pytest.raises(UserError, match="token id 60 lies outside the vocabulary of 60"):
        lying.read(np.array([5]))
