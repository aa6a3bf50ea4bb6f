"""`./dev release`: one command writes the version into every file that has it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock import core
from tests.support.repository import ROOT, members
from tools.dev import release

OTHER = "7.8.9"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the files that have a version into a temporary folder."""
    files = [Path(member, "pyproject.toml") for member in members()]
    for file in [*files, release.CHART / "Chart.yaml", release.CHART / "values.yaml"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_the_version_is_written_everywhere_and_nothing_else_changes(copy: Path) -> None:
    before = {path: path.read_text() for path in copy.rglob("*.*")}
    assert set(release.write(OTHER, copy)) == set(before)
    for path, text in before.items():
        assert path.read_text() == text.replace(core.__version__, OTHER)


def test_a_second_run_changes_no_file(copy: Path) -> None:
    before = {path: path.read_text() for path in copy.rglob("*.*")}
    assert release.write(core.__version__, copy) == []
    release.write(OTHER, copy)
    release.write(core.__version__, copy)
    assert {path: path.read_text() for path in before} == before


def test_members_require_the_new_version_of_each_other(copy: Path) -> None:
    release.write(OTHER, copy)
    lines = (copy / "agent" / "pyproject.toml").read_text().splitlines()
    requirements = [Requirement(line.strip(' ",')) for line in lines if line.strip().startswith('"penstock-')]
    assert len(requirements) == 3
    assert {str(requirement.specifier) for requirement in requirements} == {f"=={OTHER}"}


@pytest.mark.parametrize("arguments", [[], ["0.2"], ["v0.2.0"], ["0.2.0rc1"], ["0.2.0", "0.3.0"], ["--help"]])
def test_anything_but_three_numbers_is_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tools.dev.release", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("./dev release takes one version of three numbers")
