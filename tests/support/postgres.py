"""A real PostgreSQL for tests: its own server in a temporary folder, reached by a socket, and a database per test.

The programs come from the PATH, from Debian's package or from the wheel of pgserver. As root the server runs as
`nobody`, because PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from tests.support.not_run import missing

NAME = "postgres"
START_SECONDS = 30.0
SETTINGS = {"listen_addresses": "", "max_connections": "60", "shared_buffers": "32MB"}

_numbers = itertools.count(1)


def programs() -> Path | None:
    """The folder of initdb and postgres; none where there are none."""
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pgserver")
    if wheel is not None and wheel.origin is not None:
        found.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((folder for folder in found if (folder / "initdb").exists()), None)


@contextmanager
def server(*, durable: bool = False) -> Iterator[str]:
    """The URL of a server that lives as long as the block; skips, loudly, where none can be had.

    What a ``durable`` one commits is on the disk, which tests seldom ask about.
    """
    folder = programs()
    if folder is None:
        missing(NAME, "PostgreSQL is missing: pip install pgserver, or apt install postgresql")
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as root, _running(folder, Path(root), durable):
        yield f"postgresql://postgres@/postgres?host={root}"


@contextmanager
def _running(programs: Path, root: Path, durable: bool) -> Iterator[None]:
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(root, nobody.pw_uid, nobody.pw_gid)
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        programs = _reachable(programs, root, user)
    data = root / "data"
    quiet: dict[str, Any] = {"cwd": root, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, **user}
    initdb: list[str | Path] = [
        programs / "initdb",
        "-D",
        data,
        "-U",
        "postgres",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-sync",
    ]
    subprocess.run(initdb, check=True, **quiet)
    settings = {**SETTINGS, "fsync": "on" if durable else "off"}
    options = [item for name, value in settings.items() for item in ("-c", f"{name}={value}")]
    with subprocess.Popen([programs / "postgres", "-D", data, "-k", root, *options], **quiet) as process:
        try:
            _wait(root, process)
            yield
        finally:
            process.terminate()  # ends once its sessions have; those of a failed test must not keep it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.send_signal(3)
                process.wait(10)


def _reachable(programs: Path, root: Path, user: dict[str, Any]) -> Path:
    """The programs where that user may run them: a copy, if they lie below a folder that is closed to others."""
    try:
        subprocess.run([programs / "initdb", "--version"], check=True, stdout=subprocess.DEVNULL, cwd=root, **user)
    except PermissionError:
        package = programs.parents[1]  # the wheel's libraries are next to it, at relative paths
        for folder in (package, package.with_name("pgserver.libs")):
            shutil.copytree(folder, root / folder.name, symlinks=True)
        return root / package.name / programs.relative_to(package)
    return programs


def _wait(root: Path, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(f"postgresql://postgres@/postgres?host={root}").close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def database(url: str, like: str = "") -> Iterator[str]:
    """The URL of a new database on the server: an empty one, or a copy of the one at ``like``, which nobody uses."""
    name = f"penstock_{next(_numbers)}"
    template = urlsplit(like).path.removeprefix("/") or "template1"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield url.replace("/postgres?", f"/{name}?", 1)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
