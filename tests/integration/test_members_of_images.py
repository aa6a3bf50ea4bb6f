"""What an image holds is enough: all modules of its members load with nothing else, and its programs start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.members import IMAGES, brought_by, modules_beyond, packages_of
from tests.support.refusing import refusing
from tests.support.repository import ROOT, members, packages

STARTED = {
    "operator": (["penstock.operator", "check-policy"], 2),
    "api": (["penstock.cli", "serve", "--cluster", "--policy", "missing.json", "--port", "0"], 2),
    "trainer": (["penstock.agent", "pod", "--nonsense"], 2),
}
"""A program of each and its exit code, as far as it comes without a cluster."""

NOT_IMPORTED = ("__main__", "penstock.api.store.migrations.")
"""Programs, and what alembic runs."""

pytestmark = pytest.mark.timeout(600)


def modules(image: str) -> list[str]:
    """Those of the image's members, by full name."""
    held = [member for member in members() if f"penstock-{member}" in brought_by(*IMAGES[image])]
    folders = [packages()[name] for member in held for name in packages_of(member)]
    paths = [path.relative_to(folder.parents[1]) for folder in folders for path in folder.rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if not any(word in name for word in NOT_IMPORTED))


def run(image: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with these words, where the image's members are installed and nothing else."""
    environment = refusing(folder, modules_beyond(*IMAGES[image]))
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_every_module_of_its_members_loads(image: str, tmp_path: Path) -> None:
    names = modules(image)
    assert len(names) > 100
    lines = ["import importlib", f"for name in {names}:", "    importlib.import_module(name)"]
    done = run(image, tmp_path, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", sorted(STARTED))
def test_its_program_starts(image: str, tmp_path: Path) -> None:
    (module, *arguments), code = STARTED[image]
    done = run(image, tmp_path, "-m", module, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "No module" not in done.stderr
    assert "needs the package" not in done.stderr
