"""Names of variables and functions name their content, and no docstring only refers to another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.repository import ROOT

CLEAN: Final = ("agent", "api", "benchmarks", "cli", "client", "core", "kube", "operator", "planner", "trainer", "view")
"""The components without such names and docstrings; others are added once they have none."""

NAMES_WITHOUT_CONTENT: Final = frozenset({"asked", "each", "found", "looked", "told"})
_ONLY_REFERS: Final = re.compile(r"See [`\w]")


def named(node: ast.AST) -> str | None:
    """The name that a node binds, of a variable, an argument or a function. Fields are no variables."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.ExceptHandler(name=name):
            return name
        case ast.MatchMapping(rest=name) | ast.alias(asname=name):
            return name
    return None


def fields(tree: ast.Module) -> set[ast.AST]:
    """The targets of annotations in classes: fields, whose names may be part of a data format."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {entry.target for cls in classes for entry in cls.body if isinstance(entry, ast.AnnAssign)}


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Line and description of every name without content, and of every docstring that only refers."""
    tree = ast.parse(source)
    exempt = fields(tree)
    for node in ast.walk(tree):
        name = None if node in exempt else named(node)
        if name in NAMES_WITHOUT_CONTENT:
            yield getattr(node, "lineno", 0), f"{name} does not name its content"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text is not None and _ONLY_REFERS.match(text):
                yield getattr(node, "lineno", 1), "the docstring refers to another: leave it out, or say what differs"


@pytest.mark.parametrize("component", CLEAN)
def test_a_component_is_clean(component: str) -> None:
    paths = sorted((ROOT / component).rglob("*.py"))
    assert paths
    mistakes = [
        f"{path.relative_to(ROOT)}:{line}: {mistake}"
        for path in paths
        for line, mistake in violations(path.read_text(encoding="utf-8"))
    ]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for each in (): pass",
        "for _, (told, _) in (): pass",
        "[each for each in ()]",
        "{key: asked for key, asked in ()}",
        "(looked := 1)",
        "def told(): pass",
        "async def asked(): pass",
        "class A:\n    def found(self): pass",
        "def f(found): pass",
        "def f(*, asked=None): pass",
        "def f(*told): pass",
        "def f(**told): pass",
        "lambda each: each",
        "with open('x') as found: pass",
        "try: pass\nexcept OSError as told: pass",
        "import json as found",
        "match 1:\n    case found: pass",
        "match 1:\n    case {**told}: pass",
        "match 1:\n    case [*each]: pass",
        "found: int = 1",
        "class A:\n    def f(self):\n        found: int = 1",
    ],
)
def test_a_name_without_content_is_a_mistake(source: str) -> None:
    assert [mistake.partition(" ")[2] for _, mistake in violations(source)] == ["does not name its content"]


@pytest.mark.parametrize(
    "source",
    [
        '"""See `X`."""',
        'def f():\n    """See `X`."""',
        'def f():\n    """See `X`. Raises OSError."""',
        'class A:\n    """See penstock.X, as for all that follow."""',
        'class A:\n    async def f(self):\n        """See X."""',
    ],
)
def test_a_docstring_that_only_refers_is_a_mistake(source: str) -> None:
    assert len(list(violations(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "pods = [pod for pod in ()]",
        "class Finding:\n    found: str",
        "print(finding.found)",
        "Finding(found='missing')",
        "finding.found = 1",
        "founder = reach = 1",
        '# found by each\n"""What each told when asked."""',
        'def f():\n    """The plan. See `X` for its format."""',
        'def f():\n    """Seed of a run."""',
    ],
)
def test_a_name_with_content_and_a_docstring_of_its_own_are_fine(source: str) -> None:
    assert not list(violations(source))
