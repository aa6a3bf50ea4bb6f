"""Go toolchain: the installed one if it is new enough, else a release downloaded from the module proxy."""

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

MIN_VERSION = (1, 26)
VERSION = "1.26.8"
SUMS = {
    "amd64": "30c2b1bf7dcc88d3eb0a1364e47ddd9128edb3110a30e8a0ef61cd5856b31de7",
    "arm64": "02b36b6787b3ac767668f630e2998df45a3b1f9ffee08d1bf3ef6487cd658d99",
}
"""SHA-256 of the archives of `VERSION`, by architecture."""
PROXY = "https://proxy.golang.org"
PATHS = ("/usr/local/go/bin/go",)
DOWNLOAD_SECONDS = 300


def go() -> Path:
    """Return the path of `go`; raises `LabError` if none is installed and none can be downloaded."""
    for path in filter(None, (shutil.which("go"), *PATHS)):
        if Path(path).exists() and version(run(path, "env", "GOVERSION")) >= MIN_VERSION:
            return Path(path)
    if platform.system() != "Linux" or architecture() not in SUMS:
        raise LabError(f"Go {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer is missing: install it from https://go.dev/dl")
    key = cache.key_of(SUMS[architecture()])
    return cache.get_or_build("go", key, _download) / "bin" / "go"


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a GOVERSION such as `go1.26.8`, or (0, 0) for development versions."""
    match = re.match(r"go(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def proxy() -> str:
    """Return the URL of the module proxy: the first element of GOPROXY if it is a URL, else Go's default."""
    first = re.split("[,|]", os.environ.get("GOPROXY", ""))[0]
    return first.rstrip("/") if first.startswith("http") else PROXY


def _download(target: Path) -> None:
    """Download and unpack Go. The archive has no file modes, so programs are made executable, as Go itself does."""
    name = f"v0.0.1-go{VERSION}.linux-{architecture()}"
    url = f"{proxy()}/golang.org/toolchain/@v/{name}.zip"
    say(f"no Go {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer is installed: downloading {url}")
    archive = target / "go.zip"
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise LabError(f"no Go at {url}: {error}: check GOPROXY, or install Go from https://go.dev/dl") from error
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
    actual, expected = cache.digest(archive), SUMS[architecture()]
    if actual != expected:
        raise LabError(
            f"the downloaded Go {VERSION} has the SHA-256 {actual}, the release has {expected}: check the module proxy "
            f"{proxy()} (GOPROXY), or install Go from https://go.dev/dl"
        )
