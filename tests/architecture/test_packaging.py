"""What is shipped and what it asks for: the members' wheels and versions, bounded requirements, exact constraints."""

from __future__ import annotations

import importlib.metadata
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.core.host.members import MEMBERS as NAMED_WHEN_MISSING
from tests.support.members import SERVICE, brought_by, distributions, modules_beyond, packages_of
from tests.support.repository import ROOT, components, members, packages, pyproject
from tools.dev import wheels
from tools.dev.environments import group_requirements

UNREGISTERED = "Private :: Do Not Upload"


def requirements() -> list[Requirement]:
    """Those on other distributions than ours, of all members and of development."""
    lines = set(group_requirements(pyproject()["dependency-groups"], "dev"))
    for project in members().values():
        lines |= {*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())}
    return [Requirement(line) for line in sorted(lines) if not line.startswith("penstock-")]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def exact_version(constraint: Requirement) -> str:
    (specifier,) = constraint.specifier
    assert specifier.operator == "=="
    return specifier.version


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all wheels."""
    return wheels.build(tmp_path_factory.mktemp("wheels")).parent


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_component_is_a_member_named_after_it() -> None:
    assert {member: project["name"] for member, project in members().items()} == {
        component.name: f"penstock-{component.name}" for component in components()
    }
    sources = pyproject()["tool"]["uv"]["sources"]
    assert sources == {f"penstock-{member}": {"workspace": True} for member in members()}


def test_all_members_have_one_version() -> None:
    versions = {project["version"] for project in members().values()}
    assert len(versions) == 1
    assert {importlib.metadata.version(project["name"]) for project in members().values()} == versions


@pytest.mark.parametrize("member", sorted(members()))
def test_members_need_each_other_in_the_same_version(member: str) -> None:
    project = members()[member]
    lines = [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
    ours = [line for line in lines if line.startswith("penstock-")]
    assert [line for line in ours if not line.endswith(f"=={project['version']}")] == []


def test_no_member_can_be_uploaded_before_its_name_is_registered() -> None:
    assert [member for member, project in members().items() if UNREGISTERED not in project["classifiers"]] == []


@pytest.mark.parametrize("member", sorted(NAMED_WHEN_MISSING))
def test_a_member_brings_the_packages_whose_absence_names_it(member: str) -> None:
    brought = brought_by(member)
    packages = [each for each in NAMED_WHEN_MISSING[member] if not each.startswith("penstock.")]
    assert [each for each in packages if not brought & distributions()[each]] == []


def test_the_service_s_members_are_enough_for_it_and_its_commands() -> None:
    """What serves is tested without all else in `tests/integration/test_service_without_torch.py`."""
    beyond = modules_beyond(*SERVICE)
    assert beyond & {"typer", "rich", "httpx", "plotly", "numba", "penstock.api", "penstock.kube"} == set()
    assert beyond >= {"torch", "tokenizers", "safetensors", "pytest", "penstock.trainer", "penstock.operator"}


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
    ours = {project["name"] for project in members().values()}
    assert installed - {canonicalize_name(constraint.name) for constraint in constraints()} == {"pip", *ours}


@pytest.mark.parametrize("member", sorted(members()))
def test_a_wheel_holds_every_source_file_of_its_member(built: Path, member: str) -> None:
    folders = {name: packages()[name] for name in packages_of(member)}
    sources = {
        f"penstock/{name}/{path.relative_to(folder)}"
        for name, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    (wheel,) = built.glob(f"penstock_{member}-*.whl")
    held = names_in(wheel)
    assert {name for name in held if name.endswith(".py")} == sources
    assert {f"penstock/{name}/py.typed" for name in folders} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_constraint_names_the_wheel_of_every_member(built: Path) -> None:
    lines = [Requirement(line) for line in (built / wheels.CONSTRAINT).read_text().splitlines()]
    assert {line.name for line in lines} == {project["name"] for project in members().values()}
    assert {line.url for line in lines} == {wheel.as_uri() for wheel in built.glob("*.whl")}
