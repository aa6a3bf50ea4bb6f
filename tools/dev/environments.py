"""The virtual environments of this repository: what has to be in each, and whether it already is."""

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
"""The name at the begin of a requirement, and its extras."""
INSTALLING = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_COMPILE_BYTECODE": "1",  # as pip does; else every process compiles torch itself, which takes seconds
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_SYSTEM_CERTS": "true",
}
"""Settings of uv and pip, unless the user's own say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment: some members of the workspace, editable, with what they need, and a dependency group.

    ``tests`` are folders of tests that run there, and so without anything else.
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
        """Written last, so that an interrupted installation never looks finished."""
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
    """The repository's pyproject.toml, and that of each member by its folder."""

    root: Mapping[str, Any]
    members: Mapping[str, Mapping[str, Any]]


def group_requirements(groups: Mapping[str, Sequence[Any]], name: str) -> list[str]:
    """The requirements of a dependency group, included groups expanded (PEP 735)."""
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
    """The folders of the members that these requirements install, which need each other by name and extra."""
    projects = {member["project"]["name"]: member["project"] for member in members.values()}
    waiting, needed = list(requirements), set[tuple[str, str]]()
    while waiting:
        match = REQUIREMENT.match(waiting.pop())
        if match is None or match[1] not in projects:
            continue
        project = projects[match[1]]
        extras = (match[2] or "").split(",")
        wanted = {"": project["dependencies"], **project.get("optional-dependencies", {})}
        for part in {"", *extras} - {part for name, part in needed if name == match[1]}:
            needed.add((match[1], part))
            waiting += wanted[part]
    return [folder for folder, member in members.items() if (member["project"]["name"], "") in needed]


def environment_key(environment: Environment, workspace: Workspace, constraints: bytes) -> str:
    """Changes whenever the installed environment would: members, dependencies, interpreter, the repository's place.

    All that a member says of itself is among what is installed, its version and programs too.
    """
    folders = needed_members(environment.members, workspace.members)
    parts = {
        "constraints": hashlib.sha256(constraints).hexdigest(),
        "group": group_requirements(workspace.root["dependency-groups"], environment.group),
        "installing": INSTALLING,
        "members": {folder: workspace.members[folder] for folder in folders},
        "python": [platform.python_version(), sys.base_prefix],
        "root": str(ROOT),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(marker_text: str | None, key: str, nvidia: bool) -> bool:
    """Whether a finished environment fits; one with CPU wheels no longer does once there is a GPU."""
    if marker_text is None:
        return False
    found_key, _, build = marker_text.strip().partition(" ")
    return found_key == key and not (nvidia and build == "cpu")


def read_marker(environment: Environment) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return environment.marker.read_text()
    return None
