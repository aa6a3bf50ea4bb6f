"""An instruction while passes still add to it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.program import Channel
from penstock.core.schedule import Action


@dataclass(slots=True)
class Draft:
    """An action, its message (from `transfers`) and the slots it touches (from `slots`), by number.

    ``releases`` are slots of a transfer that ends here: they live until now though nothing reads or writes them.
    """

    action: Action
    channel: Channel | None = None
    sequence: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
