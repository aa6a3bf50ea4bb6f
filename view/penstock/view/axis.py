"""Round numbers for axes, and times written in one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_UNITS: Final = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


def round_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides ``span`` into at most ``most`` parts."""
    if span <= 0 or most < 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most * (1 + 1e-9))


def round_ticks(span: float, most: int) -> tuple[float, ...]:
    """Multiples of `round_step` from 0 up to ``span``."""
    step = round_step(span, most)
    return tuple(i * step for i in range(math.floor(span / step * (1 + 1e-12)) + 1)) if span > 0 else (0.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeUnit:
    """A unit of time in nanoseconds, chosen once for a picture so that all its times compare at a glance."""

    nanoseconds: int
    name: str

    def text(self, nanoseconds: float, *, unit: bool = True) -> str:
        """A time to three or more digits, such as ``12.3 ms``."""
        value = nanoseconds / self.nanoseconds
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
        shown = f"{value:.{min(digits, 3)}f}"
        return f"{shown} {self.name}" if unit else shown

    def tick(self, nanoseconds: float) -> str:
        """A tick's number, without needless zeros and without the unit."""
        return f"{nanoseconds / self.nanoseconds:.6g}"


def time_unit(nanoseconds: float) -> TimeUnit:
    """The largest unit in which ``nanoseconds`` is at least 1."""
    size, name = next((u for u in _UNITS if nanoseconds >= u[0]), _UNITS[-1])
    return TimeUnit(nanoseconds=size, name=name)


def signed(share: float) -> str:
    """A share as a signed percentage with a true minus: ``+3.1%``, ``−0.4%``."""
    return f"{share:+.1%}".replace("-", "−")
