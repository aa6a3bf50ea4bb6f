"""Seconds as whole nanoseconds in 64 bits; larger ones are rejected in one place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.core.units import NANOSECONDS_PER_SECOND

MOST_NS = 2**61
"""The sum of two of these fits 64 bits."""
MOST_YEARS = 73


def whole_nanoseconds(seconds: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """``seconds`` rounded, elementwise; raises `UserError` for times that exceed 64 bits."""
    nanoseconds = np.rint(np.asarray(seconds, dtype=np.float64) * NANOSECONDS_PER_SECOND)
    require_countable(float(nanoseconds.max(initial=0.0)))
    return nanoseconds.astype(np.int64)


def require_countable(nanoseconds: float) -> None:
    """Raise `UserError` for a time, or a sum of times, that exceeds 64 bits."""
    if not nanoseconds <= MOST_NS:  # also rejects NaN
        raise UserError(
            what=f"a step would take over {MOST_YEARS} years, by these sizes, speeds and times",
            remedy="make the job smaller, or describe faster devices and links",
        )
