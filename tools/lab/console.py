"""Progress messages and errors of the lab, and execution of other programs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LAST_LINES = 12


class LabError(Exception):
    """Ends the command with a message that says what is wrong and what to do."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[lab] {text}", file=sys.stderr, flush=True)


def tail(text: str) -> str:
    """Return the last `LAST_LINES` lines of a long string."""
    return "\n".join(text.rstrip().splitlines()[-LAST_LINES:])


def run(
    *command: str | Path, stdin: str | None = None, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program and return its stdout; raises `LabError` with its last lines of output if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=stdin or "", env=environ, cwd=cwd, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise LabError(f"{words[0]} is missing: {error}") from error
    if done.returncode != 0:
        raise LabError(f"command failed: {shlex.join(words)}\n{tail(done.stdout + done.stderr)}")
    return done.stdout


def wait_until(happened: Callable[[], bool], what: str, seconds: float, pause_seconds: float = 0.1) -> None:
    """Wait until ``happened`` returns true; raises `LabError` with the description ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise LabError(f"{what}: timed out after {seconds:g} s")
        time.sleep(pause_seconds)


def plain_environ() -> dict[str, str]:
    """Return the environment of programs that the lab starts. Of the caller's it has only PATH and the home folder."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": f"/usr/local/sbin:/usr/sbin:/sbin:{path}", "HOME": str(Path.home()), "LANG": "C.UTF-8"}
