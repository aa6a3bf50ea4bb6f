"""What a member of the workspace declares is what it imports, and both keep import-linter's contracts."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.members import distributions, packages_of
from tests.support.repository import members, packages, pyproject

LOADED_BY_OTHERS = {"api": {"httptools", "psycopg", "uvloop"}}
"""Declared and not imported: uvicorn and SQLAlchemy load them by name."""

LATE = ("cli",)
"""Its modules are imported by the command that needs them, and import at their top what that command needs."""


def declared(member: str, *, extras: bool = True) -> set[str]:
    """The distributions that a member asks for."""
    project = members()[member]
    optional = project.get("optional-dependencies", {}).values() if extras else ()
    return {canonicalize_name(Requirement(line).name) for line in chain(project["dependencies"], *optional)}


def sources(member: str) -> dict[str, Path]:
    """Its modules, by full name."""
    found = {}
    for name in packages_of(member):
        for path in packages()[name].rglob("*.py"):
            parts = path.relative_to(packages()[name].parent).with_suffix("").parts
            found[".".join(["penstock", *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def imported(path: Path, *, late: bool) -> frozenset[str]:
    """The modules that a file imports: at its top, and with ``late`` also inside functions and for types alone."""
    return frozenset(_imports(ast.parse(path.read_text()), late))


def _imports(node: ast.AST, late: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif late or not _is_late(child):
            yield from _imports(child, late)


def _is_late(node: ast.AST) -> bool:
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def distribution_of(module: str) -> str | None:
    """The distribution that holds a module; none for the standard library's."""
    top, *rest = module.split(".")
    if top == "penstock":
        return next((f"penstock-{member}" for member in members() if rest[0] in packages_of(member)), None)
    if top in sys.stdlib_module_names:
        return None
    (name,) = distributions()[top]
    return name


def needed(member: str, *, late: bool = True) -> set[str]:
    """The distributions that a member imports, its own left out."""
    modules = chain.from_iterable(imported(path, late=late) for path in sources(member).values())
    return {name for module in modules if (name := distribution_of(module)) is not None} - {f"penstock-{member}"}


@pytest.mark.parametrize("member", sorted(members()))
def test_a_member_declares_what_it_imports_and_nothing_else(member: str) -> None:
    assert declared(member) - LOADED_BY_OTHERS.get(member, set()) == needed(member)


@pytest.mark.parametrize("member", sorted(set(members()) - set(LATE)))
def test_an_extra_is_imported_inside_functions_alone(member: str) -> None:
    assert needed(member, late=False) <= declared(member, extras=False)


def loaded_by(module: str, known: dict[str, Path]) -> set[str]:
    """What is imported with a module, through the modules that are known."""
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name in known and name not in found:
            found.add(name)
            waiting += imported(known[name], late=False)
    return found


@pytest.mark.parametrize("member", LATE)
def test_a_command_starts_without_any_extra(member: str) -> None:
    known = {name: path for each in members() for name, path in sources(each).items()}
    (entry,) = members()[member]["scripts"].values()
    loaded = {distribution_of(module) for module in loaded_by(entry.partition(":")[0], known)}
    assert loaded <= {f"penstock-{member}", *declared(member, extras=False)}


def contracts(kind: str) -> list[dict[str, Any]]:
    return [each for each in pyproject()["tool"]["importlinter"]["contracts"] if each["type"] == kind]


def modules_of(distribution: str) -> set[str]:
    """The modules by which contracts name a distribution."""
    if distribution.startswith("penstock-"):
        return {f"penstock.{package}" for package in packages_of(distribution.removeprefix("penstock-"))}
    return {top for top, names in distributions().items() if distribution in names}


def test_members_need_those_of_lower_layers_alone() -> None:
    (contract,) = contracts("layers")
    levels = {module.strip(): level for level, line in enumerate(contract["layers"]) for module in line.split("|")}
    upward = [
        f"{member} needs {name}"
        for member in members()
        for name in declared(member)
        if name.startswith("penstock-")
        and levels[f"penstock.{name.removeprefix('penstock-')}"] <= levels[f"penstock.{member}"]
    ]
    assert upward == []


@pytest.mark.parametrize("contract", contracts("forbidden"), ids=lambda contract: str(contract["name"]))
def test_no_member_asks_for_what_it_must_not_import(contract: dict[str, Any]) -> None:
    sources, forbidden = set(contract["source_modules"]), set(contract["forbidden_modules"]) - {"penstock.planning"}
    asked = {
        member: forbidden & set().union(*(modules_of(name) for name in declared(member)))
        for member in members()
        if sources & modules_of(f"penstock-{member}")
    }
    assert {member: modules for member, modules in asked.items() if modules} == {}
