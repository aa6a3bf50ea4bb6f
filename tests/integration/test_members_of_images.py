"""What an image holds is enough: all of its modules load with nothing else, tests of them pass, and programs start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.members import IMAGES, brought_by, modules_beyond, packages_of
from tests.support.refusing import refusing
from tests.support.repository import ROOT, members, packages, pyproject
from tools.dev.environments import group_requirements

STARTED = {
    "operator": (["penstock.operator", "check-policy"], 2),
    "api": (["penstock.cli", "serve", "--cluster", "--policy", "missing.json", "--port", "0"], 2),
    "trainer": (["penstock.agent", "pod", "--nonsense"], 2),
}
"""A program of each and its exit code, as far as it comes without a cluster."""

TESTED = {
    "api": ("tests/api/test_store_jobs.py", "tests/api/test_writer.py"),
    "trainer": ("tests/agent/test_shipping.py", "tests/trainer/periphery/test_checkpoint.py"),
}
"""Of each a few that take seconds: all of them run with everything installed. The operator has an environment."""

PLUGINS = ("_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin")
"""Named, because those of others would be loaded as well."""

NOT_IMPORTED = ("__main__", "penstock.api.store.migrations.", "penstock.cli.local.")
"""Programs, what alembic runs, and what commands import that no image has, since it needs the agent."""

pytestmark = pytest.mark.timeout(600)


def modules(image: str) -> list[str]:
    """Those of the image's members, by full name."""
    held = [member for member in members() if f"penstock-{member}" in brought_by(*IMAGES[image])]
    folders = [packages()[name] for member in held for name in packages_of(member)]
    paths = [path.relative_to(folder.parents[1]) for folder in folders for path in folder.rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if not any(word in name for word in NOT_IMPORTED))


def run(image: str, folder: Path, *words: str, tools: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Python with these words, where the image's members are installed and nothing else but what is named."""
    environment = refusing(folder, modules_beyond(*IMAGES[image], *tools))
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_every_module_of_its_members_loads(image: str, tmp_path: Path) -> None:
    names = modules(image)
    assert len(names) > 100
    lines = ["import importlib", f"for name in {names}:", "    importlib.import_module(name)"]
    done = run(image, tmp_path, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", sorted(TESTED))
def test_tests_of_its_members_pass(image: str, tmp_path: Path) -> None:
    tools = [
        *group_requirements(pyproject()["dependency-groups"], "test"),
        "httpx2",
    ]  # which starlette's client asks for
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    words = ["-m", "pytest", "--quiet", "-n", "0", "-p", "no:cacheprovider", *plugins]
    done = run(image, tmp_path, *words, *TESTED[image], tools=tools)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("image", sorted(STARTED))
def test_its_program_starts(image: str, tmp_path: Path) -> None:
    (module, *arguments), code = STARTED[image]
    done = run(image, tmp_path, "-m", module, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "No module" not in done.stderr
    assert "needs the package" not in done.stderr
