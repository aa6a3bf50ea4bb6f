"""Compiled functions that allocate no array.

numba counts references to every array at every call, and where a function is inlined also in its loop. That took three
quarters of the simulator's time. Functions that allocate no array need no counts: they are compiled without numba's
runtime, by its option ``_nrt``. A caller that allocates the arrays is compiled as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}


def compiled(function: Function) -> Function:
    """Compile a function that allocates no array."""
    return cast(Function, numba.njit(**OPTIONS)(function))


def inlined(function: Function) -> Function:
    """Compile a function that allocates no array, and inline it at every call."""
    return cast(Function, numba.njit(**OPTIONS, inline="always")(function))
