"""Go: the one that is installed if it is new enough, else the Go project's own, fetched like a module."""

from __future__ import annotations

import os
import platform
import re
import shutil
import urllib.request
import zipfile
from pathlib import Path

from tools.lab import cache
from tools.lab.console import LabError, run, say
from tools.lab.images import architecture

OLDEST = (1, 26)
VERSION = "1.26.8"
SUMS = {
    "amd64": "30c2b1bf7dcc88d3eb0a1364e47ddd9128edb3110a30e8a0ef61cd5856b31de7",
    "arm64": "02b36b6787b3ac767668f630e2998df45a3b1f9ffee08d1bf3ef6487cd658d99",
}
"""SHA-256 of the archives of that version, by architecture."""
PROXY = "https://proxy.golang.org"
PLACES = ("/usr/local/go/bin/go",)
FETCH_SECONDS = 300


def go() -> Path:
    """The `go` to build with; raises `LabError` where none can be had."""
    for place in filter(None, (shutil.which("go"), *PLACES)):
        if Path(place).exists() and version(run(place, "env", "GOVERSION")) >= OLDEST:
            return Path(place)
    if platform.system() != "Linux" or architecture() not in SUMS:
        raise LabError(f"Go {OLDEST[0]}.{OLDEST[1]} or newer is missing: install it from https://go.dev/dl")
    key = cache.key_of(SUMS[architecture()])
    return cache.kept("go", key, _fetch) / "bin" / "go"


def version(text: str) -> tuple[int, int]:
    """The first two numbers of what Go calls its version."""
    found = re.match(r"go(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def proxy() -> str:
    """Where modules come from: the first address that GOPROXY names, as Go has it, else Go's own."""
    said = re.split("[,|]", os.environ.get("GOPROXY", ""))[0]
    return said.rstrip("/") if said.startswith("http") else PROXY


def _fetch(target: Path) -> None:
    """The archive holds no file modes; as Go itself does, programs are made executable."""
    name = f"v0.0.1-go{VERSION}.linux-{architecture()}"
    url = f"{proxy()}/golang.org/toolchain/@v/{name}.zip"
    say(f"no Go {OLDEST[0]}.{OLDEST[1]} or newer here: fetching {url}")
    archive = target / "go.zip"
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise LabError(f"{url}: {error}; or install Go from https://go.dev/dl") from error
    _verify(archive)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(target)
    archive.unlink()
    inner = target / f"golang.org/toolchain@{name}"
    for path in inner.iterdir():
        path.rename(target / path.name)
    for program in [*(target / "bin").iterdir(), *(target / "pkg" / "tool").rglob("*")]:
        if program.is_file():
            program.chmod(0o755)


def _verify(archive: Path) -> None:
    found = cache.digest(archive)
    if found != SUMS[architecture()]:
        raise LabError(f"Go {VERSION} as it was fetched is not what was released: sha256 {found}")
