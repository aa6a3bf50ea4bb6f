"""Summary of a lost attempt: the failure, the log line that shows it, and the rank whose log to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import REMEDY

LAST_OUTPUT = "lastWords"
"""The field of a phase's event with the last output of the rank at fault."""
_RANK = re.compile(r"rank (\d+)\b")
_FAILING = re.compile(
    r"(\[rank\d+\]:\s*)?([\w.]*(error|exception|interrupt)\b|fatal |terminate called"
    r"|.*\b(out of memory|segmentation fault|bus error|core dumped|killed)\b)",
    re.IGNORECASE,
)
"""Patterns of lines that an interpreter, a library or the system writes when a process fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """``what`` happened, ``more`` details, their ``remedies``, and the ``rank`` at fault.

    ``evidence`` is the first line of the rank's last output that reports a failure; empty if the message has it.
    """

    what: str
    more: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    rank: int | None = None
    evidence: str = ""


def read_failure(message: str, last_output: Sequence[str] = ()) -> Failure:
    """The failure that a phase's message describes, with evidence from the rank's last output."""
    what, *others = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    rank = _RANK.match(what)
    return Failure(
        what=what,
        more=tuple(line for line in others if not line.startswith(REMEDY)),
        remedies=tuple(line.removeprefix(REMEDY) for line in others if line.startswith(REMEDY)),
        rank=int(rank[1]) if rank else None,
        evidence=_evidence(message, last_output),
    )


def _evidence(message: str, last_output: Sequence[str]) -> str:
    first = next((line.strip() for line in last_output if _FAILING.match(line.strip())), "")
    description = first.partition(": ")[2] or first
    return "" if description in message else first
