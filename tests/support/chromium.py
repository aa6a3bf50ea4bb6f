"""A real Chromium for tests: the one on the PATH, else the system's package if root, else Playwright's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Error, sync_playwright

from tests.support.not_run import missing, required

NAME = "chromium"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
INSTALL_SECONDS = 600


def program() -> str | None:
    """The browser on the PATH."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def install() -> None:
    """Get one: as root from the system, else Playwright's, which needs no rights."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _run("apt-get", "update", "-q")
        _run("apt-get", "install", "-y", "-q", "chromium")
    if program() is None:
        _run(sys.executable, "-m", "playwright", "install", "chromium")


def _run(*command: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        command,
        env=environment,
        check=False,
        timeout=INSTALL_SECONDS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that lives as long as the block, installed if one is required; skips, loudly, where none can be had."""
    if program() is None and required(NAME):
        install()
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        except Error as error:
            reason = error.message.partition("\n")[0]  # below it Playwright draws a box
            missing(NAME, f"Chromium is missing: apt install chromium, or playwright install chromium ({reason})")
        yield opened
        opened.close()
