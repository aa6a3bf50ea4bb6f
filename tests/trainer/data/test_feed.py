"""Batches by step: read when they are taken on CPU, ahead and into two fixed places for CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.errors import UserError
from penstock.trainer import memory
from penstock.trainer.data.batches import Ids
from penstock.trainer.data.feed import BatchFeed

SHAPE = (2, 3)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Reader:
    """Gives batches that hold their step, and keeps which were read."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_broken = False

    def __call__(self, step: int) -> tuple[Ids, Ids]:
        self.steps.append(step)
        if self.is_broken:
            raise UserError(what="a token id is not in the vocabulary", where="data")
        return np.full(SHAPE, step), np.full(SHAPE, -step)


@pytest.fixture(autouse=True)
def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned."""
    monkeypatch.setattr(memory, "staging", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_every_step_gets_its_batch(device: torch.device) -> None:
    """Whether or not it was read ahead, and after a step that was not followed by the next one."""
    reader = Reader()
    feed = BatchFeed(reader, SHAPE, device)
    for step in (0, 1, 2, 7, 8):
        ids, labels = feed.take(step)
        if step != 1:
            feed.read_ahead(step + 1)
        assert ids.tolist() == np.full(SHAPE, step).tolist()
        assert labels.tolist() == np.full(SHAPE, -step).tolist()
    assert reader.steps == [0, 1, 2, 7, 8] if device == CPU else [0, 1, 2, 3, 7, 8, 9]


def test_a_prefetched_batch_uses_the_other_of_two_buffers() -> None:
    feed = BatchFeed(Reader(), SHAPE, GPU)
    places = []
    for step in range(6):
        ids, labels = feed.take(step)
        places.append((ids.data_ptr(), labels.data_ptr()))
        feed.read_ahead(step + 1)
        assert ids[0, 0] == step, "the device may still copy from it"
    assert places == places[:2] * 3
    assert len({place for pair in places for place in pair}) == 4


def test_a_batch_that_cannot_be_prefetched_fails_in_its_step() -> None:
    reader = Reader()
    feed = BatchFeed(reader, SHAPE, GPU)
    feed.take(0)
    reader.is_broken = True
    feed.read_ahead(1)
    with pytest.raises(UserError, match="not in the vocabulary"):
        feed.take(1)
