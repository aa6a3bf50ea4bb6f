"""An instruction that the passes still extend."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.program import Channel
from penstock.core.schedule import Action


@dataclass(slots=True)
class Draft:
    """An action, its message (from `transfers`) and the slots it touches (from `slots`), by number.

    ``releases`` are slots of a transfer that ends here: they stay live until now although no instruction uses them.
    """

    action: Action
    channel: Channel | None = None
    sequence: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
