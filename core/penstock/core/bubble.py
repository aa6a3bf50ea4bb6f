"""Lost time of ranks in a step: one definition for predictions, measured steps, reports and pages.

The *bubble* of a rank is the share of its step that is not compute. *Waiting* is the part of that in which it waits for
other ranks; waiting only for transfers is communication. Waiting is only known for simulated steps, where the rank that
is waited for is known. Both are given as the mean over ranks and the worst rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.core.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost(Manifest):
    """Shares of a step from 0 to 1: the mean over ranks, and the share and number of the worst rank (the first of
    equals).
    """

    mean: float
    worst: float
    rank: int

    @classmethod
    def of(cls, lost: Sequence[float], step: float) -> Self:
        """Shares of the time that each rank ``lost`` in a step of length ``step``."""
        shares = [lost_time / step if step else 0.0 for lost_time in lost] or [0.0]
        worst = max(shares)
        return cls(mean=sum(shares) / len(shares), worst=worst, rank=shares.index(worst))

    @property
    def text(self) -> str:
        """Text for people."""
        mean, worst = _percent(self.mean), _percent(self.worst)
        return f"{mean} on every rank" if mean == worst else f"{mean} on average, {worst} on rank {self.rank}"

    @property
    def short(self) -> str:
        """Shorter text, for small spaces."""
        mean, worst = _percent(self.mean), _percent(self.worst)
        return mean if mean == worst else f"{mean}, worst {worst}"

    @property
    def range_text(self) -> str:
        """Text for a list: ``20.1 % (24.3 %)``."""
        mean, worst = _percent(self.mean), _percent(self.worst)
        return mean if mean == worst else f"{mean} ({worst})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def bubble(busy: Sequence[float], step: float) -> Lost:
    """The bubble of ranks that computed for ``busy`` in a step of length ``step``."""
    return Lost.of([step - busy_time for busy_time in busy], step)
