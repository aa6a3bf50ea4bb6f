"""The base image: a small Debian or Ubuntu whose Python has the minor version of the one that runs this.

It holds neither penstock nor PyTorch. Containers of the lab see this project's environment where it is on this machine
(`node.container_spec`), and that fits because interpreter and system libraries are of the same kind.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tools.lab import cache
from tools.lab.console import LabError, plain_environ, run, say
from tools.lab.images import DOMAIN, architecture, layer_of_folder, write_image

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
IMAGE = f"{DOMAIN}/python:{PYTHON}"
PACKAGES = ("ca-certificates", "iproute2", "python3")
SUITES = {
    "3.11": ("bookworm", "http://deb.debian.org/debian"),
    "3.12": ("noble", "http://archive.ubuntu.com/ubuntu"),
    "3.13": ("trixie", "http://deb.debian.org/debian"),
}
"""The release whose Python it is, and where its packages are, by version."""
LEFT_OUT = ("/dev/", "/proc/", "/sys/", "/run/", "/tmp/", "/var/cache/", "/var/lib/apt/lists/", "/usr/share/doc/",
            "/usr/share/locale/", "/usr/share/man/")  # fmt: skip
LAYOUT = "1"
"""Changes with what is left out, so that no older layer is taken for the same."""


def suite(version: str) -> tuple[str, str]:
    """Release and mirror for a version of Python; raises `LabError` where none is known."""
    if version not in SUITES:
        raise LabError(f"the lab has no base image for Python {version}: use one of {', '.join(SUITES)}")
    return SUITES[version]


def layer() -> Path:
    """The image's one layer, made unless it is in the cache."""
    release, mirror = suite(PYTHON)
    key = cache.key_of(LAYOUT, release, *PACKAGES, architecture())
    return cache.kept(f"python-{release}", key, lambda target: _make(target, release, mirror)) / "layer.tar"


def write(target: Path) -> Path:
    """Write the image's archive. Its containers find this project's programs first, where they are on this machine."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    config = {"Env": [f"PATH={path}", "LANG=C.UTF-8"], "Cmd": ["python3"], "WorkingDir": "/"}
    write_image(target, IMAGE, layer(), config)
    return target


def shared() -> list[Path]:
    """Folders of this machine that every container of the lab reads: environment, interpreter and this repository.

    An interpreter of the system itself is the image's too.
    """
    interpreter = Path(sys.base_prefix).resolve()
    own = [] if interpreter.is_relative_to("/usr") else [interpreter]
    folders = {Path(sys.prefix), Path(__file__).resolve().parents[2], *own}
    return sorted(folder for folder in folders if not folder.is_relative_to("/usr"))


def _make(target: Path, release: str, mirror: str) -> None:
    say(f"making the base image from {release}, about 1 min")
    root = target / "root"
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
    run("debootstrap", *options, release, root, mirror, environ=plain_environ())
    (root / "root").chmod(0o755)  # a path that leads through it must be open to pods that are not root
    layer_of_folder(target / "layer.tar", root, is_kept)
    shutil.rmtree(root)


def is_kept(path: str) -> bool:
    """Whether a path of the system belongs into the image; the folders themselves stay."""
    return not any(path.startswith(folder) for folder in LEFT_OUT) and not path.endswith(".pyc")
