"""A function in a process of its own, which shares a few numbers with who started it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from ctypes import c_double
from typing import Any, TypeVar

NAMES = ("listening", "sending", "acknowledged", "end")

T = TypeVar("T")
LOOK_SECONDS = 0.005
SPAWNED = multiprocessing.get_context("spawn")


class Shared:
    """Numbers that both processes see; each is written by one of them, and zero before that."""

    def __init__(self) -> None:
        self._values = {name: SPAWNED.RawValue(c_double, 0.0) for name in NAMES}

    def __getitem__(self, name: str) -> float:
        return self._values[name].value

    def __setitem__(self, name: str, value: float) -> None:
        self._values[name].value = value

    def reached(self, name: str, least: float, other: Future[Any]) -> bool:
        """Wait until the number is at least this; false if the ``other`` process's function ends before."""
        while self[name] < least and not other.done():
            time.sleep(LOOK_SECONDS)
        return self[name] >= least


@contextmanager
def away(function: Callable[..., T], shared: Shared, *arguments: object) -> Iterator[Future[T]]:
    """Call ``function(shared, *arguments)`` over there."""
    with ProcessPoolExecutor(1, mp_context=SPAWNED, initializer=_keep, initargs=(shared,)) as pool:
        yield pool.submit(_call, function, arguments)


_kept: list[Shared] = []


def _keep(shared: Shared) -> None:
    _kept.append(shared)


def _call(function: Callable[..., T], arguments: tuple[object, ...]) -> T:
    return function(_kept[0], *arguments)
