"""Ages of stored times and of silence, by clocks that no correction of the wall clock reaches.

Problem. Stored times are seconds since the epoch, because people read them and limits such as a deadline are meant so.
But this clock is corrected: an hour forwards would make every attempt silent for an hour, and an hour backwards would
put the next retry an hour off.

Idea. An age is measured by CLOCK_BOOTTIME, which only goes forwards, also while the machine is suspended. It counts
from the boot, so a stored time has it only together with the boot's id. If that is another one now, or none was stored,
the age is taken from the wall clock once, is 0 at least, and from then on grows by the observer's CLOCK_BOOTTIME. So a
time in the future by a clock that went back counts as now, and what is due after a duration is due after that duration
at the latest.

An observer whose times are all on one clock, as the operator's, has a
`penstock.core.host.clocks.SlewedClock` instead: the time of day, which never goes back and makes up for a correction
over ten times its length.

Example: an attempt failed at wall 1000 and boot time 50, and its retry is due 8 s later. At boot time 52 the wall clock
is set to 4600. By the wall clock the age is 3600 s and the retry overdue; here it is 2 s, and the retry is due at boot
time 58. A service that starts after a reboot at wall 990 begins with age 0.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Clocks of a machine at one moment: seconds since the epoch, and since the boot ``boot_id``.

    ``boot_id`` is empty for a stored time of which only the wall clock is known.
    """

    wall: float
    boot_id: str = ""
    boottime: float = 0.0

    def age(self, now: Reading) -> float:
        """Seconds from this stored time to ``now``, at least 0."""
        is_same_boot = self.boot_id != "" and self.boot_id == now.boot_id
        return max(0.0, now.boottime - self.boottime if is_same_boot else now.wall - self.wall)


class Ages:
    """Seconds since values changed, as this process observed them. The engine has no other memory between steps.

    A new process begins again, with the age that the value has by what is stored, or with 0.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], tuple[Hashable, float]] = {}

    def seconds(self, key: tuple[str, str], value: Hashable, boottime: float, initial: float = 0.0) -> float:
        """Seconds since ``value`` was first observed under ``key``, plus the age ``initial`` that it had then.

        A key is the id of an owner, such as a job or a plan request, and the name of one of its values.
        """
        known = self._since.get(key)
        if known is None or known[0] != value:
            known = self._since[key] = (value, boottime - initial)
        return boottime - known[1]

    def forget_all_but(self, owners: Collection[str]) -> None:
        """Forget the values of other owners."""
        self._since = {key: known for key, known in self._since.items() if key[0] in owners}
