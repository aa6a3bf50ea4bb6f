"""Collectives over Python objects. In a single process without process groups they return its own values."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class FailedError(Exception):
    """An operation failed on one rank. Raised on all ranks."""


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """Index of this rank in ``group``, by default among all ranks."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks of ``group``, by default of all ranks."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in the order of ranks. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * size_of(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def concatenated(values: Sequence[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's values in one list, in the order of ranks. Collective."""
    return [value for rank_values in gather(list(values), group) for value in rank_values]


def run_on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``action`` on every rank and return the results in the order of ranks. Collective.

    If it raises OSError or `FailedError` on any rank, all ranks raise `FailedError` with the first such rank's message.
    """
    result: T | None = None
    problem = ""
    try:
        result = action()
    except (OSError, FailedError) as error:
        problem = str(error)
    gathered = gather((result, problem), group)
    for _, message in gathered:
        if message:
            raise FailedError(message)
    return [typing.cast(T, value) for value, _ in gathered]
