"""Expected time of steps on devices that are taken away now and then, such as spot devices.

A run saves a checkpoint after every ``steps_between`` steps. Any device may be taken away at any moment; then the run
restarts, which takes ``restart_seconds``, and does the steps since its last checkpoint again. This is the model of
Young (Commun. ACM 17(9), 1974) and Daly (Future Gener. Comput. Syst. 22(3), 2006), without the time to write a
checkpoint, which overlaps steps here.

Let l be the rate of interruptions, per second, of all devices of a plan together, t the time of the steps between two
checkpoints, and R that of a restart. With exponential times between interruptions, which may also hit a restart, the
expected time from one checkpoint to the next is

    e^(l R) (e^(l t) - 1) / l  =  t (1 + l (t / 2 + R)) + terms of second order in l

The right side is Young's first-order form: an interruption costs half an interval and a restart on average. The left
side is Daly's complete form, which also holds where interruptions are frequent. It is used here, because it is no
longer than the approximation.

Example: 16 devices, each interrupted every 20 hours, a checkpoint every half hour, restarts of 5 minutes. There are 0.8
interruptions in an hour, and a run takes 1.31 times as long; the first-order form says 1.27 times. On 64 devices it
takes 3.23 times as long, so a step on 64 devices has to take less than 0.41 times as long as one on 16 to be worth it.

Two approximations: the last steps, if they are fewer than ``steps_between``, count in proportion; and the notice before
an interruption, in which a run may save a checkpoint, is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.units import to_nanoseconds, to_seconds

SECONDS_PER_HOUR = 3600.0
MOST_EXPONENT = 100.0
"""With larger exponents a run practically never ends; the time then grows linearly, so that it stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Interruptions of a run with a checkpoint every ``steps_between`` steps."""

    steps_between: int = 1
    restart_seconds: float = 0.0

    def expected_seconds(self, step_seconds: float, per_hour: float) -> float:
        """The expected time for one step, if its devices together are interrupted ``per_hour`` times an hour."""
        rate = per_hour * self.steps_between / SECONDS_PER_HOUR
        if rate * step_seconds == 0:
            return step_seconds
        return self._restarts(per_hour) * _expm1(rate * step_seconds) / rate

    def expected_ns(self, step_ns: int, per_hour: float) -> int:
        """`expected_seconds` in nanoseconds."""
        return to_nanoseconds(self.expected_seconds(to_seconds(step_ns), per_hour)) if per_hour else step_ns

    def step_seconds(self, expected_seconds: float, per_hour: float) -> float:
        """The step whose expected time this is."""
        rate = per_hour * self.steps_between / SECONDS_PER_HOUR
        if rate * expected_seconds == 0:
            return expected_seconds
        return _log1p(rate * expected_seconds / self._restarts(per_hour)) / rate

    def _restarts(self, per_hour: float) -> float:
        """The factor for restarts that are interrupted, too."""
        return math.exp(min(per_hour * self.restart_seconds / SECONDS_PER_HOUR, MOST_EXPONENT))


def _expm1(exponent: float) -> float:
    return math.expm1(min(exponent, MOST_EXPONENT)) * max(exponent / MOST_EXPONENT, 1.0)


def _log1p(value: float) -> float:
    """The inverse of `_expm1`."""
    return min(math.log1p(value), MOST_EXPONENT) * max(value / math.expm1(MOST_EXPONENT), 1.0)


NO_RESTARTS = Interruptions()
"""Interruptions that cost at most the current step: a checkpoint after each step, and restarts that take no time."""
