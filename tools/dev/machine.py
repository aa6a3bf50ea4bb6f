"""Requirements of an installation: ensurepip, free disk space, a reachable package index."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from tools.dev.console import SetupError, say
from tools.dev.environments import ROOT

INTERPRETER = os.path.realpath(sys.executable)  # not the link of an activated .venv, which a rebuild removes
CPU_WHEELS_TIMEOUT_SECONDS = 4
GIGABYTE = 10**9


def has_nvidia() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def answers(url: str) -> bool:
    """Whether a package index answers within a few seconds."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=CPU_WHEELS_TIMEOUT_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def venv_package_command(executable: str, os_release: str, is_root: bool) -> list[str]:
    """Return the command that installs the distribution's venv package for this interpreter.

    Raises SetupError if there is no such package, because the interpreter is not from Debian or a derivative.
    """
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    family = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    if not Path(executable).is_relative_to("/usr/bin") or not {"debian", "ubuntu"} & set(family):
        raise SetupError(f"{executable} has no ensurepip module: run `python3.X dev ...` with a Python that has it")
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    command = ["apt-get", "install", "-y", package]
    return command if is_root else ["sudo", *command]


def has_ensurepip() -> bool:
    """Whether a new process can import ensurepip and venv, even if they were installed a moment ago."""
    probe = [INTERPRETER, "-c", "import ensurepip, venv"]
    return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0


def require_ensurepip() -> None:
    """Install ensurepip if it is missing. Debian and Ubuntu ship it in the separate package python3-venv.

    Raises SetupError with the command to run if the user is not root, or if the command did not help.
    """
    if has_ensurepip():
        return
    release = Path("/etc/os-release")
    is_root = os.geteuid() == 0
    command = venv_package_command(INTERPRETER, release.read_text() if release.exists() else "", is_root)
    command_line = shlex.join(command)
    if not is_root:
        raise SetupError(command_line)
    say(f"this Python has no ensurepip: {command_line}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        subprocess.run(["apt-get", "update"], env=quiet, stdout=subprocess.DEVNULL, check=False)
        subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False)
    if not has_ensurepip():
        raise SetupError(command_line)


def disk_message(needed_bytes: int, free_bytes: int, folder: Path) -> str | None:
    """Return the error message if the file system of ``folder`` has too little free space, else None."""
    if free_bytes >= needed_bytes:
        return None
    needed, free = needed_bytes / GIGABYTE, free_bytes / GIGABYTE
    return (
        f"{folder} has {free:.1f} GB free; PyTorch and the other packages need about {needed:.0f} GB there.\n"
        "Free some space, or move the repository (and with UV_CACHE_DIR the download cache) to a larger disk."
    )


def cache_folder() -> Path:
    """Return uv's download cache, or the nearest existing folder above it."""
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("UV_CACHE_DIR") or home_cache / "uv")
    return next(path for path in (folder, *folder.parents) if path.exists())


def require_disk_space(needed_bytes: int) -> None:
    for folder in (ROOT, cache_folder()):
        message = disk_message(needed_bytes, shutil.disk_usage(folder).free, folder)
        if message is not None:
            raise SetupError(message)
