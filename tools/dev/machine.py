"""Requirements of the machine for an installation: ensurepip, free disk space, a reachable package index."""

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

INTERPRETER = os.path.realpath(sys.executable)  # never the link in an activated .venv, which a rebuild removes
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
    """The command that installs the distribution's venv package for this interpreter.

    Raises SetupError where no such package exists: an interpreter not from a Debian-like distribution.
    """
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    family = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    if not Path(executable).is_relative_to("/usr/bin") or not {"debian", "ubuntu"} & set(family):
        raise SetupError(f"{executable} has no ensurepip module: use a Python that has it, as `python3.X dev ...`.")
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    command = ["apt-get", "install", "-y", package]
    return command if is_root else ["sudo", *command]


def has_ensurepip() -> bool:
    """Asked of a new process, which also sees what was installed a moment ago."""
    probe = [INTERPRETER, "-c", "import ensurepip, venv"]
    return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0


def require_ensurepip() -> None:
    """Debian and Ubuntu ship Python without ensurepip; their venv package holds it.

    Raises SetupError with the one line to run when this user may not run it, or when it did not help.
    """
    if has_ensurepip():
        return
    release = Path("/etc/os-release")
    is_root = os.geteuid() == 0
    command = venv_package_command(INTERPRETER, release.read_text() if release.exists() else "", is_root)
    line = shlex.join(command)
    if not is_root:
        raise SetupError(line)
    say(f"this Python has no ensurepip: {line}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        subprocess.run(["apt-get", "update"], env=quiet, stdout=subprocess.DEVNULL, check=False)
        subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False)
    if not has_ensurepip():
        raise SetupError(line)


def disk_message(needed_bytes: int, free_bytes: int, place: Path) -> str | None:
    """What to tell when a file system is too full, None when it is not."""
    if free_bytes >= needed_bytes:
        return None
    needed, free = needed_bytes / GIGABYTE, free_bytes / GIGABYTE
    return (
        f"{place} has {free:.1f} GB free; PyTorch and the other packages need about {needed:.0f} GB there.\n"
        "Free some space, or move the repository (and with UV_CACHE_DIR the download cache) to a larger disk."
    )


def cache_folder() -> Path:
    """The nearest existing folder above uv's download cache."""
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("UV_CACHE_DIR") or home_cache / "uv")
    return next(path for path in (folder, *folder.parents) if path.exists())


def require_disk_space(needed_bytes: int) -> None:
    for place in (ROOT, cache_folder()):
        message = disk_message(needed_bytes, shutil.disk_usage(place).free, place)
        if message is not None:
            raise SetupError(message)
