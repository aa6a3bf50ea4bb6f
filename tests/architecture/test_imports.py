"""Which component may import what, beyond import-linter's layers and what members declare: purity, late imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT, packages, scripts

PURE = ("core", "planner", "view")
IMPURE_FOLDERS = {
    *(Path("core/penstock/core") / each for each in ("host", "run", "serialization")),
    Path("planner/penstock/planner/worker"),
}
"""What reads and writes for all, and what plans in a process of its own."""
IMPURE_MODULES = {
    *("datetime", "time"),  # the clock
    *("getpass", "os", "platform", "sys", "uuid"),  # the machine and its environment
    *("glob", "logging", "pathlib", "shutil", "tempfile"),  # files
    *("http", "select", "socket", "ssl", "urllib"),  # the network
    *("asyncio", "ctypes", "multiprocessing", "signal", "subprocess", "threading"),  # other things running
    "secrets",  # chance; `random` is checked below
}
EXEMPT = {"core/penstock/core/instants.py": {"datetime"}}  # converts only, as the test after it makes sure
IMPURE_BUILTINS = {"exec", "eval", "input", "open", "print"}
FRAMEWORKS = ("fastapi", "httpx", "kopf", "kubernetes", "prometheus_client", "pydantic", "torch", "transformers")


def trees(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(packages()[package].rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def pure_trees(package: str) -> Iterator[tuple[Path, ast.Module]]:
    return ((path, tree) for path, tree in trees(package) if not IMPURE_FOLDERS & set(path.parents))


def imported_modules(tree: ast.Module) -> set[str]:
    """Every module imported anywhere in a file, inside functions too, by full name."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


def late_and_early(tree: ast.Module, component: str) -> tuple[set[str], set[str]]:
    """The modules of a component that a file imports inside functions, and those that it imports to be loaded: what is
    imported for types alone is neither.
    """
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    others = [node for node in tree.body if node not in functions and node not in for_types]
    within, outside = (imported_modules(ast.Module([*nodes], [])) for nodes in (functions, others))
    late, early = ({name for name in names if f"{name}.".startswith(f"{component}.")} for names in (within, outside))
    return late, early


Trees = Callable[[str], Iterator[tuple[Path, ast.Module]]]


def imported_tops(package: str, among: Trees = trees) -> dict[str, set[str]]:
    """Top-level names imported by each file of a package, those of its own distribution left out."""
    return {
        str(path): {module.partition(".")[0] for module in imported_modules(tree)} - {"penstock"}
        for path, tree in among(package)
    }


def modules_loaded_by(program: str) -> set[str]:
    """Top-level names in `sys.modules` after a program ran in an interpreter of its own."""
    script = f"{program}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {module.partition(".")[0] for module in done.stdout.split()}


def import_everything(package: str, but: str = "") -> str:
    return (
        f"import importlib, pkgutil, penstock.{package} as top\n"
        f"for found in pkgutil.walk_packages(top.__path__, 'penstock.{package}.'):\n"
        f"    if found.name != 'penstock.{package}.{but}': importlib.import_module(found.name)"
    )


def test_no_relative_imports() -> None:
    relative = [
        str(path)
        for package in packages()
        for path, tree in trees(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_only_commands_reach_beyond_what_a_client_needs() -> None:
    """Commands import other components inside functions, and late what is in `cli.local`, which needs the agent."""
    folder = Path("cli/penstock/cli")
    beyond = set(packages()) - {"cli", "client", "core", "view"}
    late, early = dict[Path, set[str]](), dict[Path, set[str]]()
    for path, tree in trees("cli"):
        found = [late_and_early(tree, f"penstock.{each}") for each in beyond]
        late[path] = set().union(*(names for names, _ in found))
        early[path] = set().union(late_and_early(tree, "penstock.cli.local")[1], *(names for _, names in found))
    old_name = folder / "probe.py"
    assert {path for path, names in late.items() if names and path.parent == folder} == set()
    assert {path for path, names in early.items() if names and path.parent != folder / "local"} == {old_name}
    assert any(names for path, names in late.items() if path.parent == folder / "commands")


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_touch_nothing_outside(package: str) -> None:
    tops = imported_tops(package, pure_trees)
    impure = {path: (names & IMPURE_MODULES) - EXEMPT.get(path, set()) for path, names in tops.items()}
    assert {path: names for path, names in impure.items() if names} == {}


def test_instants_are_converted_without_a_clock() -> None:
    text = (ROOT / "core/penstock/core/instants.py").read_text()
    assert [word for word in ("now(", "today(", "utcnow(", "timestamp(") if word in text] == []


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_draw_from_seeded_generators_only(package: str) -> None:
    drawn = [
        f"{path}:{node.lineno}"
        for path, tree in pure_trees(package)
        if "random" in imported_modules(tree)
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module == "random")
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and node.attr != "Random")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "random.Random" and not node.args)
    ]
    assert drawn == []


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_call_nothing_impure(package: str) -> None:
    calls = [
        f"{path}:{node.lineno} {node.func.id}"
        for path, tree in pure_trees(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS
    ]
    assert calls == []


def test_one_module_reads_yaml() -> None:
    readers = [path for package in packages() for path, tops in imported_tops(package).items() if "ruamel" in tops]
    assert readers == ["core/penstock/core/serialization/yamltext.py"]


def test_core_loads_the_standard_library_only() -> None:
    """But for YAML, which is loaded by who reads it."""
    bare = modules_loaded_by("pass")
    loaded = modules_loaded_by(import_everything("core", but="serialization.yamltext")) - bare
    assert loaded - sys.stdlib_module_names == {"penstock"}


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_load_no_framework(package: str) -> None:
    assert modules_loaded_by(import_everything(package)) & set(FRAMEWORKS) == set()


def test_the_command_starts_without_the_heavy_parts() -> None:
    """`penstock --help` and completion answer at once, and planning works where PyTorch is not installed."""
    module, _, function = scripts()["penstock"].partition(":")
    loaded = modules_loaded_by(f"from {module} import {function}")
    assert loaded & {"numba", "numpy", "plotly", "scipy", "tokenizers", "torch"} == set()


def test_what_supervises_an_attempt_leaves_its_memory_to_the_ranks() -> None:
    """A pod has one agent next to the ranks, and no folder in which compiled functions could be cached."""
    loaded = modules_loaded_by("import penstock.agent.supervisor, penstock.agent.pod")
    assert loaded & {"fastapi", "numba", "plotly", "scipy", "sqlalchemy", "tokenizers", "torch"} == set()
