"""The lab's base image: a minimal Debian or Ubuntu with the same minor version of Python as the running interpreter.

It contains neither penstock nor PyTorch. Containers of the lab mount this project's environment at the path that it has
on the host (`node.container_spec`). The environment works there because the image has the same version of Python,
and system libraries of the same kind.
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
"""By version of Python: the release that contains it, and the mirror of its packages."""
EXCLUDED = ("/dev/", "/proc/", "/sys/", "/run/", "/tmp/", "/var/cache/", "/var/lib/apt/lists/", "/usr/share/doc/",
            "/usr/share/locale/", "/usr/share/man/")  # fmt: skip
LAYOUT = "1"
"""Part of the cache key. Change it together with `EXCLUDED`, so that cached layers are not reused."""


def suite(version: str) -> tuple[str, str]:
    """Return release and mirror for a version of Python; raises `LabError` if `SUITES` has none."""
    if version not in SUITES:
        raise LabError(f"the lab has no base image for Python {version}: use one of {', '.join(SUITES)}")
    return SUITES[version]


def layer() -> Path:
    """Return the image's only layer. It is built unless it is in the cache."""
    release, mirror = suite(PYTHON)
    key = cache.key_of(LAYOUT, release, *PACKAGES, architecture())
    return cache.get_or_build(f"python-{release}", key, lambda target: _build(target, release, mirror)) / "layer.tar"


def write(target: Path) -> Path:
    """Write the image's archive. PATH in its containers begins with the programs of this project's environment."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    config = {"Env": [f"PATH={path}", "LANG=C.UTF-8"], "Cmd": ["python3"], "WorkingDir": "/"}
    write_image(target, IMAGE, layer(), config)
    return target


def mounted_folders() -> list[Path]:
    """Return the folders of the host that containers of the lab mount: environment, interpreter and repository.

    Folders below /usr are left out: the image has its own system interpreter.
    """
    interpreter = Path(sys.base_prefix).resolve()
    folders = {Path(sys.prefix), Path(__file__).resolve().parents[2], interpreter}
    return sorted(folder for folder in folders if not folder.is_relative_to("/usr"))


def _build(target: Path, release: str, mirror: str) -> None:
    say(f"building the base image from {release}, about 1 min")
    root = target / "root"
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
    run("debootstrap", *options, release, root, mirror, environ=plain_environ())
    (root / "root").chmod(0o755)  # mounted folders may be below /root, and pods may run as another user than root
    layer_of_folder(target / "layer.tar", root, is_kept)
    shutil.rmtree(root)


def is_kept(path: str) -> bool:
    """Whether the image contains this path: not the content of the folders `EXCLUDED`, and no compiled Python."""
    return not any(path.startswith(folder) for folder in EXCLUDED) and not path.endswith(".pyc")
