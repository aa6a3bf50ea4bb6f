"""Creation of the virtual environments with uv, or with pip if uv fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.dev.console import SetupError, say
from tools.dev.environments import (
    FULL,
    INSTALLER_SETTINGS,
    ROOT,
    Environment,
    Workspace,
    environment_key,
    group_requirements,
    is_current,
    needed_members,
    read_marker,
    read_workspace,
)
from tools.dev.machine import GIGABYTE, INTERPRETER, answers, has_nvidia, require_disk_space, require_ensurepip

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
DISK_BYTES = {"cpu": 2 * GIGABYTE, "cuda": 8 * GIGABYTE}  # by build of PyTorch, for everything in .venv
WARM_UP_JOB = ("deploy/examples/gpt3-175b.yaml", "--cluster", "deploy/examples/gpt3-175b-cluster.yaml")
"""Arguments of `penstock plan`, whose planning compiles every inner loop."""


@contextlib.contextmanager
def setup_lock() -> Iterator[None]:
    """Hold the repository's setup lock; a second `./dev` waits for the first."""
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another ./dev is setting up; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clean_environ() -> dict[str, str]:
    """Return the process environment without variables that would redirect another interpreter."""
    redirecting = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_TARGET", "PIP_USER", "PIP_PREFIX"}
    return {name: value for name, value in os.environ.items() if name not in redirecting}


def run_quietly(*command: str | Path) -> bool:
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def install(environment: Environment, arguments: Sequence[str]) -> bool:
    """Install with uv, which shares files between clones, or with pip if uv fails; both print their progress."""
    uv = [str(FULL.path / "bin" / "uv"), "pip", "install", "--python", str(environment.python)]
    pip = [str(FULL.python), "-m", "pip", "--python", str(environment.python), "install"]
    environ = {**INSTALLER_SETTINGS, **clean_environ()}
    for installer in (uv, pip):
        command = [*installer, "--constraint", "constraints.txt", *arguments]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0:
                return True
            say(f"command failed: {shlex.join(command)}")
    return False


def choose_torch(nvidia: bool) -> str:
    """Return the build of PyTorch to install, "cpu" or "cuda", and print the choice.

    For Linux the package index has only CUDA builds, which are gigabytes larger and useless without a GPU.
    """
    if nvidia:
        say("NVIDIA device found: installing PyTorch with CUDA from the package index")
        return "cuda"
    if answers(CPU_WHEELS):
        say("no NVIDIA device: installing PyTorch's CPU wheels")
        return "cpu"
    say(f"no NVIDIA device, but {CPU_WHEELS} does not answer: installing the larger PyTorch of the package index")
    return "cuda"


def build_full(key: str, workspace: Workspace, nvidia: bool) -> None:
    """Create .venv. PyTorch's CPU build is installed separately, because it has a separate index.

    Raises SetupError if the machine lacks a requirement or the packages cannot be installed.
    """
    require_ensurepip()
    torch = choose_torch(nvidia)
    if read_marker(FULL) is None:  # after an earlier setup the files are in the download cache
        require_disk_space(DISK_BYTES[torch])
    make_venv(FULL)
    if not run_quietly(FULL.python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "uv"):
        say("could not install uv: installing with pip, which is slower")
    say("installing packages; PyTorch is large, so the first download can take minutes")
    if torch == "cpu" and not install(FULL, ["--no-deps", "--index-url", CPU_WHEELS, "torch"]):
        torch = "cuda"
    install_packages(FULL, workspace)
    say("compiling the planner's inner loops")
    run_quietly(FULL.path / "bin" / "penstock", "plan", *WARM_UP_JOB)
    FULL.marker.write_text(f"{key} {torch}\n")


def build_small(environment: Environment, key: str, workspace: Workspace) -> None:
    """Create an environment other than .venv, with the installer of .venv.

    Raises SetupError if the packages cannot be installed.
    """
    make_venv(environment, "--without-pip")
    install_packages(environment, workspace)
    environment.marker.write_text(f"{key}\n")


def make_venv(environment: Environment, *options: str) -> None:
    say(f"creating {environment.folder} with Python {platform.python_version()}")
    shutil.rmtree(environment.path, ignore_errors=True)
    if not run_quietly(INTERPRETER, "-m", "venv", *options, environment.path):
        raise SetupError(f"`{INTERPRETER} -m venv {environment.folder}` failed: fix the error above, then retry", 3)


def install_packages(environment: Environment, workspace: Workspace) -> None:
    """Install members from their folders, so that the installer never requests one from an index."""
    requirements = group_requirements(workspace.root["dependency-groups"], environment.group)
    folders = needed_members(environment.members, workspace.members)
    editable = [word for folder in folders for word in ("--editable", f"./{folder}")]
    if not install(environment, [*editable, *requirements]):
        raise SetupError("could not install the packages (error above): check that the package index is reachable", 3)


def ensure(environment: Environment) -> None:
    """Create an environment unless an up-to-date one exists."""
    workspace = read_workspace()
    key = environment_key(environment, workspace, (ROOT / "constraints.txt").read_bytes())
    nvidia = has_nvidia()
    if is_current(read_marker(environment), key, nvidia):
        return
    with setup_lock():
        if is_current(read_marker(environment), key, nvidia):
            return
        started = time.monotonic()
        if environment is FULL:
            build_full(key, workspace, nvidia)
        else:
            build_small(environment, key, workspace)
        say(f"{environment.folder} is ready after {time.monotonic() - started:.0f} s")
