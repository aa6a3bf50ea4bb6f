"""Members are installed from their wheels, by an index that refuses their names: it is never asked for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package_index import OURS, PackageIndex, serving
from tests.support.repository import ROOT
from tools.dev import wheels

PIP = ("pip", "install", "--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--index-url")
UV = ("uv", "pip", "install", "--no-config", "--no-cache", "--python", sys.executable, "--default-index")


@pytest.fixture(scope="module")
def constraint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serving() as found:
        yield found


def install(
    installer: tuple[str, ...], index: PackageIndex, folder: Path, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Install into the folder, with the versions of this repository and without any setting of this machine."""
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    command: list[str | Path] = [sys.executable, "-m", *installer, index.url, "--target", folder, *constraints]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def ours(folder: Path) -> set[str]:
    """The members that are installed there."""
    return {path.name.partition("-")[0].removeprefix("penstock_") for path in folder.glob("penstock_*.dist-info")}


@pytest.mark.parametrize("installer", [PIP, UV], ids=["pip", "uv"])
@pytest.mark.parametrize(
    ("requirements", "members"),
    [
        (["penstock-agent"], {"core", "client", "planner", "agent"}),
        (["penstock-agent", "penstock-trainer"], {"core", "client", "planner", "agent", "trainer"}),
        (["penstock-operator"], {"core", "planner", "kube", "operator"}),
    ],
    ids=lambda value: "-".join(sorted(value)),
)
def test_no_index_is_asked_for_a_member(
    installer: tuple[str, ...],
    requirements: list[str],
    members: set[str],
    constraint: Path,
    index: PackageIndex,
    tmp_path: Path,
) -> None:
    done = install(installer, index, tmp_path, "--constraint", constraint, *requirements)
    assert done.returncode == 0, done.stderr
    assert ours(tmp_path) == members
    assert {"numba", "ruamel-yaml"} <= index.asked
    assert {name for name in index.asked if name.startswith(OURS)} == set()


@pytest.mark.parametrize("installer", [PIP, UV], ids=["pip", "uv"])
def test_without_the_constraint_it_would_be(
    installer: tuple[str, ...], constraint: Path, index: PackageIndex, tmp_path: Path
) -> None:
    (wheel,) = constraint.parent.glob("penstock_agent-*.whl")
    assert install(installer, index, tmp_path, wheel).returncode != 0
    assert any(name.startswith(OURS) for name in index.asked)


def test_the_agent_starts_where_its_members_alone_are_installed(
    constraint: Path, index: PackageIndex, tmp_path: Path
) -> None:
    """Also by the name `penstock`, as a link in the trainer's image (ADR 0035)."""
    assert install(UV, index, tmp_path, "--constraint", constraint, "penstock-agent").returncode == 0
    (tmp_path / "bin" / "penstock").symlink_to("penstock-agent")
    for name in ("penstock-agent", "penstock"):
        command: list[str | Path] = [sys.executable, "-S", tmp_path / "bin" / name, "pod", "--nonsense"]
        environment = {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error penstock-agent pod: "), done.stderr
