"""Output of `./dev`, and errors that the user has to fix."""

from __future__ import annotations

import sys


class SetupError(Exception):
    """Ends the script with a message and an exit code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(text: str) -> None:
    print(f"[dev] {text}", file=sys.stderr, flush=True)
