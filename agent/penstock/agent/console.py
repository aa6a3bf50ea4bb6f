"""Output of the agent's programs: lines on stderr, for the log of the program that started them."""

from __future__ import annotations

import sys

from penstock.core.errors import UserError, mistakes_in


def say(line: str) -> None:
    """Print one line."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def say_error(error: UserError) -> None:
    """Print the user's mistakes: for each the place, the problem and the remedy."""
    for mistake in mistakes_in(error):
        place = f"{mistake.where}: " if mistake.where else ""
        say(f"error {place}{mistake.what}")
        if mistake.remedy:
            say(f"remedy {mistake.remedy}")
