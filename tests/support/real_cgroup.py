"""A real cgroup v2 for a test, where this machine lets it be made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.not_run import missing

NAME = "cgroup2"
"""In PENSTOCK_REQUIRE."""


@contextlib.contextmanager
def real_cgroup(*, limited: bool = False) -> Iterator[Path]:
    """A cgroup below the root of the hierarchy; with ``limited`` it has the memory controller.

    At the end it is removed with all below it, and their processes are ended.
    """
    root = _root()
    if limited:
        _have_memory(root)
    folder = root / f"penstock-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        (folder / "cgroup.kill").write_text("1")
        for path in (*sorted(folder.rglob("*/"), reverse=True), folder):
            _remove(path)


def _remove(path: Path) -> None:
    """Processes that were killed are in it for a moment."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _root() -> Path:
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    writable = (folder for _, folder, kind, options, *_ in mounts if kind == "cgroup2" and "rw" in options.split(","))
    root = next(writable, None)
    if root is None or os.geteuid() != 0:
        missing(NAME, "needs root, and cgroup v2 mounted so that it may be written")
    return Path(root)


def _have_memory(root: Path) -> None:
    if "memory" not in (root / "cgroup.controllers").read_text().split():
        missing(NAME, "needs the memory controller in cgroup v2; here it is in cgroup v1, or nowhere")
    (root / "cgroup.subtree_control").write_text("+memory")
