"""Errors of a rank that a retry cannot fix: they end the job at once, and the user has to act."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.trainer.worker import impossible_allocation

CAPACITY = 2**40


def raised_by(size: int) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(size, dtype=torch.float32)
    return caught.value


@pytest.mark.parametrize("size", [2**55, 2**62])
def test_an_allocation_that_pytorch_can_make_on_no_machine_is_a_user_error(size: int) -> None:
    """The larger one overflows an integer."""
    mistake = impossible_allocation(raised_by(size), CAPACITY)
    assert mistake is not None
    assert "an allocation" in mistake.what
    assert "retry" in mistake.remedy


def test_an_allocation_that_numpy_can_make_on_no_machine_is_a_user_error() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(2**57, dtype=np.float64)
    assert impossible_allocation(caught.value, CAPACITY) is not None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which", 2.5),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes. Error code 12", 1.0),
        ("Unable to allocate 512. MiB for an array with shape (1,)", 0.5),
    ],
)
def test_an_allocation_that_would_fit_alone_may_be_retried(text: str, wanted: float) -> None:
    error = RuntimeError(text)
    assert impossible_allocation(error, int(wanted * 2**30)) is None
    assert impossible_allocation(error, int(wanted * 2**30) - 1) is not None


@pytest.mark.parametrize("text", ["", "connection reset by peer", "tried to allocate", "to allocate much GiB"])
def test_other_errors_are_none(text: str) -> None:
    assert impossible_allocation(RuntimeError(text), 1) is None
