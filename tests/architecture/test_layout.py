"""The shape of the repository: namespace folders stay bare, files and functions stay short."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT, components, packages, pyproject, python_files, source_files

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def long_functions(text: str) -> list[str]:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [
        f"{function.name} at line {function.lineno}"
        for function in functions
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    ]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_repository_is_seen_at_all() -> None:
    assert {"core", "planner", "view", "trainer", "cli"} <= set(packages())
    assert len(source_files()) > 20


def test_namespace_folders_hold_nothing_but_packages() -> None:
    """An `__init__.py` next to the packages would hide every other component from import."""
    strays = [name(path) for component in components() for path in component.glob("*.py")]
    strays += [name(path) for component in components() for path in (component / "penstock").glob("*.py")]
    assert strays == []


def test_no_package_under_tests() -> None:
    """A package there could replace a module of the standard library, as `tests/operator` would."""
    assert [name(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_every_source_folder_is_a_package() -> None:
    folders = {path.parent for path in source_files()}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", sorted(set(packages()) - {"client", "core"}))  # they say what people ask for
def test_package_init_is_a_docstring_only(package: str) -> None:
    body = ast.parse((packages()[package] / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_no_file_is_too_long() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    found = {name(path): long_functions(path.read_text()) for path in python_files()}
    assert {path: functions for path, functions in found.items() if functions} == {}


@pytest.mark.parametrize(("body_lines", "is_long"), [(MAX_FUNCTION_LINES - 1, False), (MAX_FUNCTION_LINES, True)])
def test_long_functions_are_found(body_lines: int, is_long: bool) -> None:
    text = "class A:\n    async def f(self):\n" + "        pass\n" * body_lines
    assert bool(long_functions(text)) == is_long


def test_tests_are_found_once() -> None:
    """Equal paths below tests/ cannot collide, but a test outside the pattern would never run."""
    helpers = {"conftest.py"}
    lost = [
        name(path)
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_") and path.name not in helpers and "support" not in path.parts
    ]
    assert lost == []


def test_configuration_names_every_component() -> None:
    config = pyproject()
    folders = {component.name for component in components()}
    assert set(config["tool"]["uv"]["workspace"]["members"]) == folders
    assert set(config["tool"]["mypy"]["mypy_path"]) == folders
    assert folders <= set(config["tool"]["mypy"]["files"])
    assert set(config["tool"]["ruff"]["src"]) == folders
    assert set(config["tool"]["importlinter"]["root_packages"]) == {f"penstock.{package}" for package in packages()}


def test_everything_with_python_in_it_is_type_checked() -> None:
    files = pyproject()["tool"]["mypy"]["files"]
    tops = {path.relative_to(ROOT).parts[0] for path in python_files()}
    assert tops <= set(files)


def test_no_module_hides_one_of_the_standard_library() -> None:
    """Only what stands at the top of an import path can: component folders themselves, never what is below."""
    hiding = [component.name for component in components() if component.name in sys.stdlib_module_names]
    assert [folder for folder in hiding if (ROOT / folder / "__init__.py").exists()] == []
