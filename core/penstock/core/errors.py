"""The two kinds of errors: mistakes that the user can fix, and failures of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

REMEDY = "remedy: "
"""Prefix of the line with the remedy in a mistake's text."""
_REMEDY_LINE = f"\n  {REMEDY}"

MOST_SHOWN = 60


def shown(value: Any) -> str:
    """``value`` as messages quote it: shortened; a number of thousands of digits is described by their number."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of about {round(value.bit_length() * math.log10(2))} digits"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


class PenstockError(Exception):
    """Base of all errors that penstock raises on purpose."""


class UserError(PenstockError):
    """A mistake that the user can fix; the command line prints it and exits with code 2.

    ``where`` is the place (a field path such as ``spec.model.heads``, a file, a line), ``what`` the problem, ``remedy``
    the fix.
    """

    def __init__(self, *, what: str, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        cure = f"{_REMEDY_LINE}{self.remedy}" if self.remedy else ""
        return f"{place}{self.what}{cure}"

    @classmethod
    def reported(cls, text: str) -> UserError:
        """The mistake that another process reported as ``text``; its place stays part of ``what``."""
        what, _, remedy = text.partition(_REMEDY_LINE)
        return cls(what=what, remedy=remedy)


MOST_MISTAKES = 32
"""Further mistakes are not reported, which bounds the work and the answer for any input."""


class MistakesError(UserError):
    """Several mistakes of one input, in ``errors``; place, text and remedy are those of the first."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(what=first.what, where=first.where, remedy=first.remedy)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def mistakes_in(error: UserError) -> tuple[UserError, ...]:
    """All single mistakes of ``error``."""
    return error.errors if isinstance(error, MistakesError) else (error,)


def check_all(*checks: Callable[[], None]) -> None:
    """Call all ``checks`` and raise their errors together."""
    raise_all([mistake for check in checks for mistake in mistakes_raised_by(check)])


def mistakes_raised_by(check: Callable[[], Any]) -> tuple[UserError, ...]:
    """All single mistakes that ``check`` raises; empty if it returns."""
    try:
        check()
    except UserError as error:
        return mistakes_in(error)
    return ()


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise ``errors``, one or several; return if there are none."""
    mistakes = [mistake for error in errors for mistake in mistakes_in(error)][:MOST_MISTAKES]
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else MistakesError(mistakes)


class RunError(PenstockError):
    """A run that failed for another reason than the user's input; exit code 1."""


class ProgramError(PenstockError):
    """A Program that must not run: the rank and action, the reason in one sentence, and the grid of the steps before.

    ``rank`` is None, and action and grid are empty, if the Program as a whole is wrong.
    """

    def __init__(self, *, reason: str, rank: int | None = None, action: str = "", grid: str = "") -> None:
        self.rank = rank
        self.action = action
        self.reason = reason
        self.grid = grid
        super().__init__(reason if rank is None else f"rank {rank}, {action}: {reason}\n\n{grid}")


class TooManyKernelsError(ProgramError):
    """A Program that can run on CPU, but may need more communication kernels at once than a CUDA device runs."""


class MemoryLimitError(ProgramError):
    """A Program that can run, but needs more memory than ``rank`` has."""
