"""Images of penstock for the nodes of a cluster that `./dev cluster` made.

With Docker they are built as everywhere. The lab's need not hold anything: its containers see this repository and its
environment. So they are the base image that starts what the Dockerfile's targets start. All members are installed
there, and `penstock` is the command, where the Dockerfile's trainer has a link of that name to `penstock-agent`.
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
from tools.lab.node import ASIDE
from tools.lab.state import State

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"operator": "penstock.operator", "api": "penstock.cli"}
"""What the Dockerfile's targets start."""

ENVIRONMENT = (
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
    "NUMBA_CACHE_DIR=/tmp/numba",
    "HOME=/tmp",
    "USER=penstock",
)
"""As in the Dockerfile."""

CPU_WHEELS = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, kw_only=True)
class Images:
    """The names by which a cluster's nodes have them."""

    operator: str
    service: str
    trainer: str


def given(site: Site, name: str) -> Images:
    """Give every node of the cluster of that name the images."""
    return _given_lab(site.lab) if site.lab is not None else _given_kind(name)


def _given_lab(found: State) -> Images:
    names = {}
    for target, module in MODULES.items():
        names[target] = f"{DOMAIN}/{target}:{base_image.PYTHON}"
        programs = f"{ASIDE}{sys.prefix}/bin"
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
    """Where penstock is, in a container that may have a /tmp of its own."""
    return ":".join(f"{ASIDE}{Path(path).parent}" for path in penstock.__path__)


def _given_kind(name: str) -> Images:
    names = {target: f"penstock/{target}:dev" for target in ("operator", "api", "trainer")}
    for target, image in names.items():
        run("docker", "build", "--target", target, "--build-arg", CPU_WHEELS, "--tag", image, ROOT)
        run("kind", "load", "docker-image", image, "--name", name)
    return Images(operator=names["operator"], service=names["api"], trainer=names["trainer"])
