"""Spectral and Redocly, installed with npm at the versions of package.json into a cache named by that file's hash."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support import not_run
from tests.support.repository import ROOT

FILES = ROOT / "tests" / "fixtures" / "openapi_linters"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-tests"
INSTALL_SECONDS, LINT_SECONDS = 600, 300
OFFLINE = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}


def lint(document: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each linter for an OpenAPI document; skips, loudly, where npm cannot install them."""
    programs = _installed() / "node_modules" / ".bin"
    commands = {
        "spectral": ("lint", "--ruleset", FILES / ".spectral.yaml", "--fail-severity", "warn", document),
        "redocly": ("lint", "--extends", "recommended", document),
    }
    results = {}
    for name, arguments in commands.items():
        done = subprocess.run(
            [programs / name, *arguments],
            env={**os.environ, **OFFLINE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LINT_SECONDS,
            check=False,
        )
        results[name] = (done.returncode, done.stdout)
    return results


def _installed() -> Path:
    """Where they are; installed in a folder next to it and renamed, so that it is complete or not there."""
    npm = shutil.which("npm")
    if npm is None:
        not_run.missing("node", "there is no npm, so that neither spectral nor redocly read docs/openapi.json")
    package = FILES / "package.json"
    folder = CACHE / f"openapi-linters-{hashlib.sha256(package.read_bytes()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as new:
        shutil.copy(package, new)
        done = subprocess.run(
            [npm, "install", "--ignore-scripts", "--no-package-lock", "--no-fund", "--no-audit"],
            cwd=new,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            not_run.missing("node", f"npm could not install spectral and redocly: {done.stderr.strip()[-300:]}")
        try:
            Path(new).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
        else:
            Path(new).mkdir()
    return folder
