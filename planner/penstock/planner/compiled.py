"""Compiled functions that make no array.

numba counts references to every array at every call, and where a function is inlined in a loop. That took three
quarters of the simulator's time. Functions that make no array need no counts: they are compiled without numba's
runtime, by its option ``_nrt``. A caller that makes the arrays is compiled as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}


def compiled(function: Function) -> Function:
    """The function compiled; it makes no array."""
    return cast(Function, numba.njit(**OPTIONS)(function))


def inlined(function: Function) -> Function:
    """The same, inlined wherever it is called."""
    return cast(Function, numba.njit(**OPTIONS, inline="always")(function))
