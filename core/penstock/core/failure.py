"""What to tell first of an attempt that was lost: what happened, the line that shows it, whose log to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import REMEDY

LAST_WORDS = "lastWords"
"""The field of a phase's event with what the rank at fault printed at the end."""
_RANK = re.compile(r"rank (\d+)\b")
_FAILING = re.compile(
    r"(\[rank\d+\]:\s*)?([\w.]*(error|exception|interrupt)\b|fatal |terminate called"
    r"|.*\b(out of memory|segmentation fault|bus error|core dumped|killed)\b)",
    re.IGNORECASE,
)
"""How a line begins, or what it holds, that an interpreter, a library or the system writes when a process fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """``what`` happened and ``more`` that was said of it, ``remedies`` that came with it, the ``rank`` at fault.

    ``evidence`` is the line of the rank's last words that failed first, where it says more than ``what`` does.
    """

    what: str
    more: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    rank: int | None = None
    evidence: str = ""


def read_failure(message: str, last_words: Sequence[str] = ()) -> Failure:
    """The failure that a phase's message tells, with the rank's last words beside it."""
    what, *others = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    rank = _RANK.match(what)
    return Failure(
        what=what,
        more=tuple(line for line in others if not line.startswith(REMEDY)),
        remedies=tuple(line.removeprefix(REMEDY) for line in others if line.startswith(REMEDY)),
        rank=int(rank[1]) if rank else None,
        evidence=_evidence(message, last_words),
    )


def _evidence(message: str, last_words: Sequence[str]) -> str:
    first = next((line.strip() for line in last_words if _FAILING.match(line.strip())), "")
    told = first.partition(": ")[2] or first
    return "" if told in message else first
