"""What is shipped and what it asks for: the wheel's content, bounded requirements, exact constraints."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.core.host.extras import EXTRAS as TOLD_BY
from tests.support.extras import brought_by, modules_beyond
from tests.support.repository import ROOT, load_dev, packages, pyproject

EXTRAS = ("trainer", "operator", "api", "client", "cli")


def requirements() -> list[Requirement]:
    config = pyproject()
    project = config["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    groups = load_dev().group_requirements(config["dependency-groups"], "dev")
    return [Requirement(line) for line in [*project["dependencies"], *extras, *groups]]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def exact_version(constraint: Requirement) -> str:
    (specifier,) = constraint.specifier
    assert specifier.operator == "=="
    return specifier.version


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_extras_are_those_of_the_design() -> None:
    assert set(pyproject()["project"]["optional-dependencies"]) == set(EXTRAS)


@pytest.mark.parametrize("extra", sorted(TOLD_BY))
def test_an_extra_brings_the_packages_whose_absence_names_it(extra: str) -> None:
    brought = brought_by(extra)
    distributions = importlib.metadata.packages_distributions()
    missing = [each for each in TOLD_BY[extra] if not brought & {*map(canonicalize_name, distributions[each])}]
    assert missing == []


def test_the_api_is_enough_for_a_service_and_its_commands() -> None:
    """What serves is tested without all else in `tests/integration/test_service_without_torch.py`."""
    assert modules_beyond("api") & {"typer", "rich", "httpx", "plotly", "numba"} == set()
    assert modules_beyond("api") >= {"torch", "tokenizers", "safetensors", "pytest"}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_requirements_are_bounded_and_satisfied_by_the_constraints(requirement: Requirement) -> None:
    assert "<" in {specifier.operator for specifier in requirement.specifier}
    name = canonicalize_name(requirement.name)
    versions = [exact_version(each) for each in constraints() if canonicalize_name(each.name) == name]
    assert versions
    assert all(requirement.specifier.contains(version) for version in versions)


def test_constraints_are_exact_and_named_once_per_environment() -> None:
    seen = [(canonicalize_name(constraint.name), str(constraint.marker)) for constraint in constraints()]
    assert len(set(seen)) == len(seen)
    assert all(exact_version(constraint) for constraint in constraints())


def test_everything_installed_is_constrained() -> None:
    installed = {canonicalize_name(distribution.name) for distribution in importlib.metadata.distributions()}
    assert installed - {canonicalize_name(constraint.name) for constraint in constraints()} == {"penstock", "pip"}


def test_wheel_holds_every_source_file(wheel_names: set[str]) -> None:
    sources = {
        f"penstock/{name}/{path.relative_to(folder)}"
        for name, folder in packages().items()
        for path in folder.rglob("*.py")
    }
    assert {name for name in wheel_names if name.endswith(".py")} == sources


def test_wheel_says_that_it_is_typed_and_licensed(wheel_names: set[str]) -> None:
    assert {f"penstock/{name}/py.typed" for name in packages()} <= wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
