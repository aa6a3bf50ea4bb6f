"""Images of penstock for the nodes of a cluster of `./dev cluster`.

With Docker they are built from the Dockerfile. Images of the lab are empty: its containers mount this repository and
its environment, so the images are the base image with the entry points of the Dockerfile's targets. All members are
installed there, and `penstock` is the command, while the Dockerfile's trainer links that name to `penstock-agent`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import penstock
from deploy.site import Site
from tools.lab import base_image, lab
from tools.lab.console import run
from tools.lab.images import DOMAIN, write_image
from tools.lab.node import COPY_ROOT
from tools.lab.state import State

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"operator": "penstock.operator", "api": "penstock.cli"}
"""Entry points of the Dockerfile's targets."""

ENVIRONMENT = (
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
    "NUMBA_CACHE_DIR=/tmp/numba",
    "HOME=/tmp",
    "USER=penstock",
)
"""User of the Dockerfile."""

CPU_WHEELS = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Names of the images on a cluster's nodes."""

    operator: str
    service: str
    trainer: str


def given(site: Site, name: str) -> Images:
    """Load the images into every node of the cluster of that name."""
    return _given_lab(site.lab) if site.lab is not None else _given_kind(name)


def _given_lab(found: State) -> Images:
    names = {}
    for target, module in MODULES.items():
        names[target] = f"{DOMAIN}/{target}:{base_image.PYTHON}"
        programs = f"{COPY_ROOT}{sys.prefix}/bin"
        path = f"PATH={programs}:/usr/local/bin:/usr/bin:/bin"
        config = {
            "Env": [path, f"PYTHONPATH={_components()}", "LANG=C.UTF-8", *ENVIRONMENT],
            "Entrypoint": [f"{programs}/python", "-m", module],
            "User": "65532:65532",
            "WorkingDir": "/",
        }
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "image.tar")
            write_image(archive, names[target], base_image.layer(), config)
            lab.load(found, archive)
    return Images(operator=names["operator"], service=names["api"], trainer=base_image.IMAGE)


def _components() -> str:
    """Return the path of penstock in a container that may have a separate /tmp."""
    return ":".join(f"{COPY_ROOT}{Path(path).parent}" for path in penstock.__path__)


def _given_kind(name: str) -> Images:
    names = {target: f"penstock/{target}:dev" for target in ("operator", "api", "trainer")}
    for target, image in names.items():
        run("docker", "build", "--target", target, "--build-arg", CPU_WHEELS, "--tag", image, ROOT)
        run("kind", "load", "docker-image", image, "--name", name)
    return Images(operator=names["operator"], service=names["api"], trainer=names["trainer"])
