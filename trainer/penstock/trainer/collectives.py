"""What all ranks of a group do together in plain Python, also where a process is alone and no group exists."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class FailedError(Exception):
    """Something failed on one rank, and all ranks know."""


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """The place of this rank in ``group``, or among all."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks ``group`` has, or there are."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in the order of ranks; collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * size_of(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def concatenated(values: Sequence[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's values in one list, in the order of ranks; collective."""
    return [value for rank_values in gather(list(values), group) for value in rank_values]


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What ``action`` gives on every rank; collective.

    If it raises OSError or `FailedError` on any rank, all raise `FailedError` with the first such rank's message.
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
