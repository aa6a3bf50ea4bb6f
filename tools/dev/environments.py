"""Virtual environments of the repository: their contents, and whether an existing one is up to date."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?")
"""Name at the start of a requirement, and its extras."""
INSTALLER_SETTINGS = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_COMPILE_BYTECODE": "1",  # as pip does; otherwise every process would compile torch, which takes seconds
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_SYSTEM_CERTS": "true",
}
"""Default environment variables of uv and pip; the user's take precedence."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Virtual environment: editable members of the workspace with their dependencies, and a dependency group.

    ``tests`` are the folders of tests that run in it, to prove that they need no other member.
    """

    folder: str
    members: tuple[str, ...]
    group: str
    tests: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def marker(self) -> Path:
        """File written last, so that an interrupted installation never counts as finished."""
        return self.path / ".dev-key"


FULL = Environment(folder=".venv", members=("penstock-cli[run,serve]", "penstock-operator"), group="dev")
CORE = Environment(
    folder=".venv-core", members=("penstock-planner",), group="test", tests=("tests/core", "tests/planner")
)
OPERATOR = Environment(
    folder=".venv-operator", members=("penstock-operator",), group="test", tests=("tests/kube", "tests/operator")
)
SMALL = (CORE, OPERATOR)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Parsed pyproject.toml of the repository, and of each member by its folder."""

    root: Mapping[str, Any]
    members: Mapping[str, Mapping[str, Any]]


def group_requirements(groups: Mapping[str, Sequence[Any]], name: str) -> list[str]:
    """Return the requirements of a dependency group, with included groups expanded (PEP 735)."""
    requirements: list[str] = []
    for entry in groups[name]:
        if isinstance(entry, str):
            requirements.append(entry)
        else:
            requirements += group_requirements(groups, entry["include-group"])
    return requirements


def read_workspace() -> Workspace:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = root["tool"]["uv"]["workspace"]["members"]
    members = {folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in folders}
    return Workspace(root=root, members=members)


def needed_members(requirements: Sequence[str], members: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the folders of the members that these requirements install, directly or as dependencies of members."""
    projects = {member["project"]["name"]: member["project"] for member in members.values()}
    unresolved, needed = list(requirements), set[tuple[str, str]]()
    while unresolved:
        match = REQUIREMENT.match(unresolved.pop())
        if match is None or match[1] not in projects:
            continue
        project = projects[match[1]]
        extras = (match[2] or "").split(",")
        dependencies = {"": project["dependencies"], **project.get("optional-dependencies", {})}
        for extra in {"", *extras} - {extra for name, extra in needed if name == match[1]}:
            needed.add((match[1], extra))
            unresolved += dependencies[extra]
    return [folder for folder, member in members.items() if (member["project"]["name"], "") in needed]


def environment_key(environment: Environment, workspace: Workspace, constraints: bytes) -> str:
    """Hash of everything that determines the installed environment.

    These are the constraints, the dependency group, the complete pyproject.toml of the members (their version and
    scripts are installed, too), the interpreter, and the path of the repository.
    """
    folders = needed_members(environment.members, workspace.members)
    parts = {
        "constraints": hashlib.sha256(constraints).hexdigest(),
        "group": group_requirements(workspace.root["dependency-groups"], environment.group),
        "installing": INSTALLER_SETTINGS,
        "members": {folder: workspace.members[folder] for folder in folders},
        "python": [platform.python_version(), sys.base_prefix],
        "root": str(ROOT),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(marker_text: str | None, key: str, nvidia: bool) -> bool:
    """Whether a finished environment is up to date. With a GPU, one with PyTorch's CPU build is not."""
    if marker_text is None:
        return False
    installed_key, _, build = marker_text.strip().partition(" ")
    return installed_key == key and not (nvidia and build == "cpu")


def read_marker(environment: Environment) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return environment.marker.read_text()
    return None
