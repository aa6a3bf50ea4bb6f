"""Debian packages that the lab needs, and their installation."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from tools.lab.console import LabError, plain_environ, say, tail

NEEDED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "mount": "mount",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
}
"""Maps a program of each package, its name on the PATH or its path, to the package."""


def program(name: str) -> Path:
    """Return the path of a needed program; raises `LabError` if it is not installed."""
    path = shutil.which(name, path=plain_environ()["PATH"])
    if path is None:
        raise LabError(f"{name} is missing: sudo apt-get install {NEEDED[name]}")
    return Path(path)


def missing() -> list[str]:
    """Return the names of the needed packages that are not installed, sorted."""
    path = plain_environ()["PATH"]
    absent = {
        package
        for program, package in NEEDED.items()
        if not (Path(program).exists() if program.startswith("/") else shutil.which(program, path=path))
    }
    return sorted(absent)


def require() -> None:
    """Install the missing packages; raises `LabError` with the command to run if the user is not root or it fails."""
    absent = missing()
    if not absent:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *absent]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"the lab needs Debian packages that are not installed: sudo {shlex.join(command)}")
    say(shlex.join(command))
    done = _quietly(command)
    if done.returncode != 0:  # the package lists may be missing or outdated
        _quietly(["apt-get", "update"])
        done = _quietly(command)
    if missing():
        raise LabError(f"command failed: {shlex.join(command)}\n{tail(done.stdout)}")


def _quietly(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
