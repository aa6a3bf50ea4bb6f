"""Plain English: names name their content, docstrings stand for themselves, and no text has a retired word."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.repository import ROOT

CLEAN: Final = ("agent", "api", "benchmarks", "cli", "client", "core", "kube", "operator", "planner", "trainer", "view")
"""The components without such names and docstrings; others are added once they have none."""

DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
"""What a docstring describes: the module, and things with a name."""

NAMES_WITHOUT_CONTENT: Final = frozenset({"asked", "each", "found", "looked", "told"})
_ONLY_REFERS: Final = re.compile(r"See [`\w]")

WITH_TEXTS: Final = (*CLEAN, ".github", "deploy", "docs", "helm", "tests", "tools")
"""The folders whose texts have none of `RETIRED`, besides the files at the top."""

RETIRED: Final = re.compile(
    r"(?<![\w-])(?:anew|whoever|beside|mend(?:s|ed|ing)?|for ever|a text(?! (?:file|editor))|teller)(?![\w-])",
    re.IGNORECASE,
)
"""Words that are never needed: again, the caller, next to, fix, forever, a string, writer."""

EXCUSED: Final = {
    Path("tests/architecture/test_language.py"): "it names the words",
}
"""Files with a retired word, and the reason; at most five."""

GENERATED: Final = frozenset({"crds", "crd-files", "go", "__pycache__"})
"""Folders whose texts are made from others that are checked, or are of other projects."""

TEXTS: Final = frozenset({".css", ".html", ".js", ".json", ".md", ".sh", ".toml", ".tpl", ".txt", ".yaml", ".yml"})


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


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and string of Python code, or of every line of another file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def dangling_strings(tree: ast.Module) -> Iterator[int]:
    """Lines of strings that are statements, and neither docstrings nor descriptions of the assignment before."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            statements: list[ast.stmt] = block if isinstance(block, list) else []
            for number, statement in enumerate(statements):
                if not isinstance(statement, ast.Expr) or not is_string(statement.value):
                    continue
                before = statements[number - 1] if number else None
                is_docstring = number == 0 and field == "body" and isinstance(node, DOCUMENTED)
                if not is_docstring and not isinstance(before, ast.Assign | ast.AnnAssign):
                    yield statement.lineno


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


@pytest.mark.parametrize("folder", [*WITH_TEXTS, "."])
def test_texts_have_no_retired_words(folder: str) -> None:
    below = ROOT.glob("*.*") if folder == "." else (ROOT / folder).rglob("*.*")
    files = sorted(path for path in below if path.suffix in TEXTS | {".py"} and not GENERATED & set(path.parts))
    assert files
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in files
        if path.relative_to(ROOT) not in EXCUSED
        for line, text in texts(path)
        for match in RETIRED.finditer(text)
    ]
    assert not hits, "\n".join(hits)


def test_excuses_are_few_and_needed() -> None:
    assert len(EXCUSED) <= 5
    assert [path for path in EXCUSED if not any(RETIRED.search(text) for _, text in texts(ROOT / path))] == []


@pytest.mark.parametrize("folder", ["tests", "deploy", "tools"])
def test_functions_name_what_they_return(folder: str) -> None:
    names = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.lower() in NAMES_WITHOUT_CONTENT
    ]
    assert not names, "\n".join(names)


@pytest.mark.parametrize("folder", [*CLEAN, "deploy", "tests", "tools"])
def test_no_string_dangles(folder: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in dangling_strings(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Docstring."""\nX = 1\n"""Of X."""\n', []),
        ('def f():\n    """Docstring."""\n    return 1\n', []),
        ('class A:\n    x: int\n    """Of x."""\n', []),
        ('import os\n"""Of what?"""\n', [2]),
        ('def f():\n    return 1\n    "after"\n', [3]),
        ('X = 1\n"""Of X."""\n"""Again."""\n', [3]),
        ('if True:\n    "inside"\n', [2]),
        ("def f():\n    ...\n", []),
    ],
)
def test_a_dangling_string_is_found(source: str, lines: list[int]) -> None:
    assert list(dangling_strings(ast.parse(source))) == lines


@pytest.mark.parametrize(
    "text", ["start anew", "for ever", "Beside it", "it is mended", "5 is not a text", "the teller"]
)
def test_retired_words_are_recognised(text: str) -> None:
    assert RETIRED.search(text)


@pytest.mark.parametrize("text", ["besides", "recommended", "amending", "a text file", "forever", "storyteller"])
def test_other_words_are_fine(text: str) -> None:
    assert not RETIRED.search(text)


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
