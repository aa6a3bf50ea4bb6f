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
        """A time to three significant digits, but at most three decimals, such as ``12.3 ms``."""
        value = nanoseconds / self.nanoseconds
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
        rounded = f"{value:.{min(digits, 3)}f}"
        return f"{rounded} {self.name}" if unit else rounded

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


def large(count: int) -> str:
    """A count for people: ``8.0 million``, ``175.2 billion``, ``98,304``."""
    scales = ((10**9, "billion"), (10**6, "million"))
    return next((f"{count / size:.1f} {name}" for size, name in scales if count >= size), f"{count:,}")


def utc(seconds: float) -> str:
    """Seconds since the epoch as ``2025-10-09 08:53 UTC``.

    Days to date by counting years from March, so that leap days come last: Howard Hinnant, "chrono-Compatible
    Low-Level Date Algorithms", 2013, civil_from_days.
    """
    days, rest = divmod(math.floor(seconds), 86_400)
    era, day_of_era = divmod(days + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    year = year_of_era + 400 * era + (month <= 2)
    return f"{year:04}-{month:02}-{day:02} {rest // 3600:02}:{rest % 3600 // 60:02} UTC"
