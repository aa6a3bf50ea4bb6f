"""The repository as tests of its own shape see it: files, components, configuration, and the `dev` script."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def components() -> list[Path]:
    """The component folders: those at the top that hold a part of the `penstock` namespace, as the chart's does not."""
    return sorted({path.parents[2] for path in ROOT.glob("*/penstock/*/__init__.py")})


@cache
def packages() -> dict[str, Path]:
    """Each package directly below the namespace, by its short name (`core`, `planner`, ...)."""
    return {path.name: path for path in sorted(ROOT.glob("*/penstock/*")) if (path / "__init__.py").exists()}


def source_files() -> list[Path]:
    return sorted(path for component in components() for path in component.rglob("*.py"))


def python_files() -> list[Path]:
    """Every Python file of the repository, `dev`, benchmarks, what deploys and tests among them."""
    others = [path for folder in ("tests", "benchmarks", "deploy", "tools") for path in (ROOT / folder).rglob("*.py")]
    return sorted([*source_files(), *others, ROOT / "dev"])


def pyproject() -> dict[str, Any]:
    """The repository's, which names the members of the workspace and configures all tools."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def members() -> dict[str, dict[str, Any]]:
    """What each member of the workspace says of itself, by its folder."""
    folders = pyproject()["tool"]["uv"]["workspace"]["members"]
    return {folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in folders}


def scripts() -> dict[str, str]:
    """The programs of all members, and the function that each runs."""
    return {name: function for project in members().values() for name, function in project.get("scripts", {}).items()}
